# SPDX-License-Identifier: Apache-2.0
"""Servers of one model against each other, over the interface that all of them speak.

    python bench/serving_peers.py FOLDER --server 'nnfront=nnfront serve {folder} --port {port}' 'llama=llama-server -m x.gguf --port {port}'

FOLDER is a checkpoint of `bench/checkpoints.py`; a tokenizer of one word for each token is written into it. Servers are started one after the other, `--rounds`
times, each asked the same things, prompts as token ids:

    many     16 clients, 64 prompts of 128 to 512 tokens, answers of 64: tokens a second
    few      4 clients, 24 such prompts: times to first tokens and between tokens
    prefix   first token behind 1,024 tokens that are known and 32 new ones, and of the 32 alone
    stall    the longest pause of a stream of 200 tokens while a prompt of 2,000 comes in

The client's work is on the same cores. Medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shlex
import socket
import subprocess
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx2
from machine import describe, keep, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast


class Client:
    """Asks one server."""

    def __init__(self, url: str, model: str, vocab: int) -> None:
        # A connection for each request: some servers close those that wait for another, which then fails.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self.http = httpx2.AsyncClient(base_url=url, timeout=600, limits=limits)
        self.model = model
        self.random = random.Random(0)
        self.vocab = vocab

    def prompt(self, length: int) -> list[int]:
        """Tokens that no prompt before has begun with."""
        return [self.random.randrange(300, self.vocab) for _ in range(length)]

    async def ask(self, prompt: list[int], tokens: int) -> list[float]:
        """Seconds from the request to each piece of the answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        body |= {"stream": True, "ignore_eos": True}
        began, times = time.perf_counter(), []
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, (answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    times.append(time.perf_counter() - began)
        return times

    async def load(self, clients: int, requests: int, tokens: int) -> tuple[float, list[list[float]]]:
        """Seconds for so many requests, and those of each answer's pieces."""
        prompts = [self.prompt(self.random.randint(128, 512)) for _ in range(requests)]
        answers: list[list[float]] = []

        async def client() -> None:
            while prompts:
                answers.append(await self.ask(prompts.pop(), tokens))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - began, answers


def gaps(times: list[float]) -> list[float]:
    """Seconds between pieces."""
    return [after - before for before, after in itertools.pairwise(times)]


async def measured(client: Client) -> dict[str, float]:
    """All that one server is asked."""
    await client.ask(client.prompt(64), 8)  # what is made once
    seconds, answers = await client.load(16, 64, 64)
    found = {"tokens/s, 16 clients": 64 * len(answers) / seconds}
    _, answers = await client.load(4, 24, 64)
    first, between = [times[0] for times in answers], [gap for times in answers for gap in gaps(times)]
    for name, values in (("first token", first), ("gap", between)):
        found |= {
            f"{name} p50 ms": 1e3 * median(values),
            f"{name} p99 ms": 1e3 * quantiles(values, n=100)[98],
        }
    known = client.prompt(1024)
    await client.ask(known + client.prompt(32), 1)
    behind = [(await client.ask(known + client.prompt(32), 1))[0] for _ in range(5)]
    alone = [(await client.ask(client.prompt(32), 1))[0] for _ in range(5)]
    found |= {"first token behind a known prefix ms": 1e3 * median(behind)}
    found |= {"of its tail alone ms": 1e3 * median(alone)}
    found |= {"known prefix / tail alone": median(behind) / median(alone)}
    stream = asyncio.create_task(client.ask(client.prompt(128), 200))
    await asyncio.sleep(2)
    await client.ask(client.prompt(2000), 1)
    found["longest pause while 2,000 tokens come ms"] = 1e3 * max(gaps(await stream))
    return found


async def served(command: str, folder: Path, log: Path) -> dict[str, float]:
    """Start a server, ask it, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command.format(folder=folder, port=port))
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            async with httpx2.AsyncClient(base_url=url) as http:
                while True:
                    if process.poll() is not None:
                        raise SystemExit(f"{command} ended:\n{log.read_text()[-2000:]}")
                    try:
                        models_of = await http.get("/v1/models")
                        if models_of.status_code == 200:
                            break
                    except httpx2.HTTPError:
                        pass
                    await asyncio.sleep(0.5)
            vocab = AutoConfig.from_pretrained(folder).vocab_size
            return await measured(Client(url, models_of.json()["data"][0]["id"], vocab))
        finally:
            process.terminate()


def write_tokenizer(folder: Path) -> None:
    """A word for each token, so that any tokens are a text."""
    vocab = AutoConfig.from_pretrained(folder).vocab_size
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", nargs="+", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", default="serving_peers", help="of the file of results")
    args = parser.parse_args()
    if not (args.folder / "tokenizer.json").exists():
        write_tokenizer(args.folder)
    servers = dict(each.split("=", 1) for each in args.server)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for _ in range(args.rounds):
        for name, command in servers.items():
            rounds[name].append(
                asyncio.run(served(command, args.folder, Path(f"/tmp/{args.name}-{name}.log")))
            )
            print(json.dumps({name: rounds[name][-1]}), flush=True)
    rows: list[dict[str, Any]] = [
        {"what": what, **{name: median(found[what] for found in all_) for name, all_ in rounds.items()}}
        for what in next(iter(rounds.values()))[0]
    ]
    print(keep(args.name, {**describe("torch"), **servers}, rows))
    print(table(rows))


if __name__ == "__main__":
    main()
