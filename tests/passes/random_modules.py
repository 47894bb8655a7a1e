# SPDX-License-Identifier: Apache-2.0
"""Random modules with weights: several methods, private functions, shared and unshared weights, dims from weights.

Every value is a square matrix, 4 by 4 or d by d with d a dim of weights, or a matrix without meaning for others (a half, a
number), so that nearly every op fits every value. Everything that is computed reaches the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from nnfront import ops
from nnfront.dims import Dim
from nnfront.ir import (
    Atom,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Projection,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    Var,
)

STATIC = TensorType((4, 4), "float32")
NAMED = TensorType((Dim("d"), Dim("d")), "float32")
TYPES = (STATIC, NAMED)
# A weight's type is in its name, so that functions agree about it.
WEIGHTS = {f"{kind}{i}": type for kind, type in (("w", STATIC), ("v", NAMED)) for i in range(3)}


def _half_and_back(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.astype, b.call(ops.astype, x, dtype="float16"), dtype="float32")


def _top_half(b: FunctionBuilder, x: Var) -> Var:
    parts = b.call(ops.split, b.call(ops.concat, x, x), indices_or_sections=2)
    return b.emit(Projection(parts, 1))


def _plus_total(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.call(ops.sum, x))


def _plus_ones(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.call(ops.ones, shape=x.type.shape))  # type: ignore[union-attr]


def _through_tuple(b: FunctionBuilder, x: Var) -> Var:
    return b.emit(Projection(b.emit(Tuple((Scalar(1.0), x))), 1))


UNARY: tuple[Callable[[FunctionBuilder, Var], Var], ...] = (
    lambda b, x: b.call(ops.permute_dims, x),
    lambda b, x: b.call(ops.multiply, x, Scalar(0.5)),
    lambda b, x: b.call(ops.stop_lift_params, x),
    lambda b, x: b.call(ops.tanh, x),
    lambda b, x: b.emit(x),
    _half_and_back,
    _top_half,
    _plus_total,
    _plus_ones,
    _through_tuple,
)
BINARY = (ops.add, ops.multiply, ops.matmul)


@st.composite
def modules(draw: Any, declares: bool = False) -> IRModule:
    """A module with one to three methods and up to two private functions; `declares`: some values are derived tensors."""
    functions: dict[str, Function] = {}
    for name in draw(st.sampled_from([(), ("inner",), ("inner", "outer")])):
        type = draw(st.sampled_from(TYPES))
        builder = FunctionBuilder(name, functions)
        builder.param("x", type, "input")
        for i in range(draw(st.integers(1, 2))):
            builder.param(f"p{i}", type, draw(st.sampled_from(["input", "weight"])))
        functions[name] = builder.finish(_body(draw, builder, functions), "private")
    for name in draw(st.sampled_from([("a",), ("b", "a"), ("a", "b", "c")])):
        builder = FunctionBuilder(name, functions)
        builder.param("x", draw(st.sampled_from(TYPES)), "input")
        builder.param("flag", ScalarType("bool"), "input")
        for weight in draw(st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, max_size=4, unique=True)):
            builder.param(weight, WEIGHTS[weight], "weight")
        functions[name] = _method(draw, builder, functions, declares)
    return IRModule(functions.values())


def _method(draw: Any, builder: FunctionBuilder, functions: dict[str, Function], declares: bool) -> Function:
    result = _body(draw, builder, functions)
    function = builder.finish(result)
    if declares:
        weights = {p for p in function.params if p.role == "weight"}
        derived = []
        for binding in function.bindings:
            operands = [a for a in getattr(binding.value, "args", ()) if isinstance(a, Var)]
            of_weights = (
                operands
                and all(a in weights for a in operands)
                and not isinstance(binding.value, FunctionCall)
            )
            if of_weights and binding.var.name != "stop_lift_params" and draw(st.booleans()):
                derived.append(binding.var.name)
        function = function.with_(attrs={"derived": tuple(derived)})
    return function


def _body(draw: Any, builder: FunctionBuilder, functions: dict[str, Function]) -> Atom:
    values = [p for p in builder.params if isinstance(p.type, TensorType)]
    unread = set(values[1:])
    for _ in range(draw(st.integers(1, 8))):
        x = draw(st.sampled_from(values))
        same = [v for v in values if v.type == x.type]
        callable_ = [
            f for f in functions.values() if f.kind == "private" and all(p.type == x.type for p in f.params)
        ]
        kind = draw(st.sampled_from(["unary", "binary", "call"] if callable_ else ["unary", "binary"]))
        if kind == "unary":
            new = draw(st.sampled_from(UNARY))(builder, x)
            unread.discard(x)
        elif kind == "binary":
            y = draw(st.sampled_from(same))
            new = builder.call(draw(st.sampled_from(BINARY)), x, y)
            unread -= {x, y}
        else:
            callee = draw(st.sampled_from(callable_))
            args = tuple(draw(st.sampled_from(same)) for _ in callee.params)
            new = builder.emit(FunctionCall(callee.name, args))
            unread -= set(args)
        values.append(new)
        unread.add(new)
    total: Atom = values[0]
    for value in sorted(unread, key=lambda v: v.name):
        total = builder.call(ops.add, total, builder.call(ops.sum, value))
    return total
