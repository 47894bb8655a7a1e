# SPDX-License-Identifier: Apache-2.0
"""Caches that lie anywhere under one graph, for `test_state_graphs.py`: what torch reads and writes of them as well as what kernels do."""

from __future__ import annotations

from typing import Any

import torch
from state_graph_runs import Counting, ids, pair

from nnfront.backends.cuda import attention, recurrent
from nnfront.session import Session
from nnfront.state.cache import Cache

# Models whose steps have the same bits: what attention by torch, in float32, gives over as many slots as a length class has differs in the last ones.
BITS = ("mamba", "rwkv")
SOURCE, ROOM = 9, 24


class Talk:
    """A conversation of two sequences in caches of their own, by a session that captures and by one that does not: results and states are alike."""

    def __init__(self, name: str, sessions: tuple[Session, Session], caches: tuple[list[Cache], ...]) -> None:
        self.name, self.sessions, self.caches = name, sessions, caches
        self.dtype: torch.dtype = next(iter(sessions[0].weights.values())).dtype

    @classmethod
    def begun(cls, name: str, sessions: tuple[Session, Session], batch: int = 2, **options: Any) -> Talk:
        """One in new caches, behind a source and a prompt."""
        caches: tuple[list[Cache], ...] = ([], [])
        is_answer = "encode" in sessions[0].methods
        for session, made in zip(sessions, caches, strict=True):
            if is_answer:
                made.append(session.make_cache("memory", batch=batch, max_source=20, **options))
            named = ("cache",) if is_answer else ()
            made.append(session.make_cache(*named, batch=batch, max_seq=ROOM, **options))
        talk = cls(name, sessions, caches)
        if is_answer:
            talk.read(batch)
        talk("prefill", ids(batch, 3))
        return talk

    def read(self, batch: int) -> None:
        """Have the encoders read another source."""
        source = ids(batch, SOURCE)
        if self.name == "whisper":
            source = torch.randn(batch, 8, 40).to(self.dtype)
        for session, (memory, _) in zip(self.sessions, self.caches, strict=True):
            memory.reset()
            session["encode"](source, memory)

    def __call__(self, method: str, tokens: torch.Tensor) -> None:
        results = [s[method](tokens, *c) for s, c in zip(self.sessions, self.caches, strict=True)]
        kept = [[t for layer in made[-1] for t in layer.settled()] for made in self.caches]
        is_exact = self.name in BITS or self.dtype == torch.float16
        near = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(*results, **near)
        torch.testing.assert_close(*kept, **near)
        assert self.caches[0][-1].lengths == self.caches[1][-1].lengths

    def step(self) -> None:
        self("decode", ids(self.caches[0][-1].batch, 1))

    def map(self, what: str, *arguments: Any) -> Talk:
        made = tuple([getattr(cache, what)(*arguments) for cache in caches] for caches in self.caches)
        return Talk(self.name, self.sessions, made)

    def poison(self) -> None:
        """Fill its memory with what somebody else may have there now."""
        for rows in (r for c in self.caches[0] for layer in c for r in (*layer.settled(), *layer.placed.all)):
            rows.view(torch.uint8).fill_(0xFF)


def share_with(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[int, int, int]:
    return share(name, **dict(options))


# Configs whose cross attention, or whose self attention as well, is that of the kernels. As many heads with states as two vectors of the CPU have numbers: torch's softplus
# has the same bits for each sequence of any batch.
ON_KERNELS: dict[str, dict[str, Any]] = {
    "whisper": {
        "dtype": "float16",
        "d_model": 128,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    "t5": {"dtype": "float16", "d_kv": 64, "num_heads": 2},
    "mamba": {"dtype": "float16"},
    "mamba2": {"dtype": "float16", "num_heads": 32, "head_dim": 4, "num_hidden_layers": 1},
    "qwen3_next": {"dtype": "float16", "head_dim": 64, "linear_num_value_heads": 32},
}


def share(name: str, *, in_place: bool = False, **options: Any) -> tuple[int, int, int]:
    """How many graphs there are after steps of caches anywhere and whatever happens to them, how many steps were not replayed, and how many launches copy rows."""
    kernels = (*recurrent.KERNELS, *attention.KERNELS) if in_place else ()
    one, other, capturer = pair(name, *kernels, **(ON_KERNELS.get(name, {}) if in_place else {}))
    first, second, third = (Talk.begun(name, (one, other), **options) for _ in range(3))
    capturer.tapes.clear()
    steps = 0

    def step(*talks: Talk) -> None:
        nonlocal steps
        for talk in talks:
            talk.step()
            steps += 1

    step(first, first, second, first)
    first.poison()
    del first
    step(second, third, second)
    forked = third.map("fork", [1, 0])
    step(forked, third, forked)
    if "page_size" not in options:  # else its pages are those of the third
        forked.poison()
    del forked
    marks = [cache.snapshot() for caches in second.caches for cache in caches]
    step(second, second)
    for cache, mark in zip((c for caches in second.caches for c in caches), marks, strict=True):
        cache.restore(mark)
    step(third, second)
    for caches in third.caches:
        caches[-1].reset()
    if "encode" in one.methods:
        third.read(2)  # into the memory that the graph has read before
    third("prefill", ids(2, 2))
    step(third)
    wider = Talk.begun(name, (one, other), batch=3, **options)
    step(wider.map("rows", 1, 3), third)
    (tape,) = (tape for tape in capturer.tapes if tape.names.count("aten.add_.Tensor"))
    found = one["decode"].graphs
    assert found.error == ""
    return len(found), steps - found.replays, tape.names.count("copy_rows_kernel")


def pad(name: str) -> tuple[int, int]:
    """How many graphs there are for batches of three and of four sequences with sources, and how many steps were replayed."""
    one, other, _ = pair(name, *attention.KERNELS, **ON_KERNELS[name])
    three, four = (Talk.begun(name, (one, other), batch) for batch in (3, 4))
    for talk in (three, four, three, four):
        talk.step()
    return len(one["decode"].graphs), one["decode"].graphs.replays


def pad_states(name: str) -> tuple[int, int]:
    """How many graphs there are for three, four and five of six sequences in one cache, and how many steps were replayed: what is kept of the others stays."""
    one, other, _ = pair(name, *recurrent.KERNELS, *attention.KERNELS, **ON_KERNELS[name])
    whole = Talk.begun(name, (one, other), 6)
    for rows in (rows for kept in map(bytes_of, whole.caches) for rows in kept):
        rows[5:] = 0xFF
    for batch in (3, 4, 3, 5, 5):
        whole.map("rows", 0, batch).step()
        for mine, usual in zip(*map(bytes_of, whole.caches), strict=True):
            assert torch.equal(mine, usual)
            assert bool((mine[5:] == 0xFF).all())
    return len(one["decode"].graphs), one["decode"].graphs.replays


def bytes_of(caches: list[Cache]) -> list[torch.Tensor]:
    """All that is kept of each sequence, as bytes."""
    kept = (t for cache in caches for layer in cache for t in (*layer.settled(), *layer.placed.all))
    return [t.view(len(t), -1).view(torch.uint8) for t in kept]


def launches(name: str) -> list[list[str]]:
    """What the host gives the device besides the graph in steps of one cache, and in those of two in turn."""
    one, other, capturer = pair(name)
    first, second = (Talk.begun(name, (one, other)) for _ in range(2))
    found = []
    for talk in (first, first, first, second, second, first):
        for tape in capturer.tapes:
            tape.entries.clear()
        token = ids(2, 1)
        with Counting() as counting:
            one["decode"](token, *talk.caches[0])
        found.append([call for call in counting.names if call != "lift_fresh"])
    return found[2:]
