# SPDX-License-Identifier: Apache-2.0
"""Random methods in random cases: nothing that is right is refused, and every call, of every size, computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_evaluator import run_method
from random_cases import CASES, EVERY_VALUE, VALUES, Inputs, grid, holds, methods

import nnfront as nn
from nnfront.cases.conditions import case_text, parts_of
from nnfront.errors import PassError
from nnfront.ir import IRModule, first_difference, parse, verify
from nnfront.passes import bind_dims, bind_params, inline, lift_transform_params, run, special_cases

Cases = Sequence[Mapping[str, Any]]
Rounds = Sequence[Cases]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def for_random_methods(short: int, long: int) -> Callable[[Callable[..., None]], Any]:
    """A property of random methods and rounds of cases, with few examples, and with many in the long form."""

    def decorate(property: Callable[..., None]) -> Any:
        forms = [short, pytest.param(long, marks=pytest.mark.slow)]

        @pytest.mark.parametrize("examples", forms, ids=["short", "long"])
        def test(examples: int) -> None:
            rounds = st.lists(CASES, min_size=1, max_size=2)
            given_ = given(methods(), rounds, st.data())
            settings(max_examples=examples, deadline=None, suppress_health_check=SLOW)(given_(property))()

        return test

    return decorate


def specialised(ir: IRModule, rounds: Rounds) -> IRModule | None:
    """The module in these cases of cases; None if no input meets or reaches one of them. Nothing else is refused."""
    for cases in rounds:
        try:
            ir = special_cases(ir, "main", cases)
        except PassError as error:
            check_refusal(error.what, cases)
            return None
    return ir


def check_refusal(what: str, cases: Cases) -> None:
    """Check that a refusal is right, by every input there is."""
    inputs = list(grid(EVERY_VALUE))
    if what.endswith(" never holds for main"):
        parts = [{name: condition} for case in cases for name, condition in case.items()]
        assert any(not any(holds(part, each) for each in inputs) for part in parts)
    else:
        assert what.endswith("is never reached"), what
        number = int(what.split()[1])
        assert all(first_that_holds(cases, each) != number for each in inputs)


def first_that_holds(cases: Cases, inputs: Inputs) -> int:
    """The number of the case that a call takes, as many as there are for none."""
    return next((i for i, case in enumerate(cases) if holds(case, inputs)), len(cases))


def label(rounds: Rounds, inputs: Inputs) -> str:
    """The case that a call is to enter, of cases of cases: the last list is asked first."""
    held: dict[str, Any] = {}
    for cases in reversed(rounds):
        for name, condition in [*cases, {}][first_that_holds(cases, inputs)].items():
            parts = held.setdefault(name, [])
            for part in parts_of(condition):  # a condition that is given twice is said once
                if part not in parts:
                    parts.append(part)
    return case_text({name: p[0] if len(p) == 1 else p for name, p in held.items()}) if held else "general"


@for_random_methods(15, 2000)
def test_nothing_right_is_refused_and_every_call_computes_what_the_general_function_does(ir, rounds, data):
    verify(ir)
    special = specialised(ir, rounds)
    if special is None:
        return
    assert first_difference(parse(str(special)), special) is None
    growth = data.draw(st.booleans())
    after = data.draw(
        st.sampled_from(
            [
                special,
                inline(special),
                run(special, "simplify"),
                lift_transform_params(special, allow_growth=growth),
            ]
        )
    )
    for inputs in grid(data.draw(VALUES)):
        expected = run_method(ir, "main", inputs.arguments, inputs.weights)
        entered: list[str] = []
        actual = run_method(after, "main", inputs.arguments, inputs.weights, entered)
        torch.testing.assert_close(actual, expected, equal_nan=True)
        assert entered == [label(rounds, inputs)]


@for_random_methods(6, 500)
def test_lifting_first_gives_the_same_and_sessions_count_and_explain_what_ran(ir, rounds, data):
    special, growth = specialised(ir, rounds), data.draw(st.booleans())
    if special is None:
        return
    lifted = lift_transform_params(ir, allow_growth=growth)
    both = [lift_transform_params(special, allow_growth=growth)]
    asked = {name for cases in rounds for case in cases for name in case}
    if "d" in asked and all(symbol.name != "d" for symbol in lifted["main"].symbols):
        first = next(cases for cases in rounds if any("d" in case for case in cases))
        with pytest.raises(PassError, match=r"^nothing that main does in a call depends on 'd'"):
            special_cases(lifted, "main", first)
    else:
        both.append(specialised(lifted, rounds))
        if " = if " not in str(ir):  # a variant that knows which branch it takes may have more to move
            transforms = [str([f for f in each.functions if f.kind == "transform"]) for each in both]
            assert transforms[0] == transforms[1]
    executables = [nn.compile(each) for each in (ir, special, *both)]
    some = data.draw(st.lists(st.sampled_from(list(grid(data.draw(VALUES)))), min_size=4, max_size=4))
    for inputs in some:
        plain, *sessions = [executable.load(inputs.weights) for executable in executables]
        expected = plain["main"](**inputs.arguments)
        for session in sessions:
            torch.testing.assert_close(session["main"](**inputs.arguments), expected, equal_nan=True)
            text = label(rounds, inputs)
            assert {case for case, count in session.hits("main").items() if count} == {text}
            assert session.explain("main", **inputs.arguments).taken == text


@for_random_methods(6, 500)
def test_binding_after_the_cases_is_binding_before_them(ir, rounds, data):
    special = specialised(ir, rounds)
    if special is None:
        return
    inputs = data.draw(st.sampled_from(list(grid(data.draw(VALUES)))))
    dims = data.draw(st.sets(st.sampled_from(["a", "b", "d"]), max_size=2))
    params = data.draw(st.sets(st.sampled_from(["mask", "k", "flag", "s"]), max_size=2))
    bound = bind_dims(special, {name: inputs.sizes[name] for name in sorted(dims)})
    bound = bind_params(bound, {name: inputs.arguments[name] for name in sorted(params)})
    given_ = {name: value for name, value in inputs.arguments.items() if name not in params}
    expected = run_method(ir, "main", inputs.arguments, inputs.weights)
    session = nn.compile(bound).load(inputs.weights)
    torch.testing.assert_close(session["main"](**given_), expected, equal_nan=True)
    text = label(rounds, inputs)
    assert {case for case, count in session.hits("main").items() if count} == {text}
    assert session.explain("main", **given_).taken == text
