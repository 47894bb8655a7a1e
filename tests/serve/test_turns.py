# SPDX-License-Identifier: Apache-2.0
"""Whose prompt comes next: short ones wait for no long one, none waits for more than twice what came before it, and what several begin with is computed once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import computed, limits

from nnfront.engine.schedule import Limits, Scheduler
from nnfront.engine.sequence import Sequence

CHUNK = 256
COMMON = list(range(900, 900 + 3 * CHUNK))


def served(many: int = 16, **given: int) -> Limits:
    """As `nnfront serve` has them: a step computes as much of prompts as a chunk."""
    return limits(
        **{
            "max_model_len": 1 << 16,
            "pages": 1 << 13,
            "max_num_seqs": many,
            "page_size": 16,
            "chunk": CHUNK,
            "step_tokens": CHUNK,
            **given,
        }
    )


def prompt(arrival: int, length: int, *begin: int, new: int = 1) -> Sequence:
    """A prompt that begins so, with tokens of its own behind."""
    tokens = [*begin, *range(length * arrival + 1000, length * (arrival + 1) + 1000 - len(begin))]
    return Sequence(arrival, tokens, length, length + new)


class Played:
    """Steps of a scheduler: in which one the first token of each sequence came, how many tokens of prompts each has computed, and how many all have."""

    def __init__(self, limits: Limits, *, tokens: int | None = None, snapshots: int | None = None) -> None:
        self.scheduler = Scheduler(limits, snapshots=snapshots)
        self.first: dict[int, int] = {}
        self.steps = self.prompts = 0
        self.tokens = tokens

    def step(self) -> None:
        self.steps += 1
        step = self.scheduler.step(self.tokens)
        self.prompts += sum(count for _, count in step.chunks)
        for each in computed(self.scheduler, step):
            self.first.setdefault(each.arrival, self.steps)
            each.tokens.append(7)
            if len(each.tokens) == each.most:
                self.scheduler.finish(each)

    def submit(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.scheduler.submit(each)

    def drain(self) -> None:
        while not self.scheduler.is_idle:
            self.step()

    def run(self, arrivals: Iterable[tuple[int, Sequence]]) -> None:
        """Sequences that come before so many steps, until all are answered."""
        left = deque(arrivals)
        while left or not self.scheduler.is_idle:
            while left and left[0][0] <= self.steps:
                self.submit(left.popleft()[1])
            self.step()


ways = pytest.mark.parametrize("tokens", [None, CHUNK], ids=["chunks", "packed"])


@ways
def test_a_short_prompt_behind_a_long_one_has_its_first_token_within_two_steps(tokens: int | None) -> None:
    played = Played(served(), tokens=tokens)
    played.run([(0, prompt(0, 1 << 15)), (5, prompt(1, 20)), (17, prompt(2, 20)), (18, prompt(3, 20))])
    assert played.first[1] <= 5 + 2
    assert played.first[2] <= 17 + 2
    assert played.first[3] <= 18 + 2


@ways
def test_a_long_prompt_takes_at_most_twice_the_steps_that_it_takes_alone(tokens: int | None) -> None:
    played, alone = Played(served(), tokens=tokens), (1 << 15) // CHUNK
    others = [(at, prompt(at, CHUNK)) for at in range(1, 300)]
    played.run([(0, prompt(0, 1 << 15)), *others])
    assert alone < played.first[0] <= 2 * alone
    assert mean(played.first[at] - at for at, _ in others[:50]) < 60  # half of the steps are theirs


@ways
def test_a_prompt_that_waits_with_no_other_has_whole_steps(tokens: int | None) -> None:
    played = Played(served(), tokens=tokens)
    played.run([(0, prompt(0, 1 << 15))])
    assert played.first[0] == (1 << 15) // CHUNK


@ways
@pytest.mark.parametrize("every", [0, 1, 3])
def test_prompts_of_one_length_come_one_after_the_other(tokens: int | None, every: int) -> None:
    played = Played(served(), tokens=tokens)
    played.run([(i * every, prompt(i, 4 * CHUNK)) for i in range(8)])
    assert [played.first[i] for i in range(8)] == [4 * (i + 1) for i in range(8)]


@ways
def test_what_a_prompt_leaves_of_a_step_is_for_others(tokens: int | None) -> None:
    played = Played(served(), tokens=tokens)
    played.run([(0, prompt(i, 20)) for i in range(12)])
    assert max(played.first.values()) == 1


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([None, CHUNK]), st.integers(1, 30))
def test_no_prompt_waits_for_more_than_twice_what_came_before_it(
    seed: int, tokens: int | None, many: int
) -> None:
    random_ = random.Random(seed)
    lengths = [random_.choice([1, 20, 200, 300, 2000, 5000]) for _ in range(many)]
    came = sorted(random_.randrange(40) for _ in lengths)
    begins = [random_.choice([[], COMMON, COMMON[:CHUNK]]) for _ in lengths]
    played = Played(served(many), tokens=tokens)
    played.run(
        [
            (at, prompt(i, length, *begin[: length - 1]))
            for i, (at, length, begin) in enumerate(zip(came, lengths, begins, strict=True))
        ]
    )
    before = 0
    for i, (at, length) in enumerate(zip(came, lengths, strict=True)):
        before += -(-length // CHUNK)
        assert played.first[i] <= at + 2 * before


def test_a_prompt_is_admitted_when_its_pages_fit_beside_those_that_others_will_need() -> None:
    played = Played(served(pages=100))
    long, wide, short = prompt(0, 1400), prompt(1, 1100), prompt(2, 20)
    played.submit(long, wide, short)
    played.drain()
    assert played.scheduler.preemptions == 0
    assert played.prompts == 1400 + 1100 + 20  # nothing twice


TAIL = 20


def alike(first: int, many: int, new: int = 1) -> list[Sequence]:
    return [prompt(first + i, len(COMMON) + TAIL, *COMMON, new=new) for i in range(many)]


states = pytest.mark.parametrize("snapshots", [None, 50], ids=["pages", "states"])


@ways
@states
@pytest.mark.parametrize("many", [4, 8])
def test_what_many_begin_with_is_computed_once(tokens: int | None, snapshots: int | None, many: int) -> None:
    played = Played(served(), tokens=tokens, snapshots=snapshots)
    played.run([(0, each) for each in alike(0, many)])
    assert played.prompts == len(COMMON) + many * TAIL


@ways
@states
def test_so_it_is_where_they_come_while_the_first_is_being_computed(
    tokens: int | None, snapshots: int | None
) -> None:
    played = Played(served(), tokens=tokens, snapshots=snapshots)
    played.run([(at, each) for at, each in enumerate(alike(0, 8))])
    assert played.prompts == len(COMMON) + 8 * TAIL


@ways
@states
def test_who_waits_for_the_first_goes_on_where_that_was_when_it_is_cancelled(
    tokens: int | None, snapshots: int | None
) -> None:
    played = Played(served(), tokens=tokens, snapshots=snapshots)
    first, *others = alike(0, 4)
    played.submit(first, *others)
    played.step()
    played.scheduler.finish(first)
    played.drain()
    assert set(played.first) == {other.arrival for other in others}
    assert played.prompts == len(COMMON) + 3 * TAIL


@ways
def test_who_waits_for_one_that_had_computed_nothing_begins_itself(tokens: int | None) -> None:
    played = Played(served(), tokens=tokens)
    first, *others = alike(0, 3)
    played.submit(first, *others)
    played.scheduler.step()
    played.scheduler.finish(first)
    played.drain()
    assert played.prompts == len(COMMON) + 2 * TAIL


@ways
def test_the_turn_of_one_that_waits_is_that_of_the_one_it_waits_for(tokens: int | None) -> None:
    played = Played(served(), tokens=tokens)
    long, short = prompt(1, 1 << 15, *COMMON), prompt(2, len(COMMON) + TAIL, *COMMON)
    played.run([(0, prompt(0, 1 << 15)), (0, long), (1, short)])
    assert played.first[2] <= 1 + 2 * (len(COMMON) // CHUNK + 1)


def test_pages_that_are_to_be_shared_are_counted_once() -> None:
    played = Played(served(pages=64 + 16))  # for 1280 tokens
    played.submit(*alike(0, 8), prompt(8, TAIL))
    played.step()
    assert len(played.scheduler.running) == 8
    assert played.first == {8: 1}  # which runs beside them
    played.drain()
    assert played.scheduler.preemptions == 0


@pytest.mark.parametrize("own", [{"salt": "mine"}, {"adapter": 1}])
def test_nobody_waits_for_what_it_may_not_share(own: dict[str, object]) -> None:
    played = Played(served())
    first, second = alike(0, 2)
    for name, value in own.items():
        setattr(second, name, value)
    played.run([(0, first), (0, second)])
    assert played.prompts == 2 * (len(COMMON) + TAIL)


def test_nobody_waits_where_no_states_can_be_saved() -> None:
    played = Played(served(step_tokens=2 * CHUNK), snapshots=0)
    played.run([(0, each) for each in alike(0, 2)])
    assert played.prompts == 2 * (len(COMMON) + TAIL)
    assert played.steps == 4


def test_whose_states_gave_way_is_computed_again() -> None:
    played = Played(served(), snapshots=1)
    played.submit(*alike(0, 2))
    for _ in range(3):
        played.step()
    played.scheduler.prefixes.forget_states()
    played.drain()
    assert played.prompts == 2 * (len(COMMON) + TAIL)
