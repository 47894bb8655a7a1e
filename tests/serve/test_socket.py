# SPDX-License-Identifier: Apache-2.0
"""The command, in a process of its own, through a real socket, with a client that nobody here wrote."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from patience import HANGS_SECONDS
from safetensors.torch import load_file, save
from serving import FOLDER, TEMPLATE

import nnfront as nn

BUSY = r"num_requests_(?:running|waiting)\{.*?\} (\S+)"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(template: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving(template) as found:
        yield found


@contextlib.contextmanager
def serving(
    template: Path, folder: Path = FOLDER, *flags: str, lines: list[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own; what it writes to stderr comes to `lines`."""
    command = [sys.executable, "-m", "nnfront.cli", "serve", str(folder), "--port", "0", "--api-key", "k"]
    command += ["--chat-template", str(template), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the server did not start")
        with ThreadPoolExecutor(1) as reader:
            rest = reader.submit(
                (lines if lines is not None else []).extend, process.stderr
            )  # a full pipe would stop it
            yield found[0], process
            process.kill()
            rest.result()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def raw(url: str, data: bytes, *, reads: bool = True) -> bytes:
    """Send bytes as they are; return what comes until the server closes, or soon after."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANGS_SECONDS) as connection:
        connection.sendall(data)
        if not reads:
            return b""
        found = bytearray()
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(1 << 16):
                found += part
        return bytes(found)


def post(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n"
    return head.encode() + body


def test_what_comes_broken_is_refused_and_leaves_nothing(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = server
    assert b" 400 " in raw(url, b"\x00\xff nonsense\r\n\r\n")
    assert b" 400 " in raw(url, post(b'{"prompt": "\xff\xfe"}'))
    assert b" 400 " in raw(url, post(b'{"prompt": [' + b"5," * 999_999 + b"5]}"))
    assert b" 413 " in raw(url, post(b'{"prompt": "' + b"x" * (9 << 20) + b'"}'))
    assert b" 200 " not in raw(url, b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 100_000)
    raw(url, post(b'{"prompt": ', length=50), reads=False)  # and no more
    stream = b'{"prompt": "import os", "stream": true, "ignore_eos": true, "max_tokens": 400}'
    for _ in range(4):
        raw(url, post(stream), reads=False)  # gone before anything comes
    holds_nothing_and_answers(url)


def holds_nothing_and_answers(url: str) -> None:
    with httpx2.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=HANGS_SECONDS) as http:
        end = time.monotonic() + HANGS_SECONDS
        while (busy := re.findall(BUSY, http.get("/metrics").text)) != ["0.0", "0.0"]:
            assert time.monotonic() < end, busy
            time.sleep(0.05)
        assert http.get("/health").status_code == 200
        reply = http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 2})
        assert reply.json()["usage"]["completion_tokens"] == 2


def test_a_body_without_a_length_is_limited_too(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = server
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    assert b" 413 " in raw(url, head + part * 9 + b"0\r\n\r\n")
    assert b" 400 " in raw(url, head + b"zz\r\n")


def test_who_does_not_read_or_closes_one_half_holds_up_nobody(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = server
    host, port = url.removeprefix("http://").split(":")
    stream = b'{"prompt": "import os", "stream": true, "ignore_eos": true, "max_tokens": 400, "logprobs": 20}'
    with contextlib.ExitStack() as held:
        slow = []
        for _ in range(4):
            connection = held.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(HANGS_SECONDS)
            connection.connect((host, int(port)))
            connection.sendall(post(stream))
            slow.append(connection)
        for connection in slow[2:]:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # the server ends what it began
                pass
        reply = httpx2.post(
            f"{url}/v1/completions",
            json={"prompt": "import os", "max_tokens": 2},
            headers={"authorization": "Bearer k"},
            timeout=HANGS_SECONDS,
        )
        assert reply.json()["usage"]["completion_tokens"] == 2  # while two do not read
    holds_nothing_and_answers(url)


@pytest.mark.matrix  # whole processes
def test_a_server_that_was_killed_in_the_middle_of_an_answer_begins_again_and_answers_alike(
    template: Path,
) -> None:
    body = {"prompt": "import os", "max_tokens": 9, "ignore_eos": True}
    texts = []
    for _ in range(2):
        with serving(template) as (url, process):
            with httpx2.Client(
                base_url=url, headers={"authorization": "Bearer k"}, timeout=HANGS_SECONDS
            ) as http:
                texts.append(http.post("/v1/completions", json=body).json()["choices"])
                with http.stream(
                    "POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}
                ) as answer:
                    assert next(answer.iter_lines()).startswith("data: {")
                    process.kill()
            process.wait()
    assert texts[0] == texts[1]


def test_new_weights_in_the_folder_are_served_when_the_server_is_told_so(
    template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    body = {"prompt": "import os", "max_tokens": 20, "ignore_eos": True}
    lines: list[str] = []

    def said(what: str, times: int) -> None:
        end = time.monotonic() + HANGS_SECONDS
        while sum(what in line for line in lines) < times:
            assert time.monotonic() < end, lines
            time.sleep(0.01)

    with (
        serving(template, folder, "--quant", "int8", lines=lines) as (url, process),
        httpx2.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=HANGS_SECONDS) as http,
    ):

        def text() -> str:
            return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

        before = text()
        put(folder, "model.safetensors", changed(folder / "model.safetensors"))
        with http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}
        ) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGUSR1)
            said("serving the weights that the folder holds now", 1)
            assert '"finish_reason":"length"' in [line for line in events if line.startswith("data: {")][-1]
        expected = nn.LLM.load(folder, quant="int8").generate("import os", max_new_tokens=20)
        assert text() == expected != before
        put(
            folder,
            "config.json",
            (folder / "config.json").read_bytes().replace(b'"rope_theta": 10000.0', b'"rope_theta": 20000.0'),
        )
        process.send_signal(signal.SIGUSR1)
        said("the weights stay as they are: the folder holds another model", 1)
        put(folder, "model.safetensors", b"nonsense")
        process.send_signal(signal.SIGUSR1)
        said("the weights stay as they are", 2)
        assert text() == expected


def changed(file: Path) -> bytes:
    """A checkpoint's tensors with others for its norms."""
    tensors = load_file(file)
    return save(
        {
            name: t * torch.linspace(0.5, 2, len(t)).to(t.dtype) if t.dim() == 1 else t
            for name, t in tensors.items()
        }
    )


def put(folder: Path, name: str, data: bytes) -> None:
    """A file in the place of another, which those who have it open keep."""
    (folder / "new").write_bytes(data)
    (folder / "new").replace(folder / name)


def test_the_server_answers_and_drains_when_it_is_told_to_end(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["pylib-3m"]
        messages = [{"role": "user", "content": "import os"}]
        with api.chat.completions.create(
            model="pylib-3m",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            max_tokens=150,
            extra_body={"ignore_eos": True},
        ) as stream:
            chunks = iter(stream)
            next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
    assert process.wait(timeout=HANGS_SECONDS) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")
