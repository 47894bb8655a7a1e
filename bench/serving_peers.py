# SPDX-License-Identifier: Apache-2.0
"""Servers of one model against each other, over the interface that all of them speak.

    python bench/serving_peers.py FOLDER --peers nnfront llama-server vllm transformers \\
        --at llama-server=BUILD/bin/llama-server vllm=ENVIRONMENT/bin/python transformers=ENVIRONMENT/bin/transformers

FOLDER is a checkpoint of `bench/checkpoints.py`; a tokenizer of one word for each token is written into it. llama-server reads FOLDER-BF16.gguf and FOLDER-Q4_0.gguf,
which `bench/llama_cpp.py` writes, and those with `w4` FOLDER-int4, which is written beside it. `--at` says where programs are that are not on PATH; `--server NAME=COMMAND` adds one of your own. Servers are started one after
the other, in a process group that is ended whole, waited for by their `/health`, and asked the same things, `--rounds` times, prompts as token ids, of transformers, which takes none, as text of as
many tokens:

    many     16 clients, 64 prompts of 128 to 512 tokens, answers of 64: tokens a second
    few      4 clients, 24 such prompts: times to first tokens and between tokens
    prefix   first token behind 1,024 tokens that are known and 32 new ones, and of the 32 alone
    stall    the longest pause of a stream of 200 tokens while a prompt of 2,000 comes in

`--parts` asks some of them. The client's work is on the same cores. Medians over rounds. Where others use the machine as well, `--together` has them take turns in less
time: each is started once, and waits while others are asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import httpx2
import numpy as np
from checkpoints import write_int4
from machine import describe, keep, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

START_SECONDS = 1800


@dataclass(frozen=True)
class Peer:
    """How a server is started: a command with places for `program`, the checkpoint and the port, and variables of its environment; whether it takes prompts as ids."""

    program: str
    command: str
    variables: dict[str, str] = field(default_factory=dict)
    takes_ids: bool = True


NNFRONT = "{program} serve {folder} --port {port} --max-num-seqs 16 --max-model-len 4096"
# -kvu: one cache for all of the 16, as the others have, of which a prompt may take what it needs.
LLAMA = "{program} -m {folder}-%s.gguf --port {port} -t {cores} -np 16 -c 65536 -kvu"
VLLM = "{program} -m vllm.entrypoints.openai.api_server --model {folder} --port {port} --max-num-seqs 16 --max-model-len 4096 --generation-config vllm"
# Left alone it keeps a core for what does not compute.
VLLM_VARIABLES = {
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-{last_core}",
    "VLLM_NO_USAGE_STATS": "1",
}
INT4 = "{folder}-int4"  # what `write_int4` writes
PEERS = {
    "nnfront": Peer("nnfront", NNFRONT),
    "nnfront-int4": Peer("nnfront", f"{NNFRONT} --quant int4"),
    "nnfront-int4-int8": Peer(
        "nnfront", f"{NNFRONT} --quant int4 --activations int8"
    ),  # as llama.cpp multiplies
    # The same weights in 4 bits, and both round activations to 8 bits, as vLLM does where the processor has tiles.
    "nnfront-w4": Peer("nnfront", f"{NNFRONT} --activations int8".replace("{folder}", INT4)),
    "vllm-w4": Peer("vllm", VLLM.replace("{folder}", INT4), VLLM_VARIABLES),
    "llama-server": Peer("llama-server", LLAMA % "BF16"),
    "llama-server-q4_0": Peer("llama-server", LLAMA % "Q4_0"),
    "vllm": Peer("vllm", VLLM, VLLM_VARIABLES),
    "vllm-eager": Peer("vllm", f"{VLLM} --enforce-eager", VLLM_VARIABLES),
    "transformers": Peer(
        "transformers",
        "{program} serve {folder} --port {port} --continuous-batching --device cpu --cb-num-blocks 80 --cb-max-batch-tokens 512",
        takes_ids=False,
    ),
}


class Client:
    """Asks one server. `words` makes the text of a token, for one that takes no ids."""

    def __init__(self, url: str, model: str, vocab: int, words: Callable[[int], str] | None) -> None:
        # A connection for each request: some servers close those that wait for another, which then fails.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self.http = httpx2.AsyncClient(base_url=url, timeout=3600, limits=limits)
        self.model = model
        self.random = random.Random(0)
        self.vocab = vocab
        self.words = words

    def prompt(self, length: int) -> list[int]:
        """Tokens that no prompt before has begun with."""
        return [self.random.randrange(300, self.vocab) for _ in range(length)]

    async def ask(self, prompt: list[int], tokens: int, times: list[float] | None = None) -> list[float]:
        """Seconds from the request to each piece of the answer, in `times` as they come."""
        body: dict[str, object] = {"model": self.model, "max_tokens": tokens, "temperature": 0.0}
        if self.words is None:
            body |= {"prompt": prompt, "ignore_eos": True}
        else:
            body |= {"prompt": " ".join(map(self.words, prompt))}
        began, times, ends = time.perf_counter(), [] if times is None else times, []
        async with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, (answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                    ends.append(choices[0].get("finish_reason"))
                    if choices[0]["text"] or ends[-1] is None:
                        times.append(time.perf_counter() - began)
        assert ends[-1:] == ["length"], ends[-3:]
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


async def many(client: Client) -> dict[str, float]:
    """Throughput."""
    seconds, answers = await client.load(16, 64, 64)
    return {"tokens/s, 16 clients": 64 * len(answers) / seconds}


async def few(client: Client) -> dict[str, float]:
    """Times to first tokens and between tokens."""
    _, answers = await client.load(4, 24, 64)
    found = {}
    first, between = [times[0] for times in answers], [gap for times in answers for gap in gaps(times)]
    for name, values in (("first token", first), ("gap", between)):
        found |= {
            f"{name} p50 ms": 1e3 * median(values),
            f"{name} p99 ms": 1e3 * float(np.percentile(values, 99)),
        }
    return found


async def prefix(client: Client) -> dict[str, float]:
    """First tokens behind what is known."""
    known = client.prompt(1024)
    await client.ask(known + client.prompt(32), 1)
    behind = [(await client.ask(known + client.prompt(32), 1))[0] for _ in range(5)]
    alone = [(await client.ask(client.prompt(32), 1))[0] for _ in range(5)]
    return {
        "first token behind a known prefix ms": 1e3 * median(behind),
        "of its tail alone ms": 1e3 * median(alone),
        "known prefix / tail alone": median(behind) / median(alone),
    }


async def stall(client: Client) -> dict[str, float]:
    """Pauses of a stream when a long prompt comes in its middle."""
    times: list[float] = []
    stream = asyncio.create_task(client.ask(client.prompt(128), 200, times))
    while len(times) < 20 and not stream.done():
        await asyncio.sleep(0.01)
    await client.ask(client.prompt(2000), 1)
    return {"longest pause while 2,000 tokens come ms": 1e3 * max(gaps(await stream))}


PARTS: dict[str, Callable[[Client], Awaitable[dict[str, float]]]] = {
    "many": many,
    "few": few,
    "prefix": prefix,
    "stall": stall,
}


async def measured(client: Client, parts: list[str], number: int) -> dict[str, float]:
    """What one server is asked in a round: prompts that it has not seen, the same ones as others."""
    await client.ask(client.prompt(64), 8)  # what is made once
    found: dict[str, float] = {}
    for part in parts:
        client.random.seed(f"{part} {number}")  # whatever else is asked
        found |= await PARTS[part](client)
    return found


async def healthy(process: subprocess.Popen[bytes], http: httpx2.AsyncClient, log: Path) -> None:
    """Wait until a server answers."""
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(f"{shlex.join(map(str, process.args))} does not serve:\n{log.read_text()[-2000:]}")  # type: ignore[arg-type]


async def model_of(http: httpx2.AsyncClient, folder: Path) -> str:
    """What a server calls its model: the folder, where it lists none."""
    answer = await http.get("/v1/models")
    listed = answer.json()["data"] if answer.status_code == 200 else []
    return str(listed[0]["id"] if listed else folder)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server, and then all that it has started and left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def served(name: str, peer: Peer, program: str, folder: Path) -> AsyncIterator[Client]:
    """A client of a server that is started, and ended in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = os.cpu_count() or 1
    places = {"program": program, "folder": folder, "port": port, "cores": cores, "last_core": cores - 1}
    words = shlex.split(peer.command.format(**places))
    variables = {key: value.format(**places) for key, value in peer.variables.items()}
    log = Path(f"/tmp/serving_peers-{name}.log")
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            words, stdout=out, stderr=out, env=os.environ | variables, start_new_session=True
        ) as process,
    ):
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
                await healthy(process, http, log)
                model = await model_of(http, folder)
            tokenizer = None if peer.takes_ids else AutoTokenizer.from_pretrained(folder)
            text_of = None if tokenizer is None else tokenizer.convert_ids_to_tokens
            yield Client(url, model, AutoConfig.from_pretrained(folder).vocab_size, text_of)
        finally:
            end(process)


FAILURES = (OSError, RuntimeError, AssertionError, httpx2.HTTPError)
Server: TypeAlias = Callable[[], AbstractAsyncContextManager[Client]]


async def compared(
    servers: dict[str, Server], parts: list[str], rounds: int, *, together: bool
) -> dict[str, list[dict[str, float]]]:
    """What servers are asked in each round, one after the other: each started for a round and ended, or, `together`, started in the first one and ended behind the last. One that fails does not take the others' results along."""
    given: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for number in range(rounds):
            for name, server in servers.items():
                try:
                    if together and name not in clients:
                        clients[name] = await stack.enter_async_context(server())
                    async with nullcontext(clients[name]) if together else server() as client:
                        given[name].append(await measured(client, parts, number))
                except FAILURES as error:
                    print(f"{name}: {error!r}", file=sys.stderr)
                else:
                    print(json.dumps({name: given[name][-1]}), flush=True)
    return {name: found for name, found in given.items() if found}


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
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[])
    parser.add_argument("--at", nargs="+", default=[], metavar="PROGRAM=PATH", help="if not on PATH")
    parser.add_argument("--server", nargs="+", default=[], metavar="NAME=COMMAND", help="others")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="start each of them once")
    parser.add_argument("--name", default="serving_peers", help="of the file of results")
    args = parser.parse_args()
    # What was started is ended then, too, in the background as well.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    if not (args.folder / "tokenizer.json").exists():
        write_tokenizer(args.folder)
    peers = {name: PEERS[name] for name in args.peers}
    peers |= {name: Peer("", command) for name, command in (each.split("=", 1) for each in args.server)}
    if any(INT4 in peer.command for peer in peers.values()):
        write_int4(args.folder)
    programs = dict(each.split("=", 1) for each in args.at)
    folder = args.folder.resolve()
    servers: dict[str, Server] = {
        name: partial(served, name, peer, programs.get(peer.program, peer.program), folder)
        for name, peer in peers.items()
    }
    given = asyncio.run(compared(servers, args.parts, args.rounds, together=args.together))
    rows: list[dict[str, Any]] = [
        {"what": what, **{name: median(found[what] for found in all_) for name, all_ in given.items()}}
        for what in next(iter(given.values()), [{}])[0]
    ]
    commands = {name: peer.command for name, peer in peers.items()}
    print(keep(args.name, {**describe("torch"), **commands}, rows))
    print(table(rows))


if __name__ == "__main__":
    main()
