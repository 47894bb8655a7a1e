# SPDX-License-Identifier: Apache-2.0
"""What is remembered of sequences after their end: as much as there are pages for that nobody needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from answering import Answer
from serving import LIMITS
from simulated import limits, run, sequence

import nnfront as nn
from nnfront.engine.compute import Compute
from nnfront.engine.params import Params
from nnfront.engine.schedule import Scheduler
from nnfront.serve.engine import Engine

# Pages of 2 tokens, blocks of 4: a prompt of 9 leaves two blocks, which are four pages.


def cached(scheduler: Scheduler, arrival: int, first: int) -> int:
    """How much of a prompt of 9 that begins so was remembered."""
    again = sequence(arrival, 9, 1, first=first)
    run(scheduler, again)
    return again.cached


def test_as_many_are_remembered_as_there_are_pages_for() -> None:
    scheduler = Scheduler(limits(pages=1024))
    run(scheduler, *(sequence(i, 9, 1, first=100 * i) for i in range(200)))
    assert len(scheduler.remembered) == 200
    assert all(cached(scheduler, 200 + i, 100 * i) == 8 for i in range(200))


def test_what_was_used_least_recently_is_given_back_first_and_from_its_end() -> None:
    scheduler = Scheduler(limits(pages=14))
    run(scheduler, *(sequence(i, 9, 1, first=100 * i) for i in range(3)))
    assert {n: scheduler.pages.length(n) for n in scheduler.remembered} == {0: 8, 1: 8, 2: 8}
    run(scheduler, sequence(3, 5, 1, first=300))  # three pages, of which two are free
    assert {n: scheduler.pages.length(n) for n in scheduler.remembered} == {0: 4, 1: 8, 2: 8, 3: 4}
    assert cached(scheduler, 4, 0) == 4


def test_what_is_used_again_stays_longest() -> None:
    scheduler = Scheduler(limits(pages=14))
    run(scheduler, *(sequence(i, 9, 1, first=100 * i) for i in range(3)))
    assert cached(scheduler, 3, 0) == 8
    run(scheduler, sequence(4, 9, 1, first=400))
    assert cached(scheduler, 5, 0) == 8


def test_what_was_in_a_window_is_held_though_all_pages_are_remembered() -> None:
    scheduler = Scheduler(limits(pages=30), snapshots=10, window=2)
    for i in range(10):
        run(scheduler, sequence(i, 9, 1, first=100 * i))
        assert cached(scheduler, 100 + i, 100 * i) == 8


def test_nothing_is_forgotten_for_a_request_that_would_not_fit_then_either() -> None:
    scheduler = Scheduler(limits(pages=13))
    run(scheduler, sequence(0, 9, 1))
    running, large = sequence(1, 9, 6, first=100), sequence(2, 17, 1, first=200)
    scheduler.submit(running)
    scheduler.submit(large)
    scheduler.step()
    assert scheduler.running == [running]
    assert list(scheduler.remembered) == [0]


def test_nothing_is_remembered_where_that_is_not_wanted() -> None:
    scheduler = Scheduler(limits(remembers=False))
    run(scheduler, sequence(0, 9, 1))
    assert not scheduler.remembered
    assert scheduler.pages.free == 32


@pytest.mark.parametrize("packs", [None, False], ids=["as here", "chunks"])
def test_what_is_left_of_a_sequence_is_the_same_tokens(
    llm: nn.LLM, text: list[int], packs: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs is not None:
        monkeypatch.setattr(Compute, "packs", packs)
    prompt, other, params = text[:200], text[300:400], Params(max_tokens=20, ignore_eos=True)
    with Engine(llm, replace(LIMITS, pages=34)) as engine:
        expected = Answer(engine, prompt, params).wait()
        Answer(engine, other, params).wait()
        again = Answer(engine, prompt, params)
        assert again.wait() == expected
        assert 0 < again.cached < 190
        engine.forget()
        Answer(engine, [5], Params(max_tokens=1)).wait()
        assert engine._runner.pool.cache.used_pages <= 3


def test_pages_of_what_is_remembered_count_as_free(engine: Engine, text: list[int]) -> None:
    Answer(engine, text[:80], Params(max_tokens=3)).wait()
    assert engine._scheduler.pages.free < LIMITS.pages
    assert engine.counts()["remembered"] == 1
    assert engine.counts()["pages_used"] == 0
