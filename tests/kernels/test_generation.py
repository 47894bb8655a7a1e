# SPDX-License-Identifier: Apache-2.0
"""Generation on a device that captures: a step and its draw are one graph, and the next one is under way before a token is read."""

from __future__ import annotations

import pytest
from few_of import few_of
from generation_runs import WAYS, ahead, generations, given_for_a_token


@pytest.mark.parametrize(("first", "count", "rounds"), few_of([(1, 2, 1), (0, len(WAYS), 2)]))
def test_captured_draws_are_those_of_steps_that_run_as_usual_and_one_capture_serves_all_seeds(
    interpreted, first, count, rounds
):
    same, captures = interpreted(generations, first, count, rounds)
    assert same == [True] * rounds * count
    ways = {tuple((k, v) for k, v in way.items() if k != "seed") for way in WAYS[first : first + count]}
    assert captures == len(ways)


def test_the_next_step_is_under_way_when_a_token_is_handed_out(interpreted):
    interpreted(ahead)


@pytest.mark.matrix
def test_a_token_takes_a_graph_and_two_copies(interpreted):
    assert interpreted(given_for_a_token) == ["copy_", "copy_"]
