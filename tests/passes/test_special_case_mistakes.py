# SPDX-License-Identifier: Apache-2.0
"""What cases say about one another: those that are never reached, that overlap, that no input can meet; mistakes by name."""

from __future__ import annotations

import pytest
from pass_checks import module

from nnfront.cases.conditions import causal, multiple_of, zeros
from nnfront.errors import PassError
from nnfront.ir import admit, first_difference, verify
from nnfront.passes import special_cases

DIMS = """
def main[a: 1..64, b: 1..64](x: input float32[a, b], mask: input float32[a], k: input int64, s: input float32[]) -> float32[a, b] {
    c: float32[a, 1] = unsqueeze(mask, dim=1)
    y: float32[a, b] = add(x, c)
    return y
}
"""


@pytest.mark.parametrize(
    ("cases", "number", "detail"),
    [
        ([{"a": (1, 8)}, {"a": 4}], 1, "case 0, '1 <= a <= 8', takes all of its inputs"),
        ([{"a": multiple_of(4)}, {"a": multiple_of(8)}], 1, "case 0, 'a % 4 == 0', takes all of its inputs"),
        ([{"a": 4}, {"a": 4, "b": 2}], 1, "case 0, 'a == 4', takes all of its inputs"),
        ([{"s": 0.0}, {"s": zeros}], 1, "case 0, 's == 0.0', takes all of its inputs"),
        ([{"mask": zeros}, {"a": 4, "mask": zeros}], 1, "case 0, 'mask == 0', takes all of its inputs"),
        (
            [{"a": (1, 5)}, {"a": (5, 9)}, {"a": (2, 8)}],
            2,
            "the cases before it together take all of its inputs",
        ),
        (
            [{"a": (1, 32)}, {"a": (33, 64)}, {"b": 1}],
            2,
            "the cases before it together take all of its inputs",
        ),
        ([{"a": (1, 64)}, {"b": 1}], 1, "case 0, '1 <= a <= 64', takes all of its inputs"),
    ],
    ids=[
        "range",
        "multiple",
        "fewer conditions",
        "a number and zeros",
        "value",
        "two ranges",
        "the whole range in parts",
        "the whole range",
    ],
)
def test_a_case_that_is_never_reached_is_refused(cases, number, detail):
    with pytest.raises(PassError) as caught:
        special_cases(module(DIMS), "main", cases)
    text = special_cases.report(module(DIMS), "main", cases).functions[0].cases[number].text
    assert str(caught.value) == (
        f"case {number} of main, '{text}', is never reached\n  {detail}\n  help: put it first, or leave it out"
    )


@pytest.mark.parametrize(
    "cases",
    [
        [{"a": 4}, {"a": (1, 8)}],
        [{"a": multiple_of(8)}, {"a": multiple_of(4)}],
        [{"a": 4, "b": 2}, {"a": 4}],
        [{"a": 4, "mask": zeros}, {"a": 4}],
        [{"a": (1, 5)}, {"a": (6, 8)}, {"a": (2, 9)}],
    ],
)
def test_a_case_that_some_input_reaches_is_not_refused(cases):
    verify(special_cases(module(DIMS), "main", cases))


def test_the_report_says_costs_overlaps_and_what_is_never_reached():
    cases = [{"a": 4}, {"a": (2, 8), "mask": zeros}, {"b": multiple_of(16)}, {"a": 4, "b": 2}]
    report = special_cases.report(module(DIMS), "main", cases)
    assert str(report) == (
        "main: 4 cases, then the general function\n"
        "  0: a == 4: asks 1 number\n"
        "  1: 2 <= a <= 8 and mask == 0: asks 1 number, reads 'mask', 4*a bytes\n"
        "  2: b % 16 == 0: asks 1 number\n"
        "  3: a == 4 and b == 2: asks 2 numbers\n"
        "  overlap: what meets 0 and 1 goes to 0\n"
        "  overlap: what meets 0 and 2 goes to 0\n"
        "  overlap: what meets 1 and 2 goes to 1\n"
        "  never reached: 3, the cases before it take all of its inputs"
    )
    assert report.functions[0].overlaps == ((0, 1), (0, 2), (1, 2))
    assert str(special_cases.report(module(DIMS))) == "no function has special cases"


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (None, [{"a": 1}]),
            'these cases are for no function\n  help: name one: special_cases(ir, "decode", [...])',
        ),
        (
            ("main",),
            'main declares no special cases\n  help: give them here, or in the spec as "$": {"special_cases": [...]}',
        ),
        (
            ("main", [{"maks": zeros}]),
            "main has no dim and no argument 'maks'\n  dims are a, b; arguments are x, mask, k, s\n  help: did you mean 'mask'?",
        ),
        (
            ("main", [{"mask": causal}]),
            "argument 'mask' of main is no mask: it has 1 axes of float32\n"
            "  help: a mask is bool or float, and its last two axes are queries and keys",
        ),
        (
            ("main", [{"a": [multiple_of(16), (1, 8)]}]),
            "'a % 16 == 0 and 1 <= a <= 8' never holds for main\n  a is between 1 and 64",
        ),
        (("main", [{"k": [2, 3]}]), "'k == 2 and k == 3' never holds for main"),
        (("main", [{"s": [zeros, 1]}]), "'s == 0 and s == 1' never holds for main"),
        (("main", [{"a": []}]), "a case of main says nothing about 'a'\n  help: leave the name out"),
        (("main", [{"k": []}]), "a case of main says nothing about 'k'\n  help: leave the name out"),
    ],
    ids=[
        "no function",
        "nothing declared",
        "near name",
        "no mask",
        "two that contradict",
        "two numbers",
        "zero and another number",
        "no condition on a dim",
        "no condition on an argument",
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(PassError) as caught:
        special_cases(module(DIMS), *arguments)
    assert str(caught.value) == message


def test_as_many_cases_as_text_from_outside_may_have_are_allowed():
    ir = module(DIMS)
    most = special_cases(ir, "main", [{"a": i} for i in range(1, 61)])
    assert first_difference(admit(str(most)), most) is None
    with pytest.raises(PassError) as caught:
        special_cases(ir, "main", [{"a": i} for i in range(1, 62)])
    assert str(caught.value) == (
        "main has 61 special cases, 60 are the most\n  help: let ranges and multiple_of(number) stand for several"
    )
    with pytest.raises(PassError, match=r"^main has 61 special cases"):
        special_cases(most, "main", [{"b": 2}])


def test_a_case_in_which_an_op_is_not_defined_is_named():
    ir = module(
        "def main[n: 1..64 % 2](x: input float32[n]) -> float32[n // 2, 2] { y: float32[n // 2, 2] = reshape(x, shape=(n // 2, 2)) return y }"
    )
    verify(special_cases(ir, "main", [{"n": 4}]))
    with pytest.raises(
        PassError, match=r"^'n == 3' never holds for main\n  n is between 1 and 64, a multiple of 2$"
    ):
        special_cases(ir, "main", [{"n": 3}])
