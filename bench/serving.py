# SPDX-License-Identifier: Apache-2.0
"""Load on a server: many clients at once through a socket, some of which leave in the middle of an answer.

    python bench/serving.py --overhead | --alone
    python bench/serving.py [--folder DIR] [--requests 2000] [--clients 64] [--leave 0.1] [--max-num-seqs 16]

Prints requests and tokens a second, times to first tokens and between tokens, whether answers that were asked for twice are equal, what the
server holds afterwards, and its memory before and after. The client's work is on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import torch
import uvicorn

import nnfront as nn
from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.engine.schedule import Limits
from nnfront.serve.app import app
from nnfront.serve.engine import Engine

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "checkpoints" / "pylib-3m"


def resident_bytes(pid: int) -> int:
    """Memory that a process has."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def start(folder: Path, more: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """Begin to serve; return the process and its address."""
    log = Path("/tmp") / f"nnfront-serving-{time.time_ns()}.log"
    command = [sys.executable, "-m", "nnfront.cli", "serve", str(folder), "--port", "0", *more]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, stdout=out)
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return process, found[0]


class Load:
    """Requests of mixed lengths, a few of which are asked for again and again."""

    def __init__(self, url: str, text: str, args: argparse.Namespace) -> None:
        self.http = httpx2.AsyncClient(
            base_url=url, timeout=600, limits=httpx2.Limits(max_connections=args.clients)
        )
        self.random = random.Random(0)
        self.args = args
        self.bodies = [self._body(text, i) for i in range(args.requests // 4)]
        self.answers: dict[int, set[str]] = {}
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.tokens = self.left = self.failed = 0

    def _body(self, text: str, i: int) -> dict[str, object]:
        at = self.random.randrange(len(text) - 1200)
        prompt = text[at : at + self.random.randint(20, 800)]
        tokens = self.random.randint(4, 48)
        temperature = self.random.choice([0.0, 0.8])
        return {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": i,
            "stream": True,
            "ignore_eos": True,
        }

    async def client(self, numbers: asyncio.Queue[int]) -> None:
        """Ask one thing after the other."""
        while not numbers.empty():
            number = numbers.get_nowait()
            which = number % len(self.bodies)
            leaves = self.random.random() < self.args.leave
            try:
                await self._ask(which, leaves)
            except (httpx2.HTTPError, AssertionError) as error:
                self.failed += 1
                print("failed:", repr(error), file=sys.stderr)

    async def _ask(self, which: int, leaves: bool) -> None:
        began, last, text = time.perf_counter(), 0.0, ""
        async with self.http.stream("POST", "/v1/completions", json=self.bodies[which]) as response:
            assert response.status_code == 200, response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                (self.gaps if last else self.first).append(now - (last or began))
                last = now
                text += json.loads(line[6:])["choices"][0]["text"]
                self.tokens += 1
                if leaves and self.random.random() < 0.1:
                    self.left += 1
                    return
        self.answers.setdefault(which, set()).add(text)


async def run(url: str, pid: int, args: argparse.Namespace) -> dict[str, object]:
    """Put the load on a server; return what came of it."""
    load = Load(url, (FOLDER / "heldout.txt").read_text(), args)
    async with load.http as http:
        for which in range(8):  # what is made once
            await load._ask(which, False)
        resident = [resident_bytes(pid)]
        numbers: asyncio.Queue[int] = asyncio.Queue()
        seconds = 0.0
        for quarter in range(4):
            for number in range(quarter * args.requests // 4, (quarter + 1) * args.requests // 4):
                numbers.put_nowait(number)
            began = time.perf_counter()
            await asyncio.gather(*(load.client(numbers) for _ in range(args.clients)))
            seconds += time.perf_counter() - began
            resident.append(resident_bytes(pid))
        await asyncio.sleep(1)
        held = (await http.get("/metrics")).text
    gauges = dict(re.findall(r"nnfront:(num_requests_\w+|num_preemptions_total)\{.*?\} (\S+)", held))
    several = [texts for texts in load.answers.values()]
    return {
        "requests": args.requests,
        "clients": args.clients,
        "left": load.left,
        "failed": load.failed,
        "seconds": round(seconds, 1),
        "requests/s": round(args.requests / seconds, 1),
        "chunks/s": round(load.tokens / seconds),
        "first token ms p50/p99": [
            round(1e3 * q) for q in (median(load.first), sorted(load.first)[int(len(load.first) * 0.99)])
        ],
        "gap ms p50/p99": [
            round(1e3 * q, 1) for q in (median(load.gaps), sorted(load.gaps)[int(len(load.gaps) * 0.99)])
        ],
        "answers that differ from one time to the next": sum(len(texts) > 1 for texts in several),
        "of": len(several),
        "after": gauges,
        "resident MB before and after each quarter": [round(n / 1e6) for n in resident],
    }


class Nothing:
    """A session that computes nothing: what is left is the engine's own work."""

    device = torch.device("cpu")
    methods = ()

    def __init__(self, vocab: int) -> None:
        self.logits = torch.randn(64, 1, vocab)

    def __getitem__(self, method: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        return lambda ids, cache: self.logits[: len(ids)]


async def stream(url: str, count: int, tokens: int) -> None:
    """Have so many answers streamed at a time."""
    body = {"prompt": [*range(20)], "max_tokens": tokens, "stream": True, "ignore_eos": True}

    async def one(http: httpx2.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines()]
        assert lines[-2] == "data: [DONE]", lines[-3:]

    limits = httpx2.Limits(max_connections=count)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(one(http) for _ in range(count)))


def overhead(folder: Path, tokens: int = 200) -> None:
    """Print the processor time of the engine for a token, without a model, by how many requests it answers at a time, and with the server around it."""
    llm = nn.LLM.load(folder)
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(event: Event) -> None:
        if event.finish is not None:
            ends.put(event.finish)

    with Engine(
        llm, Limits(max_model_len=llm.context, pages=32 * 32, max_num_seqs=32, remembers=False)
    ) as engine:
        nothing = Nothing(llm.config.vocab_size)
        engine._runner.compute.session = nothing  # type: ignore[assignment]
        params = Params(max_tokens=tokens, ignore_eos=True)

        def answers(count: int) -> None:
            for _ in range(count):
                engine.submit(range(20), params, sink)
            for _ in range(count):
                ends.get()

        def least(work: Callable[[], object]) -> float:
            times = []
            for _ in range(3):
                began = time.process_time()
                work()
                times.append(time.process_time() - began)
            return min(times)

        for count in (1, 8, 32):
            seconds = least(lambda count=count: answers(count))  # type: ignore[misc]
            print(f"{count} requests: {seconds / tokens / count * 1e6:.1f} us of the engine for a token")
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(app(engine, "nothing"), log_level="warning", access_log=False)
            )
            serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            serving.start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            for count in (1, 32):
                asking = [sys.executable, __file__, "--stream", url, str(count), str(tokens)]
                seconds = least(lambda asking=asking: subprocess.run(asking, check=True))  # type: ignore[misc]
                print(
                    f"{count} streams: {seconds / tokens / count * 1e6:.1f} us of engine and server for a token"
                )
            server.should_exit = True
            serving.join()


def alone(folder: Path, tokens: int = 128, rounds: int = 8) -> None:
    """Print what one stream costs: a token of `generate` and of bare calls, guesses on code that is written again, first tokens behind a prefix that is known."""
    llm = nn.LLM.load(folder, extends=True)
    text = (FOLDER / "heldout.txt").read_text()
    session, ids = llm.session, torch.tensor([llm.tokenizer.encode(text[:200])])

    def least(work: Callable[[], object]) -> float:
        """Milliseconds of processor time, the least of some rounds."""
        times = []
        for _ in range(rounds):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        return min(times) * 1e3

    def bare() -> None:
        cache = session.make_cache(batch=1, max_seq=ids.shape[1] + tokens, stored_as=llm.stored_as)
        token = session["prefill"](ids, cache)[:, -1].argmax(-1)
        for _ in range(tokens - 1):
            token = session["decode"](token[:, None], cache)[:, -1].argmax(-1)

    generated = least(lambda: llm.generate_ids(ids, max_new_tokens=tokens))
    print(f"a token: {generated / tokens:.3f} ms of generate, {least(bare) / tokens:.3f} of bare calls")
    code = text[2000:2900]
    edit = f"{code}\n\n{code[:60]}"  # a file, and the begin of its next version
    plain = least(lambda: llm.generate(edit, max_new_tokens=tokens))
    guessed = least(lambda: llm.generate(edit, max_new_tokens=tokens, spec="ngram"))
    same = llm.generate(edit, tokens) == llm.generate(edit, tokens, spec="ngram")
    print(
        f"code that is written again: {plain / tokens:.3f} ms a token, with ngram {guessed / tokens:.3f}: {plain / guessed:.2f}x, equal: {same}"
    )
    tokens_of_text = llm.tokenizer.encode(text)
    known, tail = tokens_of_text[:384], tokens_of_text[1000:1032]
    limits = Limits(max_model_len=llm.context, pages=256)
    came: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with Engine(llm, limits) as engine:

        def first(prompt: list[int]) -> float:
            def work() -> None:
                engine.submit(prompt, Params(max_tokens=1), came.put)
                came.get()

            return least(work)

        cold = []
        for _ in range(rounds):
            engine.forget()
            began = time.process_time()
            engine.submit(known + tail, Params(max_tokens=1), came.put)
            came.get()
            cold.append(1e3 * (time.process_time() - began))
        print(
            f"first token: {min(cold):.1f} ms behind {len(known)} tokens, {first(known + tail):.1f} where they are known, {first(tail):.1f} of the {len(tail)} behind them alone"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.1)
    parser.add_argument("more", nargs="*", help="behind --: options of nnfront serve")
    parser.add_argument(
        "--alone", action="store_true", help="one stream in this process, and what saves time there"
    )
    parser.add_argument("--overhead", action="store_true", help="the engine and the server without a model")
    parser.add_argument("--stream", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream:
        asyncio.run(stream(args.stream[0], int(args.stream[1]), int(args.stream[2])))
        return
    if args.alone:
        alone(args.folder)
        return
    if args.overhead:
        overhead(args.folder)
        return
    process, url = start(args.folder, args.more)
    try:
        for name, value in asyncio.run(run(url, process.pid, args)).items():
            print(f"{name:<48}{value}")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
