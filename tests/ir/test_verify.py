# SPDX-License-Identifier: Apache-2.0
"""Each rule of the verifier is broken by an example that breaks it alone, and kept by a module that has everything."""

from __future__ import annotations

import dataclasses
import time

import pytest

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.dims import Dim
from nnfront.errors import VerifyError
from nnfront.ir import (
    OPS,
    Binding,
    Call,
    Constant,
    Function,
    FunctionBuilder,
    IRModule,
    Param,
    Projection,
    Provenance,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Var,
    parse,
    parse_function,
    verify,
    violations,
)

F2 = TensorType((2,), "float32")
LAYER = "layer(kv_heads=2, head_size=4, dtype=float32, batch=batch, max_seq=max_seq)"
HEADS = "float32[batch, seq, 2, 4]"

SOUND = f"""
private def block[batch, seq, max_seq](
    q: input {HEADS},
    cache: state {LAYER},
    w: weight float32[8, 8],
) -> ({HEADS}, {LAYER}) {{
    flat: float32[batch, seq, 8] = reshape(q, shape=(batch, seq, 8))
    mixed: float32[batch, seq, 8] = matmul(flat, w)
    heads: {HEADS} = reshape(mixed, shape=(batch, seq, 2, 4))
    both: ({HEADS}, {LAYER}) = attention(heads, q, q, cache)
    return both
}}

def prefill[batch, seq: 1..64, max_seq, fresh rest](
    q: input {HEADS},
    flag: input bool[],
    other: input float32[seq, 4],
    cache: state cache(2 * {LAYER}),
    layers.0.w: weight float32[8, 8],
    layers.1.w: weight float32[8, 8],
) -> ({HEADS}, cache(2 * {LAYER})) {{
    layers: ({LAYER}, {LAYER}) = cache_split(cache)
    first: {LAYER} = layers[0]
    second: {LAYER} = layers[1]
    y: ({HEADS}, {LAYER}) = @block(q, first, layers.0.w)
    x: {HEADS} = y[0]
    first_1: {LAYER} = y[1]
    known: float32[rest, 4] = match_shape(other, float32[rest, 4])
    twice: float32[2*rest, 4] = concat(known, known)
    z: ({HEADS}, {LAYER}) = if flag {{
        written: ({HEADS}, {LAYER}) = @block(x, second, layers.1.w)
        yield written
    }} else {{
        half: {HEADS} = multiply(x, 0.5)
        pair: ({HEADS}, {LAYER}) = (half, second)
        yield pair
    }}
    out: {HEADS} = z[0]
    second_1: {LAYER} = z[1]
    joined: cache(2 * {LAYER}) = cache_join(first_1, second_1)
    results: ({HEADS}, cache(2 * {LAYER})) = (out, joined)
    return results
}}
"""


def rules(module: IRModule) -> set[str]:
    """The numbers of the rules that a module breaks."""
    return {error.what.partition(":")[0] for error in violations(module)}


def only(module: IRModule) -> VerifyError:
    """The one violation of a module."""
    (error,) = violations(module)
    with pytest.raises(VerifyError) as raised:
        verify(module)
    assert str(raised.value) == str(error)
    return error


def function(body: str, params: str = "x: input float32[2]", result: str = "float32[2]") -> IRModule:
    return parse(f"def f({params}) -> {result} {{ {body} }}")


def make(params: list[Param], bindings: list[Binding], result: object) -> IRModule:
    return IRModule([Function("f", tuple(params), tuple(bindings), result)])  # type: ignore[arg-type]


def test_a_module_with_everything_keeps_all_rules() -> None:
    assert violations(parse(SOUND)) == []
    verify(parse(SOUND))


def test_v1_function_under_another_name() -> None:
    module = parse(SOUND)
    module._functions["decode"] = module._functions.pop("prefill")
    assert only(module).what == "V1: the function 'prefill' is filed under 'decode'"


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
    assert only(module).what == "V10: attribute 'shape' is a list, which has no text"


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
    assert rules(function('y: float32[2] = permute_dims(x, axes="ab") return y')) == {"V17"}


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


def test_v18_projection_out_of_range() -> None:
    module = function("t: (float32[2],) = (x,) y: float32[2] = t[1] return x")
    assert only(module).what == "V18: there is no field 1 to take"


def test_v18_branches_without_a_common_type() -> None:
    module = function(
        "y: float32[2] = if c { yield x } else { yield 1.0 } return x", "c: input bool[], x: input float32[2]"
    )
    assert only(module).what == "V18: the branches of an if have types that nothing covers"


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


def test_v18_join_of_a_number_and_a_dim_is_the_dim() -> None:
    text = """
        def f[n](c: input bool[], x: input float32[16], y: input float32[n]) -> float32[{0}] {{
            z: float32[{0}] = if c {{ yield x }} else {{ yield y }}
            return z
        }}
    """
    assert violations(parse(text.format("n"))) == []
    assert rules(parse(text.format(16))) == {"V18"}


STATE = f"def f[batch, seq, max_seq](q: input {HEADS}, cache: state {LAYER}) -> {{result}} {{{{ {{body}} }}}}"


def test_v19_state_that_does_not_come_back() -> None:
    module = parse(STATE.format(result=HEADS, body="return q"))
    assert rules(module) == {"V19"}
    assert violations(module)[0].what == "V19: the result must be a tuple of a value and 1 written handles"


def test_v19_state_that_comes_back_in_another_place() -> None:
    module = parse(
        STATE.format(result=f"({LAYER}, {HEADS})", body=f"r: ({LAYER}, {HEADS}) = (cache, q) return r")
    )
    assert only(module).what == "V19: the state 'cache' does not come back in its place"


def handles(body: str, *, other: bool = False) -> IRModule:
    """A function over a cache that returns `r`; with `other`, it gets another pair of a tensor and a handle as well."""
    more = f", other: input ({HEADS}, {LAYER})" if other else ""
    return parse(f"""
        def f[batch, seq, max_seq](q: input {HEADS}, c: input bool[], cache: state {LAYER}{more}) -> ({HEADS}, {LAYER}) {{
            {body}
            return r
        }}
    """)


WRITE = f"({HEADS}, {LAYER}) = attention(q, q, q, cache)"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            f"a: {WRITE} r: {WRITE} h: {LAYER} = a[1] u: ({LAYER},) = (h,)",
            "handle 'cache' is used again: 'a' used it up",
        ),
        (
            f"r: {WRITE} p: int64[batch, seq] = cache_positions(cache, seq=seq)",
            "handle 'cache' is read after 'r' used it up",
        ),
        (f"a: {WRITE} r: ({HEADS}, {LAYER}) = (q, cache)", "handle 'cache' is used again: 'a' used it up"),
        (
            f"a: {WRITE} h: {LAYER} = a[1] g: {LAYER} = a[1] r: ({HEADS}, {LAYER}) = (q, h)",
            "handle 'a[1]' is used again: 'h' used it up",
        ),
        (
            f"a: {WRITE} h: {LAYER} = a[1] r: ({HEADS}, {LAYER}) = a",
            "handle 'a[1]' is used again: 'h' used it up",
        ),
        (
            f"r: ({HEADS}, {LAYER}) = if c {{ w: {WRITE} yield w }} else {{ p: ({HEADS}, {LAYER}) = (q, cache) yield p }} "
            f"z: ({LAYER},) = (cache,)",
            "handle 'cache' is used again: 'w' used it up",
        ),
    ],
    ids=[
        "written twice",
        "read after the write",
        "returned after the write",
        "taken twice",
        "taken and kept",
        "used behind an if",
    ],
)
def test_v20_handle_that_is_used_up(body: str, problem: str) -> None:
    errors = [error.what for error in violations(handles(body))]
    assert errors[0] == f"V20: the {problem}"
    assert all(error.startswith("V20") for error in errors)


def test_v20_written_handle_that_is_lost() -> None:
    module = parse(f"""
        private def g[batch, seq, max_seq](q: input {HEADS}, cache: input {LAYER}) -> {HEADS} {{
            a: {WRITE}
            y: {HEADS} = a[0]
            return y
        }}
    """)
    assert only(module).what == "V20: the handle 'a[1]' is never passed on or given back"


def test_v20_state_that_is_lost() -> None:
    module = handles(f"r: ({HEADS}, {LAYER}) = other", other=True)
    assert only(module).what == "V20: the handle 'cache' is never passed on or given back"


def test_v20_only_one_branch_writes() -> None:
    module = handles(f"""
        y: {HEADS} = if c {{ w: {WRITE} h: {LAYER} = w[1] u: {HEADS} = w[0] t: ({LAYER},) = (h,) yield u }} else {{ yield q }}
        r: ({HEADS}, {LAYER}) = (y, cache)
    """)
    assert rules(module) == {"V20"}
    assert "V20: only one branch uses up the handle 'cache'" in [error.what for error in violations(module)]


@pytest.mark.parametrize(
    "body",
    [
        f"p: int64[batch, seq] = cache_positions(cache, seq=seq) r: {WRITE}",
        f"r: ({HEADS}, {LAYER}) = (q, cache)",
        f"h: {LAYER} = cache r: ({HEADS}, {LAYER}) = attention(q, q, q, h)",
        f"r: ({HEADS}, {LAYER}) = if c {{ w: {WRITE} yield w }} else {{ p: ({HEADS}, {LAYER}) = (q, cache) yield p }}",
    ],
    ids=["read before the write", "returned unwritten", "renamed", "passed on by the other branch"],
)
def test_v20_sound_uses_of_a_handle(body: str) -> None:
    assert violations(handles(body)) == []


def test_v20_input_may_merely_be_read() -> None:
    module = parse(f"""
        private def g[batch, seq, max_seq](q: input {HEADS}, cache: input {LAYER}) -> int64[batch, seq] {{
            a: int64[batch, seq] = cache_positions(cache, seq=seq)
            b: int64[batch, seq] = cache_positions(cache, seq=seq)
            return b
        }}
    """)
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


def test_message_names_function_binding_and_provenance() -> None:
    builder = FunctionBuilder("prefill")
    x = builder.param("x", F2, "input")
    place = Provenance("model.layers.0.mlp", "llama.py", 41)
    y = builder.emit(Call(OPS["relu"], (x,)), "y", place, TensorType((3,), "float32"))
    with pytest.raises(VerifyError) as raised:
        verify(IRModule([builder.finish(y)]))
    assert str(raised.value).split("\n") == [
        "V18: 'y' has another type than its value",
        "  declared float32[3]",
        "  inferred float32[2]",
        "  at 'y' in prefill, from model.layers.0.mlp (llama.py:41)",
    ]


def test_all_functions_are_looked_at() -> None:
    module = parse("""
        def f(x: input float32[2]) -> float32[2] { y: float32[3] = relu(x) z: float32[3] = relu(x) return x }
        def g(x: input float32[2]) -> float32[2] { y: float32[3] = relu(x) return x }
    """)
    assert [error.where for error in violations(module)] == ["'y' in f", "'z' in f", "'y' in g"]


def test_five_thousand_bindings_take_well_under_a_second() -> None:
    builder = FunctionBuilder("f")
    n = Dim("n", max=64)
    x = y = builder.param("x", TensorType((n, 8), "float32"), "input")
    w = builder.param("w", TensorType((8, 8), "float32"), "weight")
    for _ in range(1250):
        a = builder.call(OPS["matmul"], y, w)
        b = builder.call(OPS["add"], a, x)
        c = builder.call(OPS["reshape"], b, shape=(n * 8,))
        y = builder.call(OPS["reshape"], c, shape=(n, 8))
    module = IRModule([builder.finish(y)])
    start = time.process_time()
    verify(module)
    # 20 us a binding on a quiet machine; the bound leaves room for a busy one.
    assert time.process_time() - start < 0.5
