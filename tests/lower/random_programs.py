# SPDX-License-Identifier: Apache-2.0
"""Random methods over float32[n, 4] and what views and copies make of it, with branches, weights and several results."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from nnfront import ops
from nnfront.dims import Dim
from nnfront.ir import (
    Block,
    FunctionBuilder,
    If,
    IRModule,
    Projection,
    ScalarType,
    TensorType,
    Tuple,
    Var,
)

ROWS = Dim("n", min=1, max=64)
SHAPE = (ROWS, 4)
FLAGS = ("a", "b")


@st.composite
def programs(draw: Any) -> IRModule:
    """A module with one method, `main`, of x, two flags and a weight."""
    builder = FunctionBuilder("main")
    values: list[Var] = [builder.param("x", TensorType(SHAPE, "float32"), "input")]
    flags = [builder.param(name, ScalarType("bool"), "input") for name in FLAGS]
    values.append(builder.param("w", TensorType((1, 4), "float32"), "weight"))
    _grow(draw, builder, values, flags, draw(st.integers(2, 10)), depth=0)
    count = draw(st.integers(1, 3))
    results = tuple(draw(st.sampled_from(values)) for _ in range(count))
    result = results[0] if count == 1 else builder.emit(Tuple(results))
    return IRModule([builder.finish(result)])


def _grow(
    draw: Any, builder: FunctionBuilder, values: list[Var], flags: list[Any], count: int, depth: int
) -> None:
    for _ in range(count):
        values.append(_next(draw, builder, values, flags, depth))


def _next(draw: Any, builder: FunctionBuilder, values: list[Var], flags: list[Any], depth: int) -> Var:
    x = draw(st.sampled_from(values))
    kind = draw(st.sampled_from(["tanh", "add", "flat", "turn", "part", "half", "twice", "same", "if"]))
    assert isinstance(x.type, TensorType)
    match kind:
        case "add":
            return builder.call(ops.add, x, x)
        case "flat":
            return builder.call(ops.reshape, x, shape=(-1,))
        case "turn":
            return builder.call(ops.permute_dims, x)
        case "part":
            return builder.call(ops.getitem, x, index=(slice(0, 1),))
        case "half" if x.type.ndim == 2:
            parts = builder.call(ops.split, builder.call(ops.concat, x, x, dim=0), indices_or_sections=2)
            return builder.emit(Projection(parts, draw(st.integers(0, 1))))
        case "twice":
            return builder.call(ops.concat, x, x, dim=0)
        case "same":
            return builder.call(ops.astype, x, dtype="float32")
        case "if" if depth < 2:
            return _if(draw, builder, values, flags, depth)
        case _:
            return builder.call(ops.tanh, x)


def _if(draw: Any, builder: FunctionBuilder, values: list[Var], flags: list[Any], depth: int) -> Var:
    condition = draw(st.sampled_from(flags))
    blocks = []
    for _ in range(2):
        inside = list(values)
        with builder.block() as bindings:
            _grow(draw, builder, inside, flags, draw(st.integers(0, 3)), depth + 1)
            same = [v for v in inside if v.type == values[0].type]
            chosen = draw(st.sampled_from(same))
            blocks.append(Block(tuple(bindings), chosen))
    return builder.emit(If(condition, *blocks), "case")
