# SPDX-License-Identifier: Apache-2.0
"""The canonical form: means what Python means, meets in one text, and never becomes a constant Dim."""

from __future__ import annotations

import copy
import pickle

import pytest
import sympy
from dim_oracle import (
    NAMES,
    Facts,
    expressions,
    named,
    place,
    points,
    polynomials,
    size_or_reject,
    value,
    worlds,
)
from hypothesis import given, settings

from nnfront import dims
from nnfront.dims import Dim, Symbol, evaluator, parse, same
from nnfront.errors import DimError

SEQ = Dim("seq", min=1, max=8192, multiple_of=16)
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@PROPERTY
@given(expressions(), worlds())
def test_canonical_form_has_pythons_value(text, world):
    size = size_or_reject(lambda: place(text, world))
    bare = size_or_reject(lambda: parse(text))
    run = evaluator([size, bare], [Symbol(name) for name in NAMES])
    for point in points(world):
        expected = value(text, point)
        if expected is not None:
            assert run(list(point.values())) == (expected, expected)


@PROPERTY
@given(expressions(), worlds())
def test_text_has_pythons_value(text, world):
    written = str(size_or_reject(lambda: place(text, world)))
    for point in points(world):
        expected = value(text, point)
        if expected is not None:
            assert value(written, point) == expected


@PROPERTY
@given(expressions(), worlds())
def test_text_parses_back(text, world):
    bare = size_or_reject(lambda: parse(text))
    assert same(parse(str(bare)), bare)
    size = size_or_reject(lambda: place(text, world))
    assert same(place(str(size), world), size)


@PROPERTY
@given(expressions(), worlds())
def test_bounds_and_divisor_hold_everywhere(text, world):
    size = size_or_reject(lambda: place(text, world))
    if isinstance(size, int):
        return
    for point in points(world):
        number = value(text, point)
        if number is not None:
            assert size.min is None or size.min <= number
            assert size.max is None or number <= size.max
            assert number % size.multiple_of == 0


@PROPERTY
@given(polynomials(), polynomials())
def test_polynomials_are_the_same_when_sympy_says_so(first, second):
    variables = {name: sympy.Symbol(name) for name in NAMES}
    difference = sympy.expand(eval(first, {}, variables) - eval(second, {}, variables))
    assert same(parse(first), parse(second)) == (difference == 0)


@PROPERTY
@given(polynomials(5), polynomials(3))
def test_exact_division_undoes_multiplication(first, second):
    a, b = parse(first), parse(second)
    if not isinstance(b, int):
        assert same(dims.floordiv(a * b, b), a)
        assert same(dims.mod(a * b, b), 0)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1 + seq*2", "2*seq + 1"),
        ("seq*batch", "batch*seq"),
        ("4096 - seq", "4096 - seq"),
        ("-seq", "-seq"),
        ("n*n*m - 1", "m*n*n - 1"),
        ("(seq + 15)//16", "ceildiv(seq, 16)"),
        ("-(-seq//16)", "ceildiv(seq, 16)"),
        ("(seq - 1)//2 + 1", "ceildiv(seq, 2)"),
        ("(seq + m - 1)//m", "ceildiv(seq, m)"),
        ("seq//16", "seq // 16"),
        ("floordiv(seq, 16)", "seq // 16"),
        ("-(seq//16)", "-(seq // 16)"),
        ("1 - seq//16", "1 - seq // 16"),
        ("(a - 1)//(b - c)", "(a - 1) // (b - c)"),
        ("(a - 1)//(b*c)", "ceildiv(a, b*c) - 1"),
        ("batch*(seq//16)", "batch*(seq // 16)"),
        ("3*(seq//16)", "3*(seq // 16)"),
        ("(seq + 1)//m", "(seq + 1) // m"),
        ("seq//(m + 1)", "seq // (m + 1)"),
        ("seq % 16", "seq % 16"),
        ("mod(seq, 16)", "seq % 16"),
        ("-seq % 16", "(-seq) % 16"),
        ("(seq//4) % 3", "(seq // 4) % 3"),
        ("min(4096, seq)", "min(seq, 4096)"),
        ("max(b, min(a, 3), 2)", "max(b, min(a, 3), 2)"),
        ("ceildiv(n, 4)*m", "m*ceildiv(n, 4)"),
    ],
)
def test_text_is_canonical(text, canonical):
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "simpler"),
    [
        ("(16*a + b)//16", "a + b//16"),
        ("a//4//8", "a//32"),
        ("(a//4 + 1)//8", "(a + 4)//32"),
        ("ceildiv(ceildiv(a, 4), 8)", "ceildiv(a, 32)"),
        ("a//b//3", "a//(3*b)"),
        ("(6*a + 1)//4", "3*a//2"),
        ("(a*b)//a", "b"),
        ("(64*a*b)//(16*a*b)", "4"),
        ("(a*b + a*c)//(b + c)", "a"),
        ("(a + b)*(a - b)//(a + b)", "a - b"),
        ("a//(a + 1)", "0"),
        ("a//(a + b + 1)", "0"),
        ("a % (a + b + 1)", "a"),
        ("(a*b - 1)//(a*c)", "(b - 1)//c"),
        ("ceildiv(6*a*b, 4*a*c)", "ceildiv(3*b, 2*c)"),
        ("a//-3", "-a//3"),
        ("a % 16 % 16", "a % 16"),
        ("a % 32 % 16", "a % 16"),
        ("(a % 32 + b) % 16", "(a + b) % 16"),
        ("(a % b) % b", "a % b"),
        ("(17*a) % 16", "a % 16"),
        ("(16*a) % 16", "0"),
        ("(2*a + 1) % 4", "2*(a % 2) + 1"),
        ("(a % 16)//16", "0"),
        ("(a*b) % b", "0"),
        ("(a*b) % (a*c)", "a*(b % c)"),
        ("(a + 2*b) % b", "a % b"),
        ("min(min(a, b), a)", "min(a, b)"),
        ("min(a, a + 1)", "a"),
        ("max(min(a, b), a)", "a"),
        ("min(a, 3, 7)", "min(a, 3)"),
        ("max(a, -1)", "a"),
        ("min(a, a//2)", "a//2"),
        ("max(a, ceildiv(a, 16)*16)", "ceildiv(a, 16)*16"),
        ("a - a", "0"),
    ],
)
def test_rule_simplifies(text, simpler):
    assert same(parse(text), parse(simpler))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("(15*a + b)//16", "a + b//16"),
        ("a//4 + b//4", "(a + b)//4"),
        ("a//4//b", "a//(5*b)"),
        ("a//(b - 1)", "0"),
        ("a//(a + b)", "0"),
        ("(b - a)//(b + 1)", "0"),
        ("a % 15 % 16", "a % 16"),
        ("a % 32 % 12", "a % 12"),
        ("min(a, b + 1)", "a"),
        ("max(a, 1)", "a"),
        ("min(min(a, b) + 1, c)", "min(a, b, c)"),
        ("a//a", "a"),
        ("min(a, -a)", "a"),
    ],
)
def test_rule_does_not_fire(text, other):
    assert not same(parse(text), parse(other))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (SEQ // 16 * 16, SEQ),
        (SEQ % 16, 0),
        (SEQ % 8, 0),
        ((SEQ + 3) % 16, 3),
        ((SEQ + 3) // 16, SEQ // 16),
        (SEQ // 16 * Dim("n") * 16, SEQ * Dim("n")),
        (SEQ // 16 // 2, SEQ // 32),
        (SEQ // 8 - SEQ // 16, SEQ // 16),
        (dims.minimum(SEQ, 8192), SEQ),
        (dims.maximum(SEQ, 16), SEQ),
        (dims.minimum(SEQ, 9000, Dim("n")), dims.minimum(SEQ, Dim("n"))),
        (SEQ // 8193, 0),
        (SEQ % 8193, SEQ),
        (SEQ // SEQ, 1),
    ],
)
def test_facts_simplify(size, expected):
    assert same(size, expected)


def test_fractions_print_as_quotients():
    n = Dim("n")
    assert [
        str(size) for size in (SEQ // 16, n - SEQ // 16, 3 * (SEQ // 16), n * (SEQ // 16), -(SEQ // 16))
    ] == [
        "seq // 16",
        "n - seq // 16",
        "3*seq // 16",
        "n*seq // 16",
        "-(seq // 16)",
    ]


def test_rounded_up_quotients_print_as_such_under_facts():
    n = Dim("n")
    sizes = (dims.ceildiv(SEQ, 32), dims.ceildiv(SEQ, 32 * n), dims.ceildiv(SEQ, n), dims.ceildiv(n, SEQ))
    assert [str(size) for size in sizes] == [
        "ceildiv(seq, 32)",
        "ceildiv(seq, 32*n)",
        "ceildiv(seq, n)",
        "ceildiv(n, seq)",
    ]


def test_result_without_names_is_an_int():
    n = Dim("n")
    for size, number in ((n - n, 0), (n * 0, 0), (n // n, 1), (n + 1 - n, 1), (0 // n, 0), (0 * n + 3, 3)):
        assert type(size) is int
        assert size == number


def test_operators_take_ints_on_both_sides():
    n = Dim("n")
    assert [str(size) for size in (3 + n, 3 - n, 3 * n, 7 // n, 7 % n, +n, n - 3)] == [
        "n + 3",
        "3 - n",
        "3*n",
        "7 // n",
        "7 % n",
        "n",
        "n - 3",
    ]
    assert str(sum([n, 2, n])) == "2*n + 2"


@pytest.mark.parametrize("other", [True, 1.5, "n", None])
def test_operators_refuse_what_is_not_a_size(other):
    with pytest.raises(TypeError, match="unsupported operand"):
        Dim("n") + other


def test_true_division_is_refused():
    with pytest.raises(DimError) as caught:
        Dim("n") / 2
    assert str(caught.value) == (
        "dim 'n' cannot be divided with '/': the result need not be an integer\n"
        "  help: use // to round down, or dims.ceildiv to round up"
    )


@pytest.mark.parametrize(
    "divide",
    [lambda n: n // 0, lambda n: n % 0, lambda n: n // Dim("z", max=0), lambda n: dims.ceildiv(4, 0)],
)
def test_division_by_what_is_certainly_zero_is_an_error(divide):
    with pytest.raises(DimError) as caught:
        divide(Dim("n"))
    assert str(caught.value) == (
        "division by zero in a dim expression\n  help: the divisor must be able to be something else than 0"
    )


def test_product_and_total():
    n, m = Dim("n"), Dim("m")
    assert same(dims.product([n, 2, m, 3]), 6 * m * n)
    assert same(dims.total([n, 2, m, 3]), m + n + 5)
    assert dims.product([]) == 1
    assert dims.total([]) == 0


def test_a_negative_factor_is_not_cancelled_from_a_rounded_quotient():
    text = "(min(-a, -b)*c - 1)//(min(-a, -b)*min(-b, -c))"
    size = parse(text)
    for point in points(dict.fromkeys(NAMES, Facts(0, 4, 1))):
        expected = value(text, point)
        assert expected is None or dims.evaluate(size, point) == expected


@pytest.mark.parametrize(
    "text", ["(-3)//(b - c)", "3//(b - c)", "(a - 5)//(b + 1)", "(a - 5)//(b - c)", "(a - 5) % (b - c)"]
)
def test_bounds_of_quotients_hold_for_every_sign(text):
    world = {"a": Facts(0, 3, 1), "b": Facts(0, 4, 1), "c": Facts(0, 4, 1)}
    size = place(text, world)
    found = {value(text, point) for point in points(world)} - {None}
    assert size.min <= min(found)
    assert max(found) <= size.max


def test_a_square_is_never_negative():
    half = parse("(a - b)//2")
    assert half.min is None
    assert (half * half).min == 0


def test_a_negative_number_over_a_large_one_is_minus_one():
    assert ((Dim("a", max=3) - 5) // (Dim("b") + 1)).max == -1


@pytest.mark.parametrize("world", [{"a": Facts(1, 8, 2), "b": Facts(0, None, 1), "c": Facts(0, 3, 1)}])
def test_bounds_are_tight_for_linear_forms(world):
    a, c = named("a", world), named("c", world)
    size = 3 * a - 2 * c + 1
    assert (size.min, size.max) == (2 * 3 - 2 * 3 + 1, 3 * 8 + 1)
    assert (a * c).max == 24
    assert (a - named("b", world)).min is None


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda size: pickle.loads(pickle.dumps(size))])
def test_copies_are_the_same_with_the_same_facts(clone):
    size = SEQ * Dim("n") + dims.minimum(SEQ, 77) % 5 + 1
    assert same(clone(size), size)
    assert hash(clone(size)) == hash(size)
    assert [symbol.facts for symbol in clone(size).symbols] == [(0, None, 1), (1, 8192, 16)]


def test_a_dim_cannot_be_changed():
    n = Dim("n", min=1)
    with pytest.raises(AttributeError):
        n.min = 3
    with pytest.raises(AttributeError):
        n.anything = 3
    with pytest.raises(AttributeError):
        n.symbols[0].min = 3


def test_symbols_are_sorted_and_seen_through_functions():
    assert [symbol.name for symbol in parse("min(z, a) + y//x").symbols] == ["a", "x", "y", "z"]


def test_format_aligns_like_text():
    assert f"{Dim('n'):>4}|" == "   n|"
    assert repr(Dim("n + 1")) == "Dim('n + 1')"
