# SPDX-License-Identifier: Apache-2.0
"""Random methods in random cases: nothing that is right is refused, and every call, of every size, computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_evaluator import run_method
from random_cases import CASES, VALUES, Inputs, grid, holds, methods

import nnfront as nn
from nnfront.errors import PassError
from nnfront.ir import IRModule, first_difference, parse, verify
from nnfront.passes import inline, lift_transform_params, run, special_cases

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def checked(property: Any, short: int, long: int) -> Any:
    """A test of a property in its short form, and in the long one."""

    @pytest.mark.parametrize(
        "examples", [short, pytest.param(long, marks=pytest.mark.slow)], ids=["short", "long"]
    )
    def test(examples: int) -> None:
        settings(max_examples=examples, deadline=None, suppress_health_check=SLOW)(
            given(st.data())(property)
        )()

    return test


def specialised(ir: IRModule, cases: Sequence[Mapping[str, Any]]) -> IRModule | None:
    """The module in these cases; None if no input meets or reaches one of them. No other refusal is right."""
    try:
        return special_cases(ir, "main", cases)
    except PassError as error:
        if "never holds for main" not in error.what and "is never reached" not in error.what:
            raise
        return None


def label(rounds: Sequence[Sequence[Mapping[str, Any]]], inputs: Inputs) -> str:
    """The case that a call is to enter, of cases of cases: the last list is asked first."""
    held = [
        case for cases in reversed(rounds) if (case := next((c for c in cases if holds(c, inputs)), None))
    ]
    return nn.ir.case_text(joined(held)) if held else "general"


def joined(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The conditions of several cases, each once."""
    result: dict[str, Any] = {}
    for case in cases:
        for name, condition in case.items():
            parts = result.setdefault(name, [])
            parts += [part for part in nn.ir.parts_of(condition) if part not in parts]
    return {name: parts[0] if len(parts) == 1 else parts for name, parts in result.items()}


def no_facts_leak_and_results_are_the_general_ones(data: st.DataObject) -> None:
    ir, rounds = data.draw(methods()), data.draw(st.lists(CASES, min_size=1, max_size=2))
    verify(ir)
    special: IRModule | None = ir
    for cases in rounds:
        special = specialised(special, cases)
        if special is None:
            return
    assert first_difference(parse(str(special)), special) is None
    growth = data.draw(st.booleans())
    others = [
        special,
        inline(special),
        run(special, "simplify"),
        lift_transform_params(special, allow_growth=growth),
    ]
    after = data.draw(st.sampled_from(others))
    for inputs in grid(data.draw(VALUES)):
        expected = run_method(ir, "main", inputs.arguments, inputs.weights)
        entered: list[str] = []
        actual = run_method(after, "main", inputs.arguments, inputs.weights, entered)
        torch.testing.assert_close(actual, expected, equal_nan=True)
        assert entered == [label(rounds, inputs)]


test_no_facts_leak_and_results_are_the_general_ones = checked(
    no_facts_leak_and_results_are_the_general_ones, 40, 2000
)
