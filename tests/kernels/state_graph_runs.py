# SPDX-License-Identifier: Apache-2.0
"""Captured steps of models whose state is more than keys and values, for `test_state_graphs.py`: on torch's kernels alone, in float32."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import graph_runs
import torch
from graph_runs import Both, both, captured_by
from nnfront_models import (
    bloom,
    deepseek_v3,
    gemma2,
    llama,
    mamba,
    mamba2,
    qwen3_5_text,
    qwen3_next,
    rwkv,
    t5,
    whisper,
)
from tape import TapeCapture
from torch.utils._python_dispatch import TorchDispatchMode

import nnfront as nn
from nnfront.backends.cuda import attention as cuda_attention
from nnfront.backends.cuda import recurrent
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.backends.cuda.table import ON_DEVICE
from nnfront.backends.kernel import Kernel
from nnfront.session import Session

FILES = {
    "mamba2": mamba2,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_next": qwen3_next,
    "deepseek_v3": deepseek_v3,
    "gemma2": gemma2,
    "bloom": bloom,
    "llama": llama,
    "t5": t5,
    "mamba": mamba,
    "rwkv": rwkv,
    "whisper": whisper,
}
# Torch's experts ask the host which of them have tokens.
DENSE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 8},
    "kimi_linear": {"first_k_dense_replace": 8},
    "qwen3_next": {"num_experts": 0},
}


@contextmanager
def launching(kernels: Sequence[Kernel] = ()):
    """Leave the kernels that are launched out of the table, but for these."""
    table = CudaBackend.kernels
    CudaBackend.kernels = tuple(kernel for kernel in table if kernel not in ON_DEVICE or kernel in kernels)
    try:
        yield
    finally:
        CudaBackend.kernels = table


def pair(name: str, *kernels: Kernel, **changes: Any) -> tuple[Session, Session, TapeCapture]:
    """Two sessions of one model and the same weights: one that captures, one that runs everything as usual. `changes` are those of its config."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cuda_attention.MIN_BUCKET = 8
    file = FILES[name]
    config = dataclasses.replace(file.TINY, **{"dtype": "float32", **DENSE.get(name, {}), **changes})
    model = file.build(config)
    ir = nn.passes.lift_transform_params(model.export(file.export_spec(config)), shared_transform=True)
    with launching(kernels):
        executable = nn.compile(ir, target="cuda")
    weights = {
        key: (torch.randn([int(s) for s in p.shape]) * 0.1).to(getattr(torch, config.dtype))
        for key, p in model.named_parameters()
    }
    capturer = TapeCapture()
    with captured_by(capturer):
        one = executable.load(weights)
    return one, executable.load(weights), capturer


class Close(Both):
    """Sums over as many slots as a length class has are not in the order of those over the tokens that there are."""

    def __call__(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        results = [s[name](ids, c) for s, c in zip(self.sessions, self.caches, strict=True)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert self.caches[0].lengths == self.caches[1].lengths
        return results[1][:, -1].argmax(-1, keepdim=True)

    def map(self, what: str, *arguments: Any) -> Close:
        return Close(self.sessions, tuple(getattr(cache, what)(*arguments) for cache in self.caches))


def close(one: Session, other: Session, **sizes: Any) -> Close:
    made = both(one, other, **sizes)
    return Close(made.sessions, made.caches)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 64, shape)


def decode(name: str, page_size: int | None) -> None:
    """Prompts of different lengths, then tokens over a length class; in between what a state does besides."""
    one, other, _ = pair(name)
    pages = {} if page_size is None else {"page_size": page_size, "pages": 24}
    run = close(one, other, batch=2, max_seq=40, **pages)
    for i in range(2):
        run.map("rows", i)("prefill", ids(1, 9 - 5 * i))
    found = one["decode"].graphs
    for _ in range(10):
        token = run("decode", ids(2, 1))
    # Up to 16 tokens, and up to 32: in each the first call runs as usual.
    assert (found.replays, len(found), found.error) == (10 - 2, 2, "")
    marks = [cache.snapshot() for cache in run.caches]
    kept = [state.clone() for layer in run.caches[1] for state in layer.settled()]
    for _ in range(2):
        run("decode", token)
    for cache, mark in zip(run.caches, marks, strict=True):
        cache.restore(mark)
    for state, was in zip((s for layer in run.caches[0] for s in layer.settled()), kept, strict=True):
        torch.testing.assert_close(state, was, rtol=1e-4, atol=1e-5)
    forked = run.map("fork", [1, 0])
    for _ in range(2):
        run("decode", token)
        forked("decode", ids(2, 1))
    run.map("rows", 1)("prefill", ids(1, 2))
    run("decode", token)
    run.map("reset")
    run("prefill", ids(2, 3))
    for _ in range(3):
        run("decode", token)
    assert found.error == ""


def cross() -> None:
    """Steps that read what an encoder has stored, of sources of several lengths."""
    one, other, _ = pair("t5")
    sessions = one, other
    for length in (9, 9, 12):
        source, memories = ids(2, length), []
        for session in sessions:
            caches = (
                session.make_cache("memory", batch=2, max_source=20),
                session.make_cache("cache", batch=2, max_seq=20),
            )
            memories.append(caches)
            session["encode"](source, caches[0])
            session["prefill"](torch.zeros(2, 1, dtype=torch.int64), *caches)
        for _ in range(5):
            token = ids(2, 1)
            results = [s["decode"](token, *caches) for s, caches in zip(sessions, memories, strict=True)]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert one["decode"].graphs.error == ""
    assert one["decode"].graphs.replays >= 3


def wander(seeds: int = 4, steps: int = 20) -> None:
    """Anything that may happen to a cache of tokens and states, in any order."""
    one, other, _ = pair("qwen3_5_text")
    for seed in range(seeds):
        chance = random.Random(seed)
        run = close(one, other, batch=2, max_seq=24)
        others, marks = [run], {}
        for _ in range(steps):
            run = chance.choice(others)
            match chance.randrange(7):
                case 0:
                    run.map("reset")
                case 1 if len(others) < 3:
                    others.append(run.map("fork", [chance.randrange(2), chance.randrange(2)]))
                case 2:
                    marks[id(run)] = [cache.snapshot() for cache in run.caches]
                case 3 if id(run) in marks:
                    outcomes = [restored(*pair) for pair in zip(run.caches, marks[id(run)], strict=True)]
                    assert outcomes[0] == outcomes[1]
                case _:
                    if max(run.caches[0].lengths) < 24:
                        run("decode", ids(2, 1))
        assert one["decode"].graphs.error == ""
    assert one["decode"].graphs.replays > 5


def restored(cache: Any, mark: Any) -> str:
    """What is wrong with going back to a snapshot, nothing if it works."""
    try:
        cache.restore(mark)
    except nn.errors.RunError as error:
        return error.what
    return ""


class Counting(TorchDispatchMode):
    """The calls of torch that give a device work."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in (
            "detach",
            "view",
            "empty",
            "empty_like",
            "select",
            "narrow",
            "slice",
            "unsqueeze",
            "alias",
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(name: str, page_size: int | None, steps: int) -> list[list[str]]:
    """What the host gives the device besides the graph, in each of some replayed steps; `kernels` is a model whose lengths are read on the device."""
    one, _, capturer = graph_runs.pair() if name == "kernels" else pair(name)
    cache = one.make_cache(batch=2, max_seq=64, page_size=page_size)
    cuda_attention.MIN_BUCKET = 64
    one["prefill"](ids(2, 33), cache)
    token, found = ids(2, 1), []
    for step in range(2 + steps):
        if step == 2:
            for tape in capturer.tapes:
                tape.entries.clear()
        with Counting() as counting:
            one["decode"](token, cache)
        found.append(counting.names)
    assert one["decode"].graphs.replays == steps + 1
    return found[2:]


def used_page_launches() -> list[str]:
    """What the host gives the device besides the graph in a step that begins a page which was somebody's before."""
    one, _, capturer = pair("llama")
    cache = one.make_cache(batch=2, max_seq=64, page_size=16, pages=8)
    one["prefill"](ids(2, 64), cache)
    cache.reset()
    one["prefill"](ids(2, 45), cache)
    for step in range(4):
        if step == 2:
            for tape in capturer.tapes:
                tape.entries.clear()
        with Counting() as counting:
            one["decode"](ids(2, 1), cache)
    return counting.names


def prompt_launches() -> list[str]:
    """What the host gives the device besides the graph for a prompt of a length of its own, on the kernels."""
    one, _, capturer = graph_runs.pair()
    cache = one.make_cache(batch=1, max_seq=64, page_size=16)
    for length in (5, 9, 3):
        cache.reset()
        if length == 3:
            capturer.tapes[-1].entries.clear()
        prompt = ids(1, length)
        with Counting() as counting:
            one["prefill"](prompt, cache)
    assert one["prefill"].graphs.replays == 2
    return [name for name in counting.names if name != "lift_fresh"]


def caches_share(page_size: int) -> tuple[int, int]:
    """How many graphs there are for forks and parts of one pool of pages, and how many steps they did."""
    one, other, _ = pair("llama")
    run = close(one, other, batch=2, max_seq=64, page_size=page_size, pages=24)
    run("prefill", ids(2, 17))
    for _ in range(2):
        run("decode", ids(2, 1))
    for chosen in ([1, 0], [0, 0], [1, 1]):
        forked = run.map("fork", chosen)
        for _ in range(2):
            forked("decode", ids(2, 1))
        run("decode", ids(2, 1))
    return len(one["decode"].graphs), one["decode"].graphs.replays


def states_share(name: str) -> tuple[int, int, int]:
    """How many graphs there are for caches that lie anywhere, one of them gone, how many steps they did, and how many copies they make of what they have computed."""
    one, other, capturer = pair(name, *recurrent.KERNELS)
    first, second, third = (close(one, other, batch=2, max_seq=16) for _ in range(3))
    assert len({run.caches[0].addresses for run in (first, second, third)}) == 3
    for run in (first, second, third):
        run("prefill", ids(2, 3))
    capturer.tapes.clear()
    for _ in range(2):
        first("decode", ids(2, 1))
    second("decode", ids(2, 1))
    first("decode", ids(2, 1))
    for rows in (rows for layer in first.caches[0] for rows in (*layer.settled(), *layer.placed.all)):
        rows.fill_(torch.nan)  # its memory is somebody else's now
    del first
    for _ in range(2):
        second("decode", ids(2, 1))
        third("decode", ids(2, 1))
    forked = third.map("fork", [1, 1])
    forked("decode", ids(2, 1))
    (tape,) = capturer.tapes
    found = one["decode"].graphs
    return len(found), found.replays, sum("copy_" in call for call in tape.names)
