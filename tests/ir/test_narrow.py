# SPDX-License-Identifier: Apache-2.0
"""What a condition says of dims holds in its branch, nowhere else; conditions are booleans of any kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_checks import only

import nnfront.ops  # noqa: F401  registers the ops that the texts name
from nnfront.dims import Dim, Symbol
from nnfront.ir import IRModule, TensorType, Var, facts_where, join, parse, verify, violations

CALLEE = "private def sixteen(x: input float32[16]) -> float32[16] { y: float32[16] = relu(x) return y }\n"


def main(
    body: str, params: str = "x: input float32[n]", result: str = "float32[n]", dims: str = "n"
) -> IRModule:
    return parse(f"{CALLEE}def main[{dims}]({params}) -> {result} {{ {body} }}")


SIXTEEN = "within(dim(n), ranges=((16, 16, None),))"


@pytest.mark.parametrize(
    ("condition", "dims"),
    [
        (SIXTEEN, "n"),
        ("within(dim(n), ranges=((16, 20, 8),))", "n"),
        ("within(dim(n), dim(n), ranges=((10, 16, None), (None, 20, 16)))", "n"),
        ("within(dim(2*n), ranges=((32, 32, None),))", "n"),
        ("within(dim(n), ranges=((None, 16, None),))", "n: 16..64"),
    ],
)
def test_a_call_of_sixteen_is_well_typed_where_the_dim_is_sixteen(condition: str, dims: str) -> None:
    verify(
        main(
            f"""c: bool = {condition}
            y: float32[n] = if c {{ a: float32[16] = @sixteen(x) yield a }} else {{ b: float32[n] = relu(x) yield b }}
            return y""",
            dims=dims,
        )
    )


@pytest.mark.parametrize(
    ("size", "ranges"),
    [
        ("2*n", "(9, 17, None)"),
        ("2*n", "(10, 16, 4)"),
        ("n + 3", "(8, 11, None)"),
        ("3*n + 1", "(14, 27, None)"),
    ],
)
def test_what_is_said_of_an_expression_holds_for_its_dim(size: str, ranges: str) -> None:
    verify(
        parse(
            f"""private def few[m: 5..8](x: input float32[m]) -> float32[m] {{ y: float32[m] = relu(x) return y }}
            def main[n](x: input float32[n]) -> float32[n] {{
                c: bool = within(dim({size}), ranges=({ranges},))
                y: float32[n] = if c {{ a: float32[n] = @few(x) yield a }} else {{ yield x }}
                return y
            }}"""
        )
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("a: float32[16] = @sixteen(x) return x", "V18: sixteen expects size 16 where the argument has n"),
        (
            f"""c: bool = {SIXTEEN}
            y: float32[n] = if c {{ yield x }} else {{ b: float32[16] = @sixteen(x) yield x }} return y""",
            "V18: sixteen expects size 16 where the argument has n",
        ),
        (
            f"""c: bool = {SIXTEEN}
            y: float32[n] = if c {{ yield x }} else {{ yield x }}
            b: float32[16] = @sixteen(x) return y""",
            "V18: sixteen expects size 16 where the argument has n",
        ),
        (
            """c: bool = within(dim(n), ranges=((16, 32, None),))
            y: float32[n] = if c { b: float32[16] = @sixteen(x) yield x } else { yield x } return y""",
            "V18: sixteen expects size 16 where the argument has n",
        ),
        (
            """c: bool = within(dim(n), ranges=((8, 8, None),))
            y: float32[n] = if c { b: float32[16] = @sixteen(x) yield x } else { yield x } return y""",
            "V18: sixteen expects size 16 where the argument has 8",
        ),
    ],
    ids=["no branch", "else", "behind", "a range", "another number"],
)
def test_a_call_of_sixteen_is_refused_elsewhere(body: str, what: str) -> None:
    assert only(main(body)).what == what


def test_an_inner_branch_knows_what_the_outer_one_does() -> None:
    verify(
        main(
            f"""c: bool = {SIXTEEN}
            y: float32[n] = if c {{
                z: float32[n] = if flag {{ a: float32[16] = @sixteen(x) yield a }} else {{ yield x }}
                yield z
            }} else {{ yield x }}
            return y""",
            "x: input float32[n], flag: input bool",
        )
    )


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ((None, 16, None), (16, None, None)),
        ((None, None, 8), (12, 20, None)),
        ((16, 16, None), (1, 99, None)),
    ],
    ids=["two ranges", "a divisor and a range", "a number and a range"],
)
def test_an_inner_branch_knows_what_both_conditions_say_together(outer, inner) -> None:
    verify(
        main(
            f"""c: bool = within(dim(n), ranges=({outer},))
            y: float32[n] = if c {{
                d: bool = within(dim(n), ranges=({inner},))
                z: float32[n] = if d {{ a: float32[16] = @sixteen(x) yield a }} else {{ yield x }}
                yield z
            }} else {{ yield x }}
            return y"""
        )
    )


def test_a_branch_in_one_that_contradicts_it_is_read_by_its_own_condition() -> None:
    text = f"""c: bool = within(dim(n), ranges=((8, 8, None),))
        y: float32[n] = if c {{
            d: bool = {SIXTEEN}
            z: float32[n] = if d {{ a: float32[16] = @sixteen(x) yield a }} else {{ yield x }}
            yield z
        }} else {{ yield x }}
        return y"""
    verify(main(text))
    error = violations(main(text.replace(SIXTEEN, SIXTEEN.replace("16", "15"))))[0]
    assert error.what == "V18: sixteen expects size 16 where the argument has 15"


def test_a_condition_that_is_asked_in_two_steps_says_what_both_say() -> None:
    ir = main(
        f"""first: bool = {SIXTEEN}
        c: bool = if first {{ d: bool = within(k, ranges=((1, 1, None),)) yield d }} else {{ yield False }}
        y: float32[n] = if c {{ a: float32[16] = @sixteen(x) yield a }} else {{ yield x }}
        return y""",
        "x: input float32[n], k: input int64",
    )
    verify(ir)
    wrong = violations(parse(str(ir).replace("yield False", "yield True")))
    assert wrong[0].what == "V18: sixteen expects size 16 where the argument has n"


def test_ops_in_a_branch_know_its_dims() -> None:
    # [n] has as many elements as [4, 4] only where n is 16.
    body = """c: bool = {}
        y: float32[n] = if c {{ a: float32[4, 4] = reshape(x, shape=(4, 4)) b: float32[n] = reshape(a, shape=(n,)) yield b }}
        else {{ yield x }} return y"""
    verify(main(body.format(SIXTEEN)))
    assert violations(main(body.format(SIXTEEN.replace("16", "15"))))


# The join of the types of two branches.


def test_the_branch_with_a_number_must_know_that_the_dim_is_it() -> None:
    text = """c: {type} = {condition}
        z: float32[n] = if c {{ yield k }} else {{ yield x }} return z"""
    params = "x: input float32[n], k: input float32[16], flag: input bool[]"
    verify(main(text.format(type="bool", condition=SIXTEEN), params))
    error = only(main("z: float32[n] = if flag { yield k } else { yield x } return z", params))
    assert error.what == "V18: 'z' has another type than its value"
    assert error.details == ("declared float32[n]", "then float32[16]")
    assert (
        error.help == "a branch may give a known size for a dim where its condition says that the dim is that"
    )


def test_the_joined_type_is_not_the_number() -> None:
    error = only(
        main(
            f"c: bool = {SIXTEEN} z: float32[16] = if c {{ yield k }} else {{ yield x }} return z",
            "x: input float32[n], k: input float32[16]",
            "float32[16]",
        )
    )
    assert error.details == ("declared float32[16]", "else float32[n]")


def test_two_numbers_have_no_type_that_covers_them() -> None:
    error = only(
        main(
            "z: float32[n] = if flag { yield a } else { yield b } return z",
            "x: input float32[n], a: input float32[16], b: input float32[8], flag: input bool",
        )
    )
    assert error.what == "V18: the branches of an if have types that nothing covers"
    assert error.details == ("then float32[16]", "else float32[8]")
    assert (
        error.help
        == "a size that differs must be a dim in one of them: match both to one type with match_shape"
    )


N, M = Dim("n"), Dim("m")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((16,), (N,), (N,)),
        ((N,), (16,), (N,)),
        ((N, 4), (N, 4), (N, 4)),
        ((16, N), (M, 8), (M, N)),
        ((16,), (8,), None),
        ((N,), (M,), None),
        ((2 * N,), (32,), (2 * N,)),
    ],
)
def test_the_join_is_the_least_general_type_that_covers_both(a, b, expected) -> None:
    joined = join(TensorType(a, "float32"), TensorType(b, "float32"))
    assert joined == (None if expected is None else TensorType(expected, "float32"))


# Conditions that are boolean values.


@pytest.mark.parametrize("type", ["bool", "bool[]"])
def test_a_boolean_scalar_and_a_boolean_tensor_are_conditions(type: str) -> None:
    verify(
        main(
            "y: float32[n] = if c { yield x } else { a: float32[n] = relu(x) yield a } return y",
            f"x: input float32[n], c: input {type}",
        )
    )


@pytest.mark.parametrize("type", ["bool[1]", "int64", "int64[]", "float64", "float32[]"])
def test_nothing_else_is_a_condition(type: str) -> None:
    ir = main(
        "y: float32[n] = if c { yield x } else { yield x } return y", f"x: input float32[n], c: input {type}"
    )
    assert [error.what.split(":")[0] for error in violations(ir)] == ["V15"]


def test_text_and_parser_keep_the_types_of_branches() -> None:
    ir = main(
        f"""c: bool = {SIXTEEN}
        y: float32[n] = if c {{ a: float32[16] = @sixteen(x) yield a }} else {{ yield x }}
        return y"""
    )
    again = parse(str(ir))
    verify(again)
    assert again == ir
    then = again["main"].bindings[-1].value.then
    assert then.bindings[0].var.type == TensorType((16,), "float32")
    assert str(again) == str(ir)


# What holds in a branch, by brute force.


@settings(max_examples=60, deadline=None)
@given(
    own=st.tuples(st.integers(0, 12), st.none() | st.integers(12, 40), st.sampled_from([1, 2, 3, 4])),
    asked=st.lists(
        st.tuples(
            st.none() | st.integers(0, 40), st.none() | st.integers(0, 40), st.none() | st.integers(1, 6)
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_facts_of_a_branch_hold_for_every_number_that_reaches_it(own, asked) -> None:
    low, high, step = own
    symbol = Symbol("n", 0, low, high, step)
    ranges = ", ".join(str(entry) for entry in asked)
    facts = (
        ""
        if (low, high, step) == (0, None, 1)
        else f": {low}..{'' if high is None else high} % {step}".replace(" % 1", "")
    )
    text = f"def f[n{facts}](x: input float32[n]) -> bool {{ c: bool = within({', '.join(['dim(n)'] * len(asked))}, ranges=({ranges},)) return c }}"
    function = parse(text)["f"]
    binding = function.bindings[0]
    assert isinstance(binding.var, Var)
    facts = facts_where(binding.var, {binding.var: binding.value})
    reaching = [
        n
        for n in range(low, 200 if high is None else high + 1)
        if n % step == 0
        and all(
            (a is None or n >= a) and (b is None or n <= b) and (k is None or n % k == 0) for a, b, k in asked
        )
    ]
    assert (facts is None) == (not reaching)
    if facts is None:
        return
    known = facts[symbol]
    if isinstance(known, int):
        assert reaching == [known]
    else:
        (own_symbol,) = known.symbols
        assert all(
            own_symbol.low <= n <= own_symbol.high and n % own_symbol.multiple_of == 0 for n in reaching
        )
        assert min(reaching) == own_symbol.low
