# SPDX-License-Identifier: Apache-2.0
"""What may happen to caches between captured steps, for `test_graphs.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import random
import weakref
from operator import methodcaller
from typing import Any

import pytest
import torch
from graph_runs import CONFIG, Both, both, pair, tokens
from nnfront_kernels.common import launched_by
from tape import TapeCapture

import nnfront as nn
from nnfront.backends.cuda import graphs
from nnfront.session import Session


def live(page_size: int | None) -> None:
    """Cuts, forks, resets, new weights, several caches in turn: a graph knows nothing of them."""
    one, other, _ = pair()
    sizes = {"batch": 2, "max_seq": 24, **({} if page_size is None else {"page_size": page_size, "pages": 5})}
    run = both(one, other, **sizes)
    found = one["decode"].graphs

    def steps(count: int, run: Both = run) -> None:
        for _ in range(count):
            run("decode", tokens(2, 1))

    run("prefill", tokens(2, 15))
    steps(2)
    assert found.replays == 0  # at 16 tokens and at 17, each the first of its class
    steps(2)
    run.map("truncate", 9)
    steps(2)
    assert found.replays == 4
    forked = run.map("fork", [1, 1])
    steps(2, forked)
    steps(2)
    steps(1, forked)
    del forked
    run.map("reset")
    run("prefill", tokens(2, 10))
    before = found.replays
    steps(1)
    assert found.replays == before + 1
    weights = {name: (torch.randn(CONFIG.hidden_size) * 0.1).half() for name in ("model.norm.weight",)}
    for session in (one, other):
        session.update(weights)
    steps(2)
    assert found.replays == before + 3
    assert len(found) == 1  # those of the old weights are void


def share(page_size: int | None, stored_as: str | None) -> None:
    """Conversations one after the other and beside one another, each in a cache of its own: what one has captured serves all."""
    one, other, capturer = pair()
    pages = {} if page_size is None else {"page_size": page_size}
    sizes = {"batch": 2, "max_seq": 32, "stored_as": stored_as, **pages}
    first = both(one, other, **sizes)
    first("prefill", tokens(2, 3))
    first.map("rows", 0)("prefill", tokens(1, 7))
    for _ in range(2):
        first("decode", tokens(2, 1))
    tapes, found = capturer.tapes, one["decode"].graphs
    captured = [tape for tape in tapes if "attention_decode_kernel" in tape.names]
    assert (len(captured), found.replays) == (1, 1)
    second, third = both(one, other, **sizes), both(one, other, **sizes)
    assert second.caches[0].addresses != first.caches[0].addresses
    second("prefill", tokens(2, 8))
    second("decode", tokens(2, 1))
    first("decode", tokens(2, 1))
    for tensor in first.caches[0][0].storage.tensors():  # its memory is somebody else's now
        tensor.view(torch.uint8).fill_(0xFF)
    del first
    third("prefill", tokens(2, 9))
    for _ in range(2):
        second("decode", tokens(2, 1))
        third("decode", tokens(2, 1))
    forked = third.map("fork", [1, 1])
    forked("decode", tokens(2, 1))
    assert (len(found), found.replays) == (1, 8)
    assert [tape for tape in tapes if "attention_decode_kernel" in tape.names] == captured


def refuse_when_full(page_size: int | None) -> None:
    """A full cache is an error before anything runs."""
    one, _, _ = pair()
    pages = {} if page_size is None else {"page_size": page_size, "pages": 1}
    cache = one.make_cache(batch=1, max_seq=16 if page_size is None else 32, **pages)
    one["prefill"](tokens(1, 13), cache)
    for _ in range(3):
        one["decode"](tokens(1, 1), cache)
    found = one["decode"].graphs
    assert found.replays == 2
    kept = [part.clone() for part in cache[0].storage.tensors()]
    with pytest.raises(
        nn.errors.RunError, match="cache is full" if page_size is None else "cache is out of pages"
    ):
        one["decode"](tokens(1, 1), cache)
    assert found.replays == 2
    assert cache.lengths == [16]
    assert all(map(torch.equal, kept, cache[0].storage.tensors()))


def bound() -> None:
    """Graphs are few, and hold no memory of caches."""
    one, _, capturer = pair()
    tape_of, capturer.capture = capturer.capture, lambda run: forgotten(tape_of, capturer, run)
    before, graphs.MAX_GRAPHS = graphs.MAX_GRAPHS, 2
    try:
        with launched_by(lambda plan: None):
            for batch in (1, 2, 3, 1):
                cache = one.make_cache(batch=batch, max_seq=8)
                for _ in range(2):
                    one["decode"](tokens(batch, 1), cache)
                assert len(one["decode"].graphs) <= 2
                held = weakref.ref(cache[0].storage.keys)
                del cache
                assert held() is None
    finally:
        graphs.MAX_GRAPHS = before
    # The second call of each cache, and both of the last one, which lies as the first one did.
    assert one["decode"].graphs.replays == 5


def wander(page_size: int | None, seeds: int = 12, steps: int = 25) -> None:
    """Anything that may happen to caches, in any order: after each step they hold as many tokens on the same pages, or refuse alike."""
    one, other, capturer = pair()
    capturer.capture = lambda run: (run(), lambda: None)[1]
    sizes = {"batch": 2, "max_seq": 20, **({} if page_size is None else {"page_size": page_size, "pages": 6})}
    with launched_by(lambda plan: None):
        for seed in range(seeds):
            chance = random.Random(seed)
            caches = [tuple(session.make_cache(**sizes) for session in (one, other))]
            for _ in range(steps):
                pair_of = caches[chance.randrange(len(caches))]
                match chance.randrange(8):
                    case 0:
                        length = chance.randrange(20)
                        list(map(methodcaller("truncate", length), pair_of))
                    case 1 if len(caches) < 3:
                        chosen = [chance.randrange(2) for _ in range(2)]
                        caches.append(tuple(cache.fork(chosen) for cache in pair_of))
                    case 2 if len(caches) > 1:
                        caches.remove(pair_of)
                    case 3:
                        list(map(methodcaller("reset"), pair_of))
                    case 4:
                        i, ids = chance.randrange(2), tokens(1, chance.randrange(1, 6))
                        outcome = [
                            done(s, "prefill", ids, c.rows(i))
                            for s, c in zip((one, other), pair_of, strict=True)
                        ]
                        assert outcome[0] == outcome[1]
                    case _:
                        outcome = [
                            done(s, "decode", tokens(2, 1), c)
                            for s, c in zip((one, other), pair_of, strict=True)
                        ]
                        assert outcome[0] == outcome[1]
                del pair_of
                for mine, theirs in caches:
                    assert mine.lengths == theirs.lengths
                    assert {tuple(layer.lengths.values) for layer in mine} == {tuple(mine.lengths)}
                    if page_size is not None:
                        assert mine.free_pages == theirs.free_pages
                        assert mine[0].page_table.tolist() == theirs[0].page_table.tolist()
    assert one["decode"].graphs.replays > 5 * seeds


def done(session: Session, name: str, ids: torch.Tensor, cache: Any) -> str:
    """What is wrong with a call, nothing if it works."""
    try:
        session[name](ids, cache)
    except nn.errors.RunError as error:
        return error.what
    return ""


def forgotten(capture: Any, capturer: TapeCapture, run: Any) -> Any:
    """A graph as a GPU has it: addresses, no tensors."""
    capture(run)
    capturer.tapes.clear()
    return lambda: None
