# SPDX-License-Identifier: Apache-2.0
"""The scheduler against every order of events: nothing is lost, leaked, shared wrongly or starved, and first come is first served."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation, limits, run, sequence

from nnfront.engine.pages import Pages
from nnfront.engine.schedule import Limits, Scheduler
from nnfront.errors import Busy, RunError

LIMITS = st.builds(
    lambda pages, seqs, page, chunk, step, remembers, queued, answers: Limits(
        max_model_len=40,
        pages=pages,
        max_num_seqs=seqs,
        max_queued=queued,
        page_size=page,
        chunk=page * chunk,
        step_tokens=page * chunk * step,
        remembers=remembers,
        reuse_answers=answers,
    ),
    st.integers(4, 30),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 20),
    st.booleans(),
)


def play(
    limits: Limits,
    random_: random.Random,
    events: int,
    snapshots: int | None = None,
    guesses: int = 0,
    window: int | None = None,
    asides: float = 0,
    packs: bool = False,
) -> Simulation:
    simulation = Simulation(limits, snapshots, guesses, window, asides, packs)
    room = min(limits.pages * limits.page_size, limits.max_model_len)
    stems = [[random_.randrange(3) for _ in range(room)] for _ in range(3)]
    for _ in range(events):
        kind = random_.random()
        if kind < 0.3:
            length = random_.randint(1, room - 1)
            prompt = random_.choice(stems)[: random_.randint(0, length)]
            prompt = prompt + [random_.randrange(3) for _ in range(length - len(prompt))]
            simulation.submit(prompt, random_.randint(1, room - length))
        elif kind < 0.37:
            simulation.cancel(random_.randrange(100))
        else:
            simulation.step()
    simulation.drain()
    return simulation


@settings(max_examples=60)
@given(
    LIMITS,
    st.integers(0, 2**32),
    st.sampled_from([(None, None), (0, None), (1, None), (3, None), (50, None), (3, 5), (50, 1), (50, 30)]),
    st.sampled_from([0, 0, 2, 7]),
    st.sampled_from([0.0, 0.3, 0.8]),
)
def test_no_page_leaks_nobody_starves_and_every_answer_is_computed_on_its_own_tokens(
    limits: Limits, seed: int, states: tuple[int | None, int | None], guesses: int, asides: float
) -> None:
    snapshots, window = states
    play(limits, random.Random(seed), 60, snapshots, guesses, window, asides)


@settings(max_examples=60)
@given(
    LIMITS,
    st.integers(0, 2**32),
    st.sampled_from([(None, None), (3, 5), (50, 1), (50, 30)]),
    st.sampled_from([0, 2, 7]),
)
def test_it_is_so_too_where_prompts_are_cut_in_any_pieces_that_answers_leave_room_for(
    limits: Limits, seed: int, states: tuple[int | None, int | None], guesses: int
) -> None:
    play(limits, random.Random(seed), 60, *states[:1], guesses, states[1], packs=True)


@pytest.mark.matrix
@pytest.mark.parametrize(("snapshots", "window"), [(None, None), (4, None), (4, 6)])
def test_a_hundred_thousand_events_and_ten_thousand_requests(
    snapshots: int | None, window: int | None
) -> None:
    random_ = random.Random(1)
    limits = Limits(max_model_len=40, pages=24, max_num_seqs=5, page_size=2, chunk=4, step_tokens=8)
    simulation = play(limits, random_, 100_000, snapshots, 3, window, 0.3)
    assert simulation.were_aside > 1000
    assert simulation.scheduler.preemptions > 1000
    assert simulation.arrivals > 10_000  # requests that were taken, all of which have ended


def test_a_long_prompt_comes_in_chunks_between_the_tokens_of_others() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    short, long = sequence(0, 2, 6), sequence(1, 18, 1, first=50)
    steps = run(scheduler, short, long)
    assert [[(s.arrival, n) for s, n in step.chunks] for step in steps[:6]] == [
        [(0, 2), (1, 4)],
        [(1, 4)],
        [(1, 4)],
        [(1, 4)],
        [(1, 2)],
        [],
    ]
    assert [[s.arrival for s in step.decode] for step in steps[:6]] == [[], [0], [0], [0], [0], [0]]


def test_whole_chunks_of_a_prompt_are_computed_once() -> None:
    scheduler = Scheduler(limits())
    first, second = sequence(0, 11, 2), sequence(1, 11, 2)
    run(scheduler, first)
    steps = run(scheduler, second)
    assert second.cached == 8
    assert [count for step in steps for _, count in step.chunks] == [3]


def test_where_a_state_is_kept_a_prompt_goes_on_behind_the_last_chunk_whose_states_are_there() -> None:
    scheduler = Scheduler(limits(), snapshots=2)
    run(scheduler, sequence(0, 11, 2))
    second, third, fourth = sequence(1, 11, 2), sequence(2, 7, 2), sequence(3, 11, 2)
    run(scheduler, second, third)
    assert (second.cached, third.cached) == (8, 4)
    run(scheduler, sequence(4, 7, 2, first=50))  # whose states take the place of those used least recently
    run(scheduler, fourth)
    assert fourth.cached == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, sequence(0, 8, 1))
    second = sequence(1, 8, 1)
    run(scheduler, second)
    assert second.cached == 4


def test_texts_with_another_salt_share_nothing() -> None:
    scheduler = Scheduler(limits())
    run(scheduler, sequence(0, 11, 2))
    other = sequence(1, 11, 2)
    other.salt = "mine"
    run(scheduler, other)
    assert other.cached == 0


def test_when_pages_run_out_the_youngest_gives_its_own_back_and_is_computed_again() -> None:
    scheduler = Scheduler(limits(pages=8))
    old, young = sequence(0, 4, 8), sequence(1, 4, 8, first=50)
    steps = run(scheduler, old, young)
    assert scheduler.preemptions == 1
    assert len(old.tokens) == len(young.tokens) == 12
    assert [s.arrival for s in steps[-1].decode] == [1]
    # What had been answered is computed token by token again, as it was.
    assert all(count == 4 for step in steps for s, count in step.chunks)


def test_more_than_may_wait_are_refused() -> None:
    scheduler = Scheduler(limits(max_queued=1))
    scheduler.submit(sequence(0, 2, 2))
    with pytest.raises(Busy, match="1 requests are waiting, no more are taken") as error:
        scheduler.submit(sequence(1, 2, 2))
    assert error.value.help == "ask again later, or serve with a larger --max-queued"


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(limits(pages=4))
    with pytest.raises(RunError, match="the request does not fit") as error:
        scheduler.submit(sequence(0, 6, 3))
    assert error.value.details == ("got 6 tokens and 3 new ones, there is room for 8",)


def test_limits_say_all_that_is_wrong_with_them() -> None:
    with pytest.raises(RunError, match="the limits are out of range") as error:
        Limits(max_model_len=0, pages=True)
    assert error.value.details == ("max_model_len is 0, expected an int >= 1",)
    with pytest.raises(RunError) as error:
        Limits(max_model_len=8, pages=8, page_size=16, chunk=24)
    assert error.value.details == ("chunk is 24, expected a multiple of page_size = 16",)
    with pytest.raises(RunError) as error:
        Limits(max_model_len=8, pages=8, chunk=32, step_tokens=16)
    assert error.value.details == ("step_tokens is 16, expected at least chunk = 32",)


def test_pages_copy_what_a_fork_writes_to() -> None:
    pages = Pages(4, 2)
    pages.add(0)
    pages.append(0, 3)
    pages.fork(0, 3, 1)
    assert (pages.free, pages.need(1, 1), pages.need(0, 1)) == (2, 1, 1)
    pages.append(1, 1)
    assert (pages.free, pages.need(0, 1)) == (1, 0)
