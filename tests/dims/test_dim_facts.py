# SPDX-License-Identifier: Apache-2.0
"""Names, the facts about them, and bringing the facts of several places together."""

from __future__ import annotations

import pytest
from dim_oracle import NAMES, expressions, place, points, size_or_reject, value, worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront import dims
from nnfront.dims import Dim, Symbol, merge_facts, names, same, substitute, with_facts
from nnfront.errors import DimError

PROPERTY = settings(max_examples=50, deadline=None, derandomize=True)


def test_dim_shows_the_facts_as_declared():
    seq = Dim("seq", min=1, max=8192, multiple_of=16)
    assert (seq.min, seq.max, seq.multiple_of) == (1, 8192, 16)
    assert (Dim("seq").min, Dim("seq").max, Dim("seq").multiple_of) == (0, None, 1)
    assert ((2 * seq).min, (2 * seq).max, (2 * seq).multiple_of) == (32, 16384, 32)
    assert seq == dims.symbol("seq", min=1, max=8192, multiple_of=16)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"min": 9, "max": 8}, "dim 'seq': max is 8, which is less than min, 9"),
        (
            {"min": 17, "max": 31, "multiple_of": 16},
            "dim 'seq': there is no multiple of 16 between 17 and 31",
        ),
        ({"min": -1}, "dim 'seq': min is -1, but a dim is never negative"),
        ({"max": -1}, "dim 'seq': max is -1, which is less than min, 0"),
        ({"multiple_of": 0}, "dim 'seq': multiple_of is 0, but must be at least 1"),
        ({"min": 1.5}, "dim 'seq': min must be an int, got 1.5"),
        ({"max": "8"}, "dim 'seq': max must be an int, got '8'"),
        ({"multiple_of": True}, "dim 'seq': multiple_of must be an int, got True"),
    ],
)
@pytest.mark.parametrize("make", [Dim, Dim.fresh, dims.symbol])
def test_contradicting_facts_are_an_error(make, facts, message):
    with pytest.raises(DimError) as caught:
        make("seq", **facts)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Dim("2*seq", min=1),
            "'2*seq' is an expression, and facts belong to a name\n"
            "  help: say them about a name, as in Dim('seq', min=1), and build the expression from it",
        ),
        (lambda: Dim("3"), "'3' is the constant 3, not a symbolic dim\n  help: write the int 3"),
        (lambda: Dim("n - n"), "'n - n' is the constant 0, not a symbolic dim\n  help: write the int 0"),
        (lambda: Dim(3), "a Dim is made from text, got 3\n  help: an int is a size as it is"),
        (
            lambda: Dim.fresh("2*n"),
            "'2*n' cannot name a dim\n"
            "  help: a name is a word of letters, digits and underscores, and not min, max, floordiv, ceildiv or mod",
        ),
        (
            lambda: dims.symbol("min"),
            "'min' cannot name a dim\n"
            "  help: a name is a word of letters, digits and underscores, and not min, max, floordiv, ceildiv or mod",
        ),
    ],
)
def test_wrong_names_are_an_error(make, message):
    with pytest.raises(DimError) as caught:
        make()
    assert str(caught.value) == message


def test_fresh_dims_are_equal_only_to_themselves():
    a, b = Dim.fresh("n"), Dim.fresh("n", max=4)
    assert a == a
    assert a != b
    assert a != Dim("n")
    assert not same(a, b)
    assert same(a + b, b + a)
    assert (str(a), b.max) == ("n", 4)
    assert a - a == 0


def test_names_print_apart_in_order_of_occurrence():
    n, taken = Dim("n").symbols[0], Dim("n_1").symbols[0]
    first, second, other = (Dim.fresh(name).symbols[0] for name in ("n", "n", "m"))
    assert names([second, n, first, other, taken, second]) == {
        second: "n_2",
        n: "n",
        first: "n_3",
        other: "m",
        taken: "n_1",
    }
    assert names([second, first]) == {second: "n", first: "n_1"}


def test_text_tells_fresh_dims_apart():
    n, fresh = Dim("n"), Dim.fresh("n")
    assert str(fresh * 2 + n) == "n + 2*n_1"
    called = {fresh.symbols[0]: "m"}
    assert dims.to_text(fresh + n, called) == "n + m"
    assert dims.to_text(7, called) == "7"
    assert dims.to_text(n) == "n"


def test_as_symbol_is_for_plain_names():
    n = Dim("n")
    assert dims.as_symbol(n) is n.symbols[0]
    assert dims.as_symbol(n + 1) is None
    assert dims.as_symbol(2 * n) is None
    assert dims.as_symbol(n * n) is None
    assert dims.as_symbol(n // 2) is None
    assert dims.as_symbol(3) is None
    assert same(dims.of_symbol(n.symbols[0]), n)


def test_merge_combines_every_fact():
    said = [
        (Symbol("seq", min=1), "argument 'x'"),
        (Symbol("seq", max=100, multiple_of=4), "argument 'y'"),
        (Symbol("batch"), "argument 'x'"),
        (Symbol("seq", max=90, multiple_of=6), "weight 'w'"),
    ]
    merged = merge_facts(said)
    assert [(symbol.name, *symbol.facts) for symbol in merged.values()] == [
        ("seq", 1, 90, 12),
        ("batch", 0, None, 1),
    ]


def test_merge_names_the_places_that_contradict():
    said = [
        (Symbol("seq", min=9), "argument 'x'"),
        (Symbol("seq"), "argument 'z'"),
        (Symbol("seq", max=8, multiple_of=2), "argument 'y'"),
    ]
    with pytest.raises(DimError) as caught:
        merge_facts(said)
    assert str(caught.value) == (
        "the facts about dim 'seq' contradict each other\n"
        "  argument 'x': at least 9\n"
        "  argument 'y': between 0 and 8, a multiple of 2\n"
        "  help: no number satisfies all of them; one name is one dim, so rename one 'seq' if they may differ"
    )


def test_merge_finds_that_no_multiple_is_left():
    said = [(Symbol("n", min=5, max=11, multiple_of=4), "a"), (Symbol("n", multiple_of=3), "b")]
    with pytest.raises(DimError, match="contradict each other"):
        merge_facts(said)


@PROPERTY
@given(st.lists(worlds(), min_size=2, max_size=3))
def test_merged_facts_are_what_all_places_allow(several):
    said = [Symbol("a", 0, world["a"].low, world["a"].high, world["a"].step) for world in several]

    def allowed(symbol, number):
        fits = symbol.max is None or number <= symbol.max
        return symbol.min <= number and fits and number % symbol.multiple_of == 0

    everywhere = [number for number in range(40) if all(allowed(symbol, number) for symbol in said)]
    try:
        (merged,) = merge_facts((symbol, "") for symbol in said).values()
    except DimError:
        assert not everywhere
    else:
        assert everywhere == [number for number in range(40) if allowed(merged, number)]


def test_with_facts_simplifies_what_was_written_without():
    facts = merge_facts([(Dim("seq", max=4096, multiple_of=16).symbols[0], "spec")])
    assert str(with_facts(dims.parse("min(seq, 5000) % 16 + seq//16*16"), facts)) == "seq"
    assert with_facts(dims.parse("seq"), facts).max == 4096
    assert with_facts(7, facts) == 7


def test_substitute_returns_what_does_not_change():
    n, m = Dim("n"), Dim("m")
    for size in (n, 2 * n + 1, dims.minimum(n, m), 5):
        assert substitute(size, {}) is size
        assert substitute(size, {Dim("z").symbols[0]: 3}) is size
        assert substitute(size, {n.symbols[0]: Dim("n")}) == size


def test_substitute_replaces_all_at_once():
    n, m = Dim("n"), Dim("m")
    assert same(substitute(n - 2 * m, {n.symbols[0]: m, m.symbols[0]: n}), m - 2 * n)
    assert substitute(n + 3, {n.symbols[0]: 4}) == 7
    assert type(substitute(n, {n.symbols[0]: 4})) is int


@PROPERTY
@given(expressions(5), expressions(3), expressions(3), worlds())
def test_substitution_commutes_with_evaluation(outer, first, second, world):
    replaced = {"a": first, "b": second}
    mapping = {
        Symbol(name): size_or_reject(lambda text=text: place(text, world)) for name, text in replaced.items()
    }
    size = size_or_reject(lambda: substitute(dims.parse(outer), mapping))
    run = dims.evaluator([size], [Symbol(name) for name in NAMES])
    for point in points(world):
        inner = {name: value(text, point) for name, text in replaced.items()}
        # Names stand for sizes, so only replacements that are never negative keep their facts.
        if all(number is not None and number >= 0 for number in inner.values()):
            expected = value(outer, point | inner)
            assert expected is None or run(list(point.values())) == (expected,)
