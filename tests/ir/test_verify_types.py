# SPDX-License-Identifier: Apache-2.0
"""Rules V13 to V18 and V21: each is broken by an example that breaks it alone."""

from __future__ import annotations

import pytest
from verify_checks import function, make, only, rules

from nnfront.dims import Dim
from nnfront.ir import (
    OPS,
    Binding,
    Call,
    Param,
    TensorType,
    Var,
    parse,
    violations,
)


@pytest.mark.parametrize(
    "body",
    [
        "y: float32[n] = zeros(shape=(n,)) return x",
        "y: (int64(n),) = (dim(n),) return x",
        "y: float32[n] = if c { k: float32[n] = match_shape(x, float32[n]) yield k } else { yield x } return x",
    ],
    ids=["attribute", "literal", "type behind a branch that defines it"],
)
def test_v13_dim_that_nothing_defines(body: str) -> None:
    module = parse(f"def f[n](x: input float32[2], c: input bool[]) -> float32[2] {{ {body} }}")
    error = only(module)
    assert error.what == "V13: nothing says what the dim 'n' is"
    assert error.help == "a parameter's type or a match_shape ahead of it must name it"


def test_v13_match_shape_defines_a_dim_that_stands_alone() -> None:
    text = "def f[n](x: input float32[2]) -> float32[2] {{ y: float32[{}] = match_shape(x, float32[{}]) return x }}"
    assert violations(parse(text.format("n", "n"))) == []
    assert rules(parse(text.format("2*n", "2*n"))) == {"V13"}


def test_v14_dim_with_different_facts() -> None:
    x = Param("x", TensorType((Dim("n", max=8),), "float32"), "input")
    y = Var("y", TensorType((Dim("n"),), "float32"))
    error = only(make([x], [Binding(y, Call(OPS["relu"], (x,)))], y))
    assert error.what == "V14: the dim 'n' has different facts in different places"
    assert error.details == ("here at least 0", "before between 0 and 8")


def test_v14_dim_with_different_facts_in_an_attribute() -> None:
    n = Dim("n", max=8)
    x = Param("x", TensorType((n,), "float32"), "input")
    y = Var("y", TensorType((n,), "float32"))
    module = make([x], [Binding(y, Call(OPS["reshape"], (x,), {"shape": (Dim("n"),)}))], y)
    assert rules(module) == {"V14"}


@pytest.mark.parametrize("type", ["int64[]", "bool[1]", "int64", "(bool[],)"])
def test_v15_condition_that_is_no_bool(type: str) -> None:
    module = function(
        "y: float32[2] = if c { yield x } else { yield x } return y", f"c: input {type}, x: input float32[2]"
    )
    assert only(module).what == f"V15: the condition of an if is a {type}, not a bool"


@pytest.mark.parametrize("type", ["bool[]", "bool"])
def test_v15_boolean_scalars_and_tensors_are_conditions(type: str) -> None:
    module = function(
        "y: float32[2] = if c { yield x } else { yield x } return y", f"c: input {type}, x: input float32[2]"
    )
    assert violations(module) == []


@pytest.mark.parametrize("type", ["float16[2]", "float32[2, 2]", "(float32[2],)"])
def test_v16_match_shape_of_another_kind(type: str) -> None:
    module = function(f"y: {type} = match_shape(x, {type}) return x")
    assert only(module).what == f"V16: match_shape makes a {type} of a float32[2]"


def test_v16_match_shape_may_define_the_value_of_a_scalar() -> None:
    module = parse("def f[n](x: input int64) -> int64(n) { y: int64(n) = match_shape(x, int64(n)) return y }")
    assert violations(module) == []


def test_v17_attribute_in_another_form() -> None:
    error = only(function("y: float32[2] = reshape(x, shape=(-1,)) return y"))
    assert error.what == "V17: the attributes of reshape are not canonical"
    assert error.details == ("got (shape=(-1,))", "expected (shape=(2,))")


def test_v17_default_that_is_written_out() -> None:
    error = only(
        function("y: float32[2, 2] = concat(x, x, dim=0) return y", "x: input float32[1, 2]", "float32[2, 2]")
    )
    assert error.details == ("got (dim=0)", "expected ()")


def test_v17_attribute_that_the_op_refuses() -> None:
    assert rules(function("y: float32[2] = softmax(x, axis=3) return y")) == {"V17"}
    assert rules(function("y: float32[2] = permute_dims(x, axes=(1,)) return y")) == {"V17"}


def test_v18_declared_type_that_does_not_follow() -> None:
    error = only(function("y: float32[3] = relu(x) return x"))
    assert error.what == "V18: 'y' has another type than its value"
    assert error.details == ("declared float32[3]", "inferred float32[2]")


def test_v18_operands_that_the_op_refuses() -> None:
    module = function(
        "y: float32[2] = matmul(x, w) return x",
        "x: input float32[2, 3], w: input float32[4, 2]",
        "float32[2, 3]",
    )
    assert only(module).what.startswith("V18: matmul: ")


def test_v18_arguments_that_the_function_refuses() -> None:
    module = parse("""
        private def g[n](x: input float32[n], y: input float32[n]) -> float32[n] { return x }
        def f(x: input float32[2], y: input float32[3]) -> float32[2] { z: float32[2] = @g(x, y) return z }
    """)
    assert only(module).what == "V18: g expects size n where the argument has 3"


@pytest.mark.parametrize("kind", ["private", "fused", "external"])
def test_v18_a_call_that_does_not_keep_what_the_function_says_of_its_dims(kind: str) -> None:
    module = parse(f"""
        {kind} def wide[m: 8..8](r: input bfloat16[m, 4096]) -> bfloat16[8, 4096] {{
            y: bfloat16[8, 4096] = relu(r) return y }}
        def f[n](r: input bfloat16[n, 4096]) -> bfloat16[8, 4096] {{ y: bfloat16[8, 4096] = @wide(r) return y }}
    """)
    assert str(only(module)) == (
        "V18: wide expects of its dim 'm' that it is exactly 8, and gets n\n"
        "  n is at least 0\n"
        "  at 'y' in f\n"
        "  help: say as much of the caller's dims, or less of the function's"
    )


def test_v18_projection_out_of_range() -> None:
    module = function("t: (float32[2],) = (x,) y: float32[2] = t[1] return x")
    assert only(module).what == "V18: there is no field 1 to take"


def test_v18_branches_without_a_common_type() -> None:
    module = function(
        "y: float32[2] = if c { yield x } else { yield 1.0 } return x", "c: input bool[], x: input float32[2]"
    )
    error = only(module)
    assert error.what == "V18: the branches of an if have types that nothing covers"
    assert error.details == ("then float32[2]", "else float64")


def test_v18_same_op_is_judged_by_its_own_operands() -> None:
    module = function(
        "a: float32[2] = relu(x) b: float32[2] = relu(y) return a", "x: input float32[2], y: input float32[3]"
    )
    assert [error.where for error in violations(module)] == ["'b' in f"]


def test_v18_attributes_that_compare_equal_are_told_apart() -> None:
    module = function(
        "a: float32[2] = multiply(x, 1) b: float32[2] = multiply(x, 1.0) return a",
        "x: input int64[2]",
        "float32[2]",
    )
    assert [error.where for error in violations(module)] == ["'a' in f"]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("int64", "3"),
        ("(int64, float32[2])", "(3, x)"),
        ("float32[2*(n // 2) + n % 2]", "relu(y)"),
    ],
    ids=["scalar without its value", "in a tuple", "size that is provably equal"],
)
def test_v18_declared_type_may_say_less(declared: str, value: str) -> None:
    body = f"t: (int64(3), float32[2]) = (3, x) z: {declared} = {value} return x"
    module = parse(f"def f[n](x: input float32[2], y: input float32[n]) -> float32[2] {{ {body} }}")
    assert violations(module) == []


def test_v21_weight_with_two_types() -> None:
    module = parse("""
        def f(w: weight float32[2]) -> float32[2] { return w }
        def g(w: weight float32[3]) -> float32[3] { return w }
    """)
    error = only(module)
    assert error.what == "V21: the weight 'w' has two types"
    assert error.details == ("in f float32[2]", "in g float32[3]")


def test_v21_names_of_dims_and_of_private_weights_are_free() -> None:
    module = parse("""
        private def h(w: weight float16[3]) -> float16[3] { return w }
        def f[n](w: weight float32[n]) -> float32[n] { return w }
        def g[m](w: weight float32[m]) -> float32[m] { return w }
    """)
    assert violations(module) == []
