# SPDX-License-Identifier: Apache-2.0
"""A cache belongs to one call at a time, and all its layers get the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patience import HANGS_SECONDS

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.errors import LowerError, RunError
from nnfront.session import Session
from nnfront.state.cache import Cache


class Model(nn.Module):
    """Attention in each layer, to the layers of the cache that are said; `wait` is called between them."""

    def __init__(self, layers: list[int]) -> None:
        self.layers = layers

    def forward(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
        for i in self.layers:
            y = op.reshape(x, (x.shape[0], x.shape[1], 1, 4))
            x = op.reshape(op.attention(y, y, y, cache=cache[i]), x.shape)
            x = op.extern("test_cache_use.wait", (x,), x)
        return x

    def either(self, x: nn.Tensor, flag: nn.Tensor, cache: Any) -> nn.Tensor:
        def attend(i: int) -> Callable[[], nn.Tensor]:
            y = op.reshape(x, (x.shape[0], x.shape[1], 1, 4))
            return lambda: op.attention(y, y, y, cache=cache[i])

        return op.cond(flag, attend(0), attend(1))


def compiled(layers: list[int], count: int, method: str = "forward") -> Session:
    tensor = spec.Tensor(["batch", "seq", 4], "float32")
    given = {"x": tensor, "cache": spec.Cache(count, 1, 4, "float32")}
    if method == "either":
        given = {"x": tensor, "flag": spec.Tensor([], "bool"), "cache": given["cache"]}
    return nn.compile(Model(layers).export({method: given})).load({})


@pytest.fixture
def wait():
    """What happens in the middle of a call: `wait.action`."""

    class Wait:
        def __init__(self) -> None:
            self.action: Callable[[], object] = lambda: None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.action()
            return x

    ops.control._EXTERNS["test_cache_use.wait"] = found = Wait()
    yield found
    del ops.control._EXTERNS["test_cache_use.wait"]


X = torch.ones(1, 1, 4)


def during(session: Session, cache: Cache, wait: Any, act: Callable[[], None]) -> None:
    """Act while another thread is in the middle of a call with the cache."""
    inside, done = threading.Event(), threading.Event()
    caller = threading.current_thread()

    def block() -> None:
        if threading.current_thread() is not caller:
            inside.set()
            assert done.wait(HANGS_SECONDS)

    wait.action = block
    thread = threading.Thread(target=session["forward"], args=(X.expand(cache.batch, 1, 4), cache))
    thread.start()
    try:
        assert inside.wait(HANGS_SECONDS)
        act()
    finally:
        done.set()
        thread.join()


MESSAGE = """forward: the cache 'cache' is in use
  a call of 'forward' has not ended that uses it, or one that shares its memory
  help: a cache belongs to one caller at a time: make one for each thread"""


@pytest.mark.parametrize("options", [{}, {"page_size": 4}], ids=["in one piece", "in pages"])
def test_a_cache_in_the_middle_of_a_call_is_refused_to_another(options, wait):
    session = compiled([0, 1], 2)
    cache = session.make_cache(batch=2, max_seq=8, **options)
    x, twin, fork = X.expand(2, 1, 4), cache.clone(), cache.fork([0, 1])

    def act() -> None:
        for other in (cache, cache.rows(0, 2), *([fork] if options else [])):
            with pytest.raises(RunError) as caught:
                session["forward"](x, other)
            assert str(caught.value) == MESSAGE
        session["forward"](x, twin)
        if not options:
            session["forward"](x, fork)

    during(session, cache, wait, act)
    assert cache.lengths == twin.lengths == [1, 1]
    assert fork.lengths == ([0, 0] if options else [1, 1])
    for each in (cache, fork, cache.rows(0, 2)):
        session["forward"](x, each)
    assert cache.lengths == [3, 3]


def test_a_call_that_fails_gives_its_cache_back(wait):
    session = compiled([0], 1)
    cache = session.make_cache(batch=1, max_seq=1)
    for _ in range(2):
        wait.action = lambda: 1 / 0
        with pytest.raises(RunError, match="ZeroDivisionError"):
            session["forward"](X, cache)
        wait.action = lambda: None
        with pytest.raises(RunError, match="argument 'x'"):
            session["forward"](X[0], cache)
    session["forward"](X, cache)
    with pytest.raises(RunError, match="cache is full"):
        session["forward"](X, cache)
    cache.reset()
    session["forward"](X, cache)


def test_of_calls_in_many_threads_each_is_done_or_refused():
    ops.control._EXTERNS["test_cache_use.wait"] = lambda x: x
    session = compiled([0, 1, 2], 3)
    cache, done, refused = session.make_cache(batch=1, max_seq=512), [0] * 4, [0] * 4

    def work(i: int) -> None:
        for _ in range(40):
            try:
                session["forward"](X, cache)
                done[i] += 1
            except RunError as error:
                assert "is in use" in error.what  # noqa: PT017
                refused[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del ops.control._EXTERNS["test_cache_use.wait"]
    assert sum(done) + sum(refused) == 160
    assert cache.lengths == [sum(done)]
    assert cache.uneven() is None


@pytest.mark.parametrize(
    ("layers", "count", "details"),
    [
        ([0, 0, 0], 3, ("layer 0 gets 3*seq tokens", "layer 1 gets no tokens")),
        ([0, 2], 3, ("layer 1 gets no tokens", "layer 0 gets seq tokens")),
        ([0, 1, 1], 3, ("layer 1 gets 2*seq tokens", "layer 0 gets seq tokens")),
        ([0, 1, 2, 1], 3, ("layer 1 gets 2*seq tokens", "layer 0 gets seq tokens")),
        ([0], 2, ("layer 1 gets no tokens", "layer 0 gets seq tokens")),
    ],
)  # fmt: skip
def test_a_layer_that_gets_other_tokens_than_the_rest_is_named_before_anything_runs(layers, count, details):
    with pytest.raises(LowerError) as caught:
        compiled(layers, count)
    error = caught.value
    assert error.what == "forward: layers of the cache 'cache' get different numbers of tokens"
    assert error.details == details
    assert "test_cache_use.py:" in error.where
    assert error.help == "let one attention append to each layer: cache=cache[i] in layer i"


def test_layers_that_get_the_same_by_other_calls_are_right(wait):
    session = compiled([0, 1, 1, 0], 2)
    cache = session.make_cache(batch=1, max_seq=8)
    session["forward"](X, cache)
    assert cache.lengths == [2]
    assert cache.uneven() is None


def test_what_only_a_call_can_say_is_checked_behind_it(wait):
    session = compiled([], 2, "either")
    cache = session.make_cache(batch=1, max_seq=8)
    for flag, lengths in ((True, [1, 0]), (False, [0, 1])):
        with pytest.raises(RunError) as caught:
            session["either"](X, torch.tensor(flag), cache)
        assert str(caught.value) == (
            "either: layers of the cache 'cache' got different numbers of tokens\n"
            f"  layer 0 holds [{lengths[0]}]\n"
            f"  layer 1 holds [{lengths[1]}]\n"
            "  help: let one attention append to each layer: cache=cache[i] in layer i"
        )
        assert [layer.lengths.values for layer in cache] == [(0,), (0,)]


@pytest.mark.parametrize("take", ["mark", "snapshot"])
def test_a_cache_does_not_go_back_to_what_another_one_has_taken(take):
    session = compiled([0], 1)
    one, two = (session.make_cache(batch=2, max_seq=8) for _ in range(2))
    for other in (two, one.rows(0)):
        with pytest.raises(RunError) as caught:
            one.restore(getattr(other, take)())
        assert caught.value.what == f"the {take} is of another cache"
        assert (
            caught.value.help == f"a fork, a clone and rows of a cache take their own: mark = cache.{take}()"
        )
    one.restore(getattr(one, take)())
