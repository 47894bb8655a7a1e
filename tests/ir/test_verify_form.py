# SPDX-License-Identifier: Apache-2.0
"""Rules V1 to V12: each is broken by an example that breaks it alone."""

from __future__ import annotations

import dataclasses

import pytest
from verify_checks import F2, function, make, only

from nnfront.dims import Dim
from nnfront.ir import (
    OPS,
    Binding,
    Call,
    Constant,
    Function,
    IRModule,
    Param,
    Projection,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Var,
    parse,
    parse_function,
    violations,
)


def test_v1_function_under_another_name() -> None:
    module = parse("def f() -> int64(1) { return 1 }")
    module._functions["g"] = module._functions.pop("f")
    assert only(module).what == "V1: the function 'f' is filed under 'g'"


def test_v2_unknown_kind() -> None:
    module = IRModule([dataclasses.replace(parse_function("def f() -> int64(1) { return 1 }"), kind="open")])  # type: ignore[arg-type]
    error = only(module)
    assert error.what == "V2: unknown kind 'open' of function"
    assert error.help == "use one of public, private, transform, fused, external"


def test_v2_unknown_role() -> None:
    x = Param("x", F2, "buffer")  # type: ignore[arg-type]
    assert only(make([x], [], x)).what == "V2: parameter 'x' has the unknown role 'buffer'"


def test_v3_transform_with_an_input() -> None:
    module = parse("transform def t(w: weight int64[2], x: input int64[2]) -> int64[2] { return x }")
    assert only(module).what == "V3: parameter 'x' of a transform must be a weight, got the role 'input'"


def test_v4_name_bound_twice() -> None:
    x, a, b = Param("x", F2, "input"), Var("y", F2), Var("y", F2)
    error = only(make([x], [Binding(a, x), Binding(b, a)], b))
    assert (error.what, error.where) == ("V4: 'y' is bound twice", "'y' in f")


def test_v4_parameters_of_one_name() -> None:
    x = Param("x", F2, "input")
    assert only(make([x, Param("x", F2, "input")], [], x)).what == "V4: two parameters are called 'x'"


def test_v4_name_of_a_branch_bound_again_behind_it() -> None:
    module = function(
        "y: float32[2] = if c { z: float32[2] = x yield z } else { yield x } w: float32[2] = x return y",
        "c: input bool[], x: input float32[2]",
    )
    assert violations(module) == []
    branch = module["f"].bindings[0].value.then.bindings[0]  # type: ignore[union-attr]
    again = Binding(Var("z", F2), module["f"].params[1])
    changed = module["f"].with_(bindings=(module["f"].bindings[0], again))
    assert branch.var.name == "z"
    assert only(IRModule([changed])).what == "V4: 'z' is bound twice"


def test_v5_use_before_binding() -> None:
    x, y, z = Param("x", F2, "input"), Var("y", F2), Var("z", F2)
    error = only(make([x], [Binding(y, z), Binding(z, x)], y))
    assert error.what == "V5: 'z' is read where it is not bound"


def test_v5_use_of_a_branchs_variable_outside() -> None:
    module = function(
        "y: float32[2] = if c { z: float32[2] = x yield z } else { yield x } return y",
        "c: input bool[], x: input float32[2]",
    )
    inner = module["f"].bindings[0].value.then.bindings[0].var  # type: ignore[union-attr]
    changed = IRModule([module["f"].with_(result=inner)])
    assert only(changed).what == "V5: 'z' is returned where it is not bound"


def test_v5_another_variable_of_the_same_name_is_not_bound() -> None:
    x = Param("x", F2, "input")
    assert only(make([x], [], Var("x", F2))).what == "V5: 'x' is returned where it is not bound"


def test_v6_operand_that_is_an_expression() -> None:
    x, y = Param("x", F2, "input"), Var("y", TupleType((F2,)))
    inner = Call(OPS["relu"], (x,))
    error = only(make([x], [Binding(y, Tuple((inner,)))], y))  # type: ignore[arg-type]
    assert error.what == "V6: an operand is a Call, not an atom"


def test_v6_absent_operand_of_a_tuple() -> None:
    y = Var("y", TupleType((F2,)))
    assert only(make([], [Binding(y, Tuple((None,)))], y)).what == "V6: an operand is a NoneType, not an atom"  # type: ignore[arg-type]


def test_v6_result_that_is_no_atom() -> None:
    x = Param("x", F2, "input")
    assert (
        only(make([x], [], Projection(x, 0))).what == "V6: the result of a block is a Projection, not an atom"
    )


@pytest.mark.parametrize(
    ("type", "problem"),
    [
        (TensorType((2,), "float33"), "unknown dtype 'float33'"),
        (TensorType((-1,), "float32"), "-1 is no size"),
        (TensorType((2.0,), "float32"), "2.0 is no size"),  # type: ignore[arg-type]
        (TensorType((True,), "float32"), "True is no size"),
        (ScalarType("int32"), "'int32' is no dtype of a host scalar"),
        (TupleType((F2, F2), ("a",)), "2 fields of a tuple have the names ('a',)"),
        (TupleType((F2, F2), ("a", "a")), "2 fields of a tuple have the names ('a', 'a')"),
        (TupleType((TupleType((TensorType((), "f32"),)),)), "unknown dtype 'f32'"),
        ("float32", "a type is a str"),
    ],
    ids=str,
)
def test_v7_type_that_is_not_well_formed(type: object, problem: str) -> None:
    x = Param("x", type, "input")  # type: ignore[arg-type]
    assert only(make([x], [], Scalar(1))).what == f"V7: {problem}"


def test_v7_negative_value_of_a_scalar_is_fine() -> None:
    x = Param("x", ScalarType("int64", -3), "input")
    assert violations(make([x], [], x)) == []


@pytest.mark.parametrize(
    ("atom", "problem"),
    [
        (Constant(TensorType((2, 3), "float16"), bytes(11)), "a constant of 12 bytes has 11"),
        (Constant(TensorType((Dim("n"),), "float16"), bytes(4)), "a constant has a dim in its shape"),
        (Scalar(2**63), "9223372036854775808 is no literal"),
        (Scalar("x"), "'x' is no literal"),  # type: ignore[arg-type]
    ],
    ids=["bytes", "dim", "range", "kind"],
)
def test_v8_literal_that_does_not_fit(atom: object, problem: str) -> None:
    assert only(make([], [], atom)).what == f"V8: {problem}"


def test_v8_largest_literals_are_fine() -> None:
    assert violations(make([], [], Scalar(2**63 - 1))) == []
    assert violations(make([], [], Scalar(-(2**63)))) == []


def test_v9_too_many_operands() -> None:
    error = only(function("y: float32[2] = relu(x, x) return y"))
    assert error.what == "V9: relu takes 1 operands, got 2"


def test_v9_operand_that_must_be_there() -> None:
    assert only(function("y: float32[2] = add(None, x) return y")).what == "V9: operand 'a' of add is missing"


def test_v9_operand_of_another_kind() -> None:
    module = function("t: (float32[2],) = (x,) y: float32[2] = relu(t) return y")
    assert only(module).what == "V9: operand 'x' of relu must be a tensor, got a TupleType"


def test_v10_unknown_attribute() -> None:
    error = only(function("y: float32[2] = softmax(x, axes=0) return y"))
    assert (error.what, error.help) == ("V10: softmax has no attribute 'axes'", "it has axis")


def test_v10_missing_attribute() -> None:
    error = only(function("y: float32[2] = reshape(x) return y"))
    assert error.what == "V10: attribute 'shape' of reshape is missing"


def test_v10_attribute_without_text() -> None:
    x, y = Param("x", F2, "input"), Var("y", F2)
    module = make([x], [Binding(y, Call(OPS["reshape"], (x,), {"shape": [2]}))], y)
    assert (
        only(module).what
        == "V10: reshape: attribute 'shape' must be an int or a dim or a text or a tuple, each entry an int or a dim or a text, got a list"
    )


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            'permute_dims(x, axes="ab")',
            "permute_dims: attribute 'axes' must be None or a tuple, each entry an int, got 'ab'",
        ),
        ("softmax(x, axis=True)", "softmax: attribute 'axis' must be an int, got True"),
        (
            "softmax(x, axis=9223372036854775808)",
            "softmax: attribute 'axis' must be an int, got 9223372036854775808",
        ),
        ("softmax(x, axis=type(float32[3]))", "softmax: attribute 'axis' must be an int, got a TensorType"),
        ("elu(x, alpha=(1.0,))", "elu: attribute 'alpha' must be a number, got a tuple"),
        ('sum(x, keepdims="yes")', "sum: attribute 'keepdims' must be True or False, got 'yes'"),
        ("astype(x, dtype=None)", "astype: attribute 'dtype' must be a text, got None"),
        (
            'extern(x, name="' + "n" * 20_000 + '", out=None)',
            "extern: attribute 'name' must be a text, got 'nnnnn",
        ),
        ("zeros(shape=(1, (2,)))", "zeros: attribute 'shape' must be an int or a dim or a text or a tuple"),
    ],
)
def test_v10_attribute_of_another_kind(call: str, problem: str) -> None:
    assert only(function(f"y: float32[2] = {call} return x")).what.startswith(f"V10: {problem}")


def test_v10_attribute_of_a_function_without_text() -> None:
    module = IRModule([Function("f", (), (), Scalar(1), attrs={"made_by": object()})])
    assert only(module).what == "V10: attribute 'made_by' of the function has no text"


def test_v11_unknown_function() -> None:
    assert only(function("y: float32[2] = @g(x) return y")).what == "V11: there is no function 'g'"


def test_v11_public_function() -> None:
    module = parse("""
        def g(x: input float32[2]) -> float32[2] { return x }
        def f(x: input float32[2]) -> float32[2] { y: float32[2] = @g(x) return y }
    """)
    assert only(module).what == "V11: 'g' is public, so no function calls it"


def test_v11_number_of_arguments() -> None:
    module = parse("""
        private def g(x: input float32[2]) -> float32[2] { return x }
        def f(x: input float32[2]) -> float32[2] { y: float32[2] = @g() return y }
    """)
    assert only(module).what == "V11: 'g' takes 1 arguments, got 0"


def test_v12_recursion_through_another_function() -> None:
    module = parse("""
        private def g(x: input float32[2]) -> float32[2] { y: float32[2] = @h(x) return y }
        private def h(x: input float32[2]) -> float32[2] { y: float32[2] = @g(x) return y }
        def f(x: input float32[2]) -> float32[2] { y: float32[2] = @g(x) return y }
    """)
    assert only(module).what == "V12: a function calls itself: g -> h -> g"


def test_v12_calling_one_function_on_two_ways_is_no_recursion() -> None:
    module = parse("""
        private def h(x: input float32[2]) -> float32[2] { return x }
        private def g(x: input float32[2]) -> float32[2] { y: float32[2] = @h(x) return y }
        def f(x: input float32[2]) -> float32[2] { y: float32[2] = @g(x) z: float32[2] = @h(y) return z }
    """)
    assert violations(module) == []
