# SPDX-License-Identifier: Apache-2.0
"""The command, in a process of its own, through a real socket, with a client that nobody here wrote."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from serving import FOLDER, TEMPLATE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "nnfront.cli", "serve", str(FOLDER), "--port", "0", "--api-key", "k"]
    command += ["--chat-template", str(template)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the server did not start")
        with ThreadPoolExecutor(1) as reader:
            rest = reader.submit(process.stderr.read)  # a full pipe would stop it
            yield found[0], process
            process.kill()
            rest.result()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


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
    assert process.wait(timeout=30) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")
