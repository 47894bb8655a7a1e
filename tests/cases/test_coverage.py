# SPDX-License-Identifier: Apache-2.0
"""What cases say about one another, against every input there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.cases.conditions import causal, from_plain, multiple_of, read_case, to_plain, zeros
from nnfront.cases.coverage import covers, is_covered, overlap
from nnfront.dims import Symbol
from nnfront.errors import PassError
from nnfront.ir import ScalarType, TensorType

DIMS = {"a": Symbol("a", 0, 0, 12), "b": Symbol("b", 0, 2, 10, 2)}
ARGUMENTS = {"flag": ScalarType("bool"), "k": ScalarType("int64"), "mask": TensorType((4, 4), "float32")}
NUMBERS = list(itertools.product(range(13), range(2, 11, 2), (False, True), range(3)))


def one(name):
    number = st.integers(0, 12)
    part = st.one_of(
        number,
        st.tuples(number, number).map(lambda ends: (min(ends), max(ends))),
        st.integers(1, 6).map(multiple_of),
    )
    return {
        "a": part | st.lists(part, min_size=1, max_size=2),
        "b": part,
        "flag": st.booleans(),
        "k": st.integers(0, 2),
    }[name]


@st.composite
def cases(draw):
    names = draw(st.sets(st.sampled_from(["a", "b", "flag", "k"]), min_size=1, max_size=3))
    conditions = {name: draw(one(name)) for name in sorted(names)}
    try:
        return read_case("f", conditions, DIMS, ARGUMENTS)
    except PassError:
        return None


def holds(condition, number) -> bool:
    """The meaning of a condition, said once more."""
    if isinstance(condition, list):
        return all(holds(part, number) for part in condition)
    if isinstance(condition, multiple_of):
        return number % condition.divisor == 0
    if isinstance(condition, tuple):
        return condition[0] <= number <= condition[1]
    return number == condition and isinstance(number, bool) == isinstance(condition, bool)


def met(case) -> set:
    """The inputs that meet a case."""
    return {
        point
        for point in NUMBERS
        if all(
            holds(c, dict(zip(("a", "b", "flag", "k"), point, strict=True))[n])
            for n, c in case.conditions.items()
        )
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(cases().filter(bool), min_size=2, max_size=4))
def test_coverage_and_overlap_are_what_all_inputs_say(read):
    inputs = [met(case) for case in read]
    # An int argument has more values than those tried here, and only dims are few enough to try: `covers` may say no too often.
    assert not covers(read[0], read[1]) or inputs[1] <= inputs[0]
    assert overlap(read[0], read[1]) == bool(inputs[0] & inputs[1])
    earlier = set().union(*inputs[:-1])
    if is_covered(read[-1], read[:-1]):
        assert inputs[-1] <= earlier
    elif all(not case.values for case in read):
        assert not inputs[-1] <= earlier


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b"]), one("a"), min_size=1))
def test_a_case_is_refused_if_and_only_if_no_input_meets_it(conditions):
    possible = any(
        all(holds(c, {"a": a, "b": b}[n]) for n, c in conditions.items()) for a, b, _, _ in NUMBERS
    )
    if possible:
        read_case("f", conditions, DIMS, {})
    else:
        with pytest.raises(PassError, match="never holds for f"):
            read_case("f", conditions, DIMS, {})


@given(st.dictionaries(st.sampled_from(["a", "b"]), one("a"), min_size=1))
def test_the_plain_form_says_the_same(conditions):
    whole = {**conditions, "m": zeros, "c": causal, "d": causal(-1e9)}
    assert from_plain(to_plain(whole)) == whole
    assert from_plain(from_plain(to_plain(whole))) == whole


def test_values_of_tensors_cover_only_themselves():
    zero, mask, both = (
        read_case("f", conditions, DIMS, ARGUMENTS)
        for conditions in ({"mask": zeros}, {"mask": causal}, {"mask": zeros, "a": 1})
    )
    assert covers(zero, both)
    assert not covers(both, zero)
    assert not covers(zero, mask)
    assert not is_covered(mask, [zero])
    assert overlap(zero, mask)  # the causal mask of one query and one key is 0


def test_many_sizes_are_not_tried():
    dims = {"n": Symbol("n", 0, 0, None)}
    halves = [
        read_case("f", {"n": (0, 10**6)}, dims, {}),
        read_case("f", {"n": (10**6 + 1, 10**9)}, dims, {}),
    ]
    assert not is_covered(read_case("f", {"n": (5, 10**8)}, dims, {}), halves)
