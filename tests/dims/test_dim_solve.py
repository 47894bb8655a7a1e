# SPDX-License-Identifier: Apache-2.0
"""From sizes to numbers and back: evaluation, solving for symbols, matching a callee's sizes with a caller's."""

from __future__ import annotations

import itertools

import numpy
import pytest
from dim_oracle import NAMES, expressions, place, points, size_or_reject, value, worlds
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from nnfront import dims
from nnfront.dims import Dim, Symbol, determined, evaluate, evaluator, parse, same, solve, unify
from nnfront.errors import DimError

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
SYMBOLS = [Symbol(name) for name in NAMES]


def numbers(found):
    return {symbol.name: number for symbol, number in found.items()}


@PROPERTY
@given(expressions(6), worlds())
def test_evaluate_is_python(text, world):
    size = size_or_reject(lambda: place(text, world))
    for point in itertools.islice(points(world), 5):
        expected = value(text, point)
        if expected is not None:
            assert evaluate(size, point) == expected
            assert evaluate(size, {Symbol(name): number for name, number in point.items()}) == expected


def test_evaluator_returns_ints_for_ints():
    run = evaluator([Dim("a"), 3, parse("min(a, 4) % 3")], [Symbol("a")])
    assert run([7]) == (7, 3, 1)
    assert run((2,)) == (2, 3, 2)
    assert evaluator([], [])([]) == ()
    assert evaluator([3], [])(()) == (3,)


def test_evaluator_takes_names_that_python_reserves():
    assert evaluator([parse("lambda + __import__")], parse("lambda + __import__").symbols)([1, 2]) == (3,)


def test_symbols_without_value_are_an_error():
    with pytest.raises(DimError) as caught:
        evaluator([parse("n*m + k")], [Symbol("n")])
    assert str(caught.value) == "'m*n + k' needs a value for k, m\n  values are given for n"
    with pytest.raises(DimError) as caught:
        evaluate(parse("n + 1"), {})
    assert str(caught.value) == "'n + 1' needs a value for n\n  values are given for no dim"


def test_division_by_a_dim_that_is_zero_is_an_error():
    with pytest.raises(DimError) as caught:
        evaluator([parse("n//m")], parse("n//m").symbols)([0, 5])
    assert str(caught.value) == "a dim is divided by zero\n  m is 0\n  n is 5\n  while computing n // m"
    with pytest.raises(DimError, match="division by zero"):
        evaluate(parse("n % m"), {"n": 5, "m": 0})


@pytest.mark.parametrize(
    ("equations", "found"),
    [
        ([("n", 5)], {"n": 5}),
        ([("2*n", 8)], {"n": 4}),
        ([("n", 5), ("n + m", 7)], {"n": 5, "m": 2}),
        ([("n + m", 7), ("n", 5)], {"n": 5, "m": 2}),
        ([("n + m", 7), ("n - m", 1)], {"n": 4, "m": 3}),
        ([("n", 5), ("n*m", 15)], {"n": 5, "m": 3}),
        ([("n*m", 15), ("n", 5), ("n*m*k", 30)], {"n": 5, "m": 3, "k": 2}),
        ([("n*m", 6), ("n*m + k", 10)], {"k": 4}),
        ([("n + m", 7)], {}),
        ([("n//16", 2)], {}),
        ([("n//16", 2), ("n", 40)], {"n": 40}),
        ([("3", 3)], {}),
        ([("n", 0), ("n*m", 0)], {"n": 0}),
        ([], {}),
    ],
)
def test_solve(equations, found):
    assert numbers(solve([(parse(text), number) for text, number in equations])) == found


@pytest.mark.parametrize(
    ("equations", "message"),
    [
        ([("2*n", 7)], "no integer 'n' fits: it would be 7/2\n  2*n is 7"),
        ([("n", 5), ("n", 6)], "'n' cannot be 6\n  n is 5"),
        ([("n", 5), ("n + 1", 7)], "'n + 1' cannot be 7\n  n is 5"),
        ([("n", 5), ("n//2", 3)], "'n // 2' cannot be 3\n  n is 5"),
        ([("n + 4", 2)], "'n + 4' cannot be 2: 'n' would be -2\n  n is at least 0"),
        ([("2*n + 2*m", 7)], "'2*m + 2*n' cannot be 7"),
        ([("n + m", 7), ("2*n + 2*m", 16)], "'2*m + 2*n' cannot be 16\n  m + n is 7"),
        ([("3", 4)], "'3' cannot be 4"),
    ],
)
def test_no_solution_is_an_error_that_says_which(equations, message):
    with pytest.raises(DimError) as caught:
        solve([(parse(text), number) for text, number in equations])
    assert str(caught.value) == message


def test_solution_outside_the_facts_is_an_error():
    with pytest.raises(DimError) as caught:
        solve([(2 * Dim("n", max=8, multiple_of=4), 12)])
    assert str(caught.value) == "'2*n' cannot be 12: 'n' would be 6\n  n is between 0 and 8, a multiple of 4"


coefficients = st.lists(st.integers(-2, 3), min_size=4, max_size=4)


@PROPERTY
@given(st.lists(coefficients, min_size=1, max_size=4), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_solve_finds_exactly_what_a_linear_system_determines(rows, secret):
    equations = []
    for *factors, offset in rows:
        size = dims.total(
            [offset, *(Dim(name) * factor for name, factor in zip(NAMES, factors, strict=True))]
        )
        equations.append((size, offset + sum(f * x for f, x in zip(factors, secret, strict=True))))
    found = numbers(solve(equations))
    # Among the integers around the secret, a name is determined if all solutions agree on it.
    matrix = numpy.array([factors for *factors, _ in rows])
    around = numpy.stack(numpy.meshgrid(*[numpy.arange(-12, 18)] * 3), axis=-1).reshape(-1, 3)
    solutions = around[((around - secret) @ matrix.T == 0).all(axis=1)]
    determined = {
        name: secret[i] for i, name in enumerate(NAMES) if {point[i] for point in solutions} == {secret[i]}
    }
    assert found == determined


def bind(patterns, sizes, bound=None):
    bound = {} if bound is None else bound
    mismatch = unify([parse(text) for text in patterns], [parse(text) for text in sizes], bound)
    return mismatch, {symbol.name: str(size) for symbol, size in bound.items()}


@pytest.mark.parametrize(
    ("patterns", "sizes", "bound"),
    [
        (["n", "64"], ["m + 1", "64"], {"n": "m + 1"}),
        (["2*n"], ["2*m"], {"n": "m"}),
        (["2*n"], ["8"], {"n": "4"}),
        (["n + 1", "n"], ["n + 2", "n + 1"], {"n": "n + 1"}),
        (["n + m", "n"], ["a + b", "b"], {"n": "b", "m": "a"}),
        (["h*k", "h"], ["a*b + b", "b"], {"h": "b", "k": "a + 1"}),
        (["n - 3"], ["m"], {"n": "m + 3"}),
        (["2*n", "n + m"], ["2*a", "b"], {"n": "a", "m": "b - a"}),
        (["n", "n//16"], ["a", "a//16"], {"n": "a"}),
        (["m", "n"], ["n", "m"], {"m": "n", "n": "m"}),
        (["n % 16", "n"], ["a - a//16*16", "a"], {"n": "a"}),
    ],
)
def test_unify_binds(patterns, sizes, bound):
    assert bind(patterns, sizes) == (None, bound)


@pytest.mark.parametrize(
    ("patterns", "sizes", "mismatch"),
    [
        (["64"], ["65"], 0),
        (["n", "n"], ["a", "b"], 1),
        (["64"], ["n"], 0),
        (["2*n"], ["2*m + 1"], 0),
        (["2*n"], ["m"], 0),
        (["n", "n + 1"], ["a", "a"], 1),
        (["n*m"], ["a*b"], 0),
        (["n*n"], ["4"], 0),
        (["n//2"], ["4"], 0),
        (["n + n//2"], ["6"], 0),
        (["z", "z*n"], ["0", "0"], 1),
    ],
)
def test_unify_reports_the_first_mismatch(patterns, sizes, mismatch):
    assert bind(patterns, sizes)[0] == mismatch


def test_unify_binds_no_name_to_itself():
    assert bind(["n + n//2"], ["6"]) == (0, {})


def test_unify_extends_what_is_bound():
    bound = {Symbol("n"): Dim("a")}
    assert bind(["n + m"], ["a + 4"], bound) == (None, {"n": "a", "m": "4"})
    assert bind(["n"], ["b"], bound)[0] == 0


def test_unify_refuses_a_size_that_breaks_the_facts():
    pattern = Dim("n", max=8)
    assert unify([pattern], [9], {}) == 0
    assert unify([pattern], [8], {}) is None
    assert unify([pattern], [Dim("m")], {}) is None
    assert unify([pattern], [Dim("m", min=9)], {}) == 0


@PROPERTY
@given(st.lists(expressions(3), min_size=1, max_size=3), st.lists(expressions(3), min_size=3, max_size=3))
def test_unify_recovers_substituted_sizes(texts, arguments):
    patterns = [size_or_reject(lambda text=text: parse(text)) for text in texts] + [
        Dim(name) for name in NAMES
    ]
    actual = [dims.maximum(0, size_or_reject(lambda text=text: parse(text))) for text in arguments]
    mapping = dict(zip(SYMBOLS, actual, strict=True))
    sizes = [
        size_or_reject(lambda pattern=pattern: dims.substitute(pattern, mapping)) for pattern in patterns
    ]
    bound: dict[Symbol, dims.Size] = {}
    assert unify(patterns, sizes, bound) is None
    assert all(same(bound[symbol], size) for symbol, size in mapping.items())


@PROPERTY
@given(
    st.lists(expressions(3), min_size=1, max_size=3),
    worlds(),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_unify_with_numbers_binds_only_what_reproduces_them(texts, world, secret):
    point = dict(zip(NAMES, secret, strict=True))
    observed = [value(text, point) for text in texts]
    if None in observed:
        reject()
    patterns = [size_or_reject(lambda text=text: parse(text)) for text in texts]
    bound: dict[Symbol, dims.Size] = {}
    if unify(patterns, observed, bound) is None:
        assert [evaluate(pattern, bound) for pattern in patterns] == observed


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["n", "2*n"], {"n": 0}),
        (["2*n", "n"], {"n": 1}),
        (["n*m", "n"], {"n": 1, "m": 0}),
        (["n*m"], {}),
        (["n + m", "m*k", "k"], {"k": 2, "m": 1, "n": 0}),
        (["n*m + n", "m"], {"m": 1, "n": 0}),
        (["n*n"], {}),
        (["ceildiv(n, 16)", "min(k, 4)", "7"], {}),
        (["n + n // 2"], {}),
    ],
)
def test_determined_says_what_solve_finds(sizes, expected):
    parsed = [parse(text) for text in sizes]
    assert {str(symbol): index for symbol, index in determined(parsed).items()} == expected
    values = {symbol: 3 for size in parsed if isinstance(size, Dim) for symbol in size.symbols}
    found = solve([(size, evaluate(size, values)) for size in parsed])
    assert numbers(found) == dict.fromkeys(expected, 3)
    assert determined(parsed, found) == {}
