# SPDX-License-Identifier: Apache-2.0
"""`nnfront deploy` on a Ray of its own: what is lost when a replica is killed, and when one deployment replaces another."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from serving import FOLDER

import nnfront as nn

pytestmark = pytest.mark.slow
NAME = f"pylib-{os.getpid()}"
AT_A_TIME = 2
"""Requests that are in flight at a replica."""
PROMPTS = ["def main():\n", "import os\n\n", "class Path:\n    def ", "for each in "]
TOKENS = 60
COMMAND = [sys.executable, "-m", "nnfront", "deploy", str(FOLDER), "--name", NAME]
COMMAND += ["--max-num-seqs", str(AT_A_TIME), "--chunk", "32"]


class Deployment:
    """What was deployed, and how clients see it."""

    def __init__(self, url: str, address: str) -> None:
        self.url, self._address = url, address
        llm = nn.LLM.load(FOLDER)
        self._expected = {prompt: llm.generate(prompt, TOKENS, temperature=0.0) for prompt in PROMPTS}

    def again(self, *flags: str) -> None:
        """Replace it by another of its name."""
        environment = {**os.environ, "RAY_ADDRESS": self._address, "RAY_AUTH_MODE": "token"}
        done = subprocess.run(
            [*COMMAND, *flags], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr

    def ask(self, prompt: str, tokens: int = TOKENS) -> bool:
        """Whether there was an answer, which must be the model's."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        try:
            reply = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=120)
        except httpx2.TransportError:
            return False
        if reply.status_code != 200:
            return False
        answer = reply.json()
        assert answer["usage"]["completion_tokens"] == tokens
        assert self._expected[prompt].startswith(answer["choices"][0]["text"])
        return True

    def lost_while(self, act: Callable[[], None]) -> int:
        """How many requests have failed of those that six clients made until an action was done, and for a while after it."""
        ended = threading.Event()

        def client(number: int) -> list[bool]:
            answers = []
            while not ended.is_set():
                answers.append(self.ask(PROMPTS[(number + len(answers)) % len(PROMPTS)]))
            return answers

        with ThreadPoolExecutor(6) as threads:
            clients = [threads.submit(client, number) for number in range(6)]
            try:
                time.sleep(3)
                act()
                time.sleep(3)
            finally:
                ended.set()
            answers = [answer for each in clients for answer in each.result()]
        assert len(answers) > 20
        return answers.count(False)


def processes(title: str) -> set[int]:
    """The processes of this machine whose title begins so."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().startswith(title):
                found.add(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def replicas() -> set[int]:
    return processes(f"ray::ServeReplica:{NAME}:")


def wait_for(holds: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "--replicas", "2", "--port", str(port)]
    environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "token"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"at (http://\S+?)/; .* RAY_ADDRESS=(\S+)", line):
                break
        else:
            pytest.fail(said)
        with ThreadPoolExecutor(1) as reader:
            rest = reader.submit(process.stderr.read)  # a full pipe would stop it
            yield Deployment(found[1], found[2])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, rest.result()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_replica_that_is_killed_takes_with_it_what_was_in_flight_there_alone(
    deployment: Deployment,
) -> None:
    before = replicas()
    assert len(before) == 2
    lost = deployment.lost_while(lambda: os.kill(min(before), signal.SIGKILL))
    assert 1 <= lost <= AT_A_TIME
    wait_for(lambda: len(replicas() - {min(before)}) == 2)
    assert deployment.lost_while(lambda: None) == 0


def test_a_second_deployment_of_the_name_replaces_the_first_and_loses_nothing(
    deployment: Deployment,
) -> None:
    before = replicas()
    lost = deployment.lost_while(lambda: deployment.again("--replicas", "2", "--max-model-len", "128"))
    assert lost == 0
    assert not before & replicas()
    for _ in range(8):  # whichever replica answers
        (model,) = httpx2.get(f"{deployment.url}/v1/models", timeout=60).json()["data"]
        assert model["max_model_len"] == 128


def test_a_replica_of_two_ranks_answers_as_one_process_and_comes_back_when_a_rank_is_killed(
    deployment: Deployment,
) -> None:
    deployment.again("--replicas", "1", "--tp", "2")
    few = (
        12  # what two ranks add up differs in its last bits, and longer texts where two tokens are that close
    )
    assert all(deployment.ask(prompt, few) for prompt in PROMPTS[:3])
    (first,) = replicas()
    (other,) = processes("ray::Follower")
    os.kill(other, signal.SIGKILL)
    wait_for(lambda: first not in replicas())
    wait_for(lambda: deployment.ask(PROMPTS[0], few))
    assert processes("ray::Follower")
    assert other not in processes("ray::Follower")
