# SPDX-License-Identifier: Apache-2.0
"""Comparisons: what is claimed holds for every value inside the facts, and what people rely on is claimed."""

from __future__ import annotations

import threading

import pytest
from dim_oracle import expressions, place, points, size_or_reject, value, worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront import dims
from nnfront.dims import Dim, assuming_unequal, parse, strict_comparisons
from nnfront.errors import DimError

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@PROPERTY
@given(expressions(4), expressions(4), worlds())
def test_no_comparison_claims_what_enumeration_refutes(first, second, world):
    a = size_or_reject(lambda: place(first, world))
    b = size_or_reject(lambda: place(second, world))
    equal, less_equal, less = dims.equal(a, b), dims.less_equal(a, b), dims.less(a, b)
    for point in points(world):
        x, y = value(first, point), value(second, point)
        if x is not None and y is not None:
            assert equal in (None, x == y)
            assert less_equal in (None, x <= y)
            assert less in (None, x < y)


@PROPERTY
@given(expressions(4), st.sampled_from([1, 2, 3, 4, 6, -2]), worlds())
def test_divides_claims_nothing_that_enumeration_refutes(text, k, world):
    answer = dims.divides(k, size_or_reject(lambda: place(text, world)))
    for point in points(world):
        number = value(text, point)
        assert number is None or answer in (None, number % k == 0)


SEQ = Dim("seq", min=1, max=8192, multiple_of=16)


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (parse("n + 1"), parse("1 + n"), True),
        (parse("n + 1"), parse("n"), False),
        (parse("2*n"), parse("2*m + 1"), False),
        (parse("n"), parse("m"), None),
        (parse("n"), 1, None),
        (parse("n"), -1, False),
        (3, 3, True),
        (3, 4, False),
        (Dim("n", min=5), 3, False),
        (Dim("n", max=5), 6, False),
        (Dim("n", min=4, max=4), 4, True),
        (Dim("n", multiple_of=4), 6, False),
        (SEQ, 17, False),
        (SEQ, 32, None),
        (Dim("n", min=5), parse("n"), True),
        (Dim("n", min=5) - parse("n"), 0, True),
        (Dim("n", multiple_of=2) // 2, parse("n // 2"), True),
        (Dim("n", multiple_of=2), parse("n//2*2"), True),
        (Dim("n", max=9), dims.minimum(parse("n"), 9), True),
        (Dim.fresh("n"), Dim.fresh("n"), None),
        (parse("n % 16"), parse("n - n//16*16"), True),
        (parse("n//2 + ceildiv(n, 2)"), parse("n"), True),
        (parse("3*n//2"), parse("n + n//2"), True),
        (parse("min(n, m) + max(n, m)"), parse("n + m"), True),
        (parse("n//m*m + n % m"), parse("n"), True),
        (parse("n//4 % 2"), parse("n % 8//4"), True),
        (parse("batch*(n + 1)"), parse("batch*n"), None),
        (Dim("batch", min=1) * parse("n + 1"), Dim("batch", min=1) * parse("n"), False),
    ],
    ids=str,
)
def test_equal(a, b, answer):
    assert dims.equal(a, b) is answer
    assert dims.equal(b, a) is answer


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (parse("n"), parse("n + 1"), True),
        (parse("n + 1"), parse("n"), False),
        (parse("n"), parse("m"), None),
        (3, 4, True),
        (parse("n"), 8192, None),
        (SEQ, 8192, True),
        (8193, SEQ, False),
        (parse("n//16*16"), parse("n"), True),
        (parse("n"), parse("ceildiv(n, 16)*16"), True),
        (parse("ceildiv(n, 16)*16"), parse("n + 15"), True),
        (parse("ceildiv(n, 16)*16"), parse("n + 14"), None),
        (parse("n//m*m"), parse("n"), True),
        (parse("n % m"), parse("m - 1"), True),
        (parse("n % m"), parse("n"), True),
        (parse("min(n, m)"), parse("max(n, m)"), True),
        (parse("min(n, 4096)*batch"), parse("batch*n"), True),
        (parse("n"), parse("batch*n"), None),
        (parse("n"), Dim("batch", min=1) * parse("n"), True),
        (parse("max(n, 1)"), 0, False),
        (parse("min(n - m, k)*min(n, 4)"), parse("min(n - m, k)*n"), None),
        (0, parse("n//min(m - 5, n)"), None),
        (parse("(n - m) % k"), parse("n - m"), None),
        (Dim("n", multiple_of=8) - 8, Dim("n", multiple_of=8) // 16 * 16, True),
        (Dim("n", multiple_of=8) - 7, Dim("n", multiple_of=8) // 16 * 16, None),
        (parse("n//2"), parse("n"), True),
    ],
    ids=str,
)
def test_less_equal(a, b, answer):
    assert dims.less_equal(a, b) is answer


def test_less_is_strict():
    n = parse("n")
    assert dims.less(n, n) is False
    assert dims.less(n, n + 1) is True
    assert dims.less(n, 5) is None


@pytest.mark.parametrize(
    ("k", "a", "answer"),
    [
        (16, SEQ, True),
        (8, SEQ * Dim("n"), True),
        (3, SEQ, None),
        (4, 8, True),
        (4, 6, False),
        (2, parse("2*n + 1"), False),
        (16, SEQ + 3, False),
        (4, parse("n//4*4"), True),
        (4, parse("n - n % 4"), True),
    ],
    ids=str,
)
def test_divides(k, a, answer):
    assert dims.divides(k, a) is answer


@pytest.mark.parametrize(
    ("a", "answer"),
    [
        (32, True),
        (0, False),
        (40, False),
        (8208, False),
        (SEQ, True),
        (SEQ + 16, None),
        (SEQ + 1, False),
        (parse("n"), None),
    ],
    ids=str,
)
def test_satisfies_checks_range_and_divisor(a, answer):
    assert dims.satisfies(a, SEQ.symbols[0]) is answer


def test_same_is_about_the_form_alone():
    assert dims.same(SEQ, Dim("seq"))
    assert dims.same(3, 3)
    assert not dims.same(3, Dim("n"))
    assert not dims.same(Dim("n"), 3)
    assert not dims.same(Dim("n", min=3, max=3), 3)
    assert dims.same_shape((Dim("n"), 3), [Dim("n"), 3])
    assert not dims.same_shape((Dim("n"), 3), (Dim("n"),))
    assert not dims.same_shape((Dim("n"), 3), (Dim("n"), 4))


def test_double_equals_is_structural():
    n = Dim("n")
    assert n == Dim("n", min=3)
    assert hash(n) == hash(Dim("n", min=3))
    assert n != Dim("m")
    assert n != 1
    assert n != "m"
    assert n + 1 == "1 + n"
    assert n != None  # noqa: E711
    assert n != 1.5
    assert {n + 1: "found"}[1 + n] == "found"


@pytest.mark.parametrize(
    "comparison", [lambda n: n == 1, lambda n: n != 1, lambda n: n == "1", lambda n: 1 == n]
)
def test_strict_comparison_refuses_to_guess(comparison):
    assert comparison(Dim("n")) in (True, False)
    with strict_comparisons(), pytest.raises(DimError) as caught:
        comparison(Dim("n", max=9))
    assert str(caught.value) == (
        "cannot decide whether n == 1\n"
        "  n is between 0 and 9\n"
        "  help: say what is known about the dim in the spec, as in nn.Dim('seq', min=1, max=8192), or keep both cases with op.cond(op.dim_value(n) > 4, then, otherwise)"
    )


def test_strict_comparison_answers_what_is_certain():
    n = Dim("n", min=2)
    with strict_comparisons():
        assert n != 1
        assert n == Dim("n")
        assert n != n + 1
        assert n + 1 == "n + 1"
        assert n != None  # noqa: E711
        assert dims.same(n, n + 0)
        assert not dims.same(n, Dim("m"))
        assert dims.equal(n, Dim("m")) is None
    assert n != Dim("m")


def test_strict_comparison_belongs_to_one_thread():
    answers = []
    with strict_comparisons():
        thread = threading.Thread(target=lambda: answers.append(Dim("n") == 1))
        thread.start()
        thread.join()
    assert answers == [False]


def test_order_is_decided_by_the_facts():
    n = Dim("n", min=2, max=9)
    assert n < 10
    assert n <= 9
    assert n > 1
    assert n >= 2
    assert not n < 2
    assert not n > 9
    assert 10 > n
    assert n < n + 1
    assert n >= Dim("n")


@pytest.mark.parametrize(
    ("comparison", "sign"),
    [(lambda n: n < 5, "<"), (lambda n: n <= 5, "<="), (lambda n: n > 5, ">"), (lambda n: n >= 5, ">=")],
)
def test_undecided_order_is_an_error(comparison, sign):
    with pytest.raises(DimError) as caught:
        comparison(Dim("n", min=2, multiple_of=2))
    assert str(caught.value) == (
        f"cannot decide whether n {sign} 5\n"
        "  n is at least 2, a multiple of 2\n"
        "  help: say what is known about the dim in the spec, as in nn.Dim('seq', min=1, max=8192), or keep both cases with op.cond(op.dim_value(n) > 4, then, otherwise)"
    )


def test_undecided_order_tells_fresh_dims_apart():
    with pytest.raises(
        DimError, match="cannot decide whether n < n_1\n  n is at least 0\n  n_1 is between 0 and 7\n"
    ):
        bool(Dim("n") < Dim.fresh("n", max=7))


@pytest.mark.parametrize("other", ["n", 1.5, None])
def test_order_against_what_is_not_a_size_is_a_type_error(other):
    with pytest.raises(TypeError, match="not supported"):
        bool(Dim("n") < other)


@pytest.mark.parametrize(
    ("use", "wanted"),
    [
        (bool, "true or false"),
        (int, "a Python int"),
        (range, "a Python int"),
        ([1, 2].__getitem__, "a Python int"),
    ],
)
def test_a_dim_has_no_value(use, wanted):
    with pytest.raises(DimError) as caught:
        use(Dim("n", min=1))
    assert str(caught.value) == (
        f"dim 'n' has no value yet, so it cannot be used as {wanted}\n"
        "  n is at least 1\n"
        "  help: give the dim as an int if it is the same in every call, or compare it with another size"
    )


def test_an_assumption_is_the_narrowest_range_in_which_every_answer_holds() -> None:
    n, m = Dim("n", max=9), Dim("m")
    with assuming_unequal() as assumed, strict_comparisons():
        assert not n == 1
        assert not n == 9
        assert not m == 0
        for undecided in (lambda: n == 4, lambda: n == m, lambda: n < 3):
            with pytest.raises(DimError, match="cannot decide"):
                undecided()
    assert {str(s.name): (f.min, f.max) for s, f in assumed.items()} == {"n": (2, 8), "m": (1, None)}
