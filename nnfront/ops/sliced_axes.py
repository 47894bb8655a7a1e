# SPDX-License-Identifier: Apache-2.0
"""Of which slices of its operands an op computes a slice of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nnfront.dims import same
from nnfront.ir.op import Op
from nnfront.ir.types import TensorType, Type
from nnfront.ops import reduce
from nnfront.ops.collective import all_reduce
from nnfront.ops.index import gather
from nnfront.ops.join import chunk, concat, split
from nnfront.ops.linear_int8 import linear_int8
from nnfront.ops.low_rank import add_low_rank
from nnfront.ops.matmul import linear, matmul
from nnfront.ops.moe import moe_mlp
from nnfront.ops.norm import layer_norm, log_softmax, rms_norm, softmax
from nnfront.ops.shape import unsqueeze

Axes: TypeAlias = Sequence[int | None]
"""For each operand the axis along which it is cut, None for one that is read whole."""

_Rule: TypeAlias = Callable[[int, Sequence[Type | None], Mapping[str, Any]], Axes | None]


def sliced_axes(op: Op, axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Return along which axes operands of these types are cut for a slice of the result along `axis`, of each if there are several.

    The slice is then what the op computes of operands cut to the same positions. None: nothing says so.
    """
    rule = _broadcast if op.pointwise else _RULES.get(op)
    return None if rule is None else rule(axis, types, op.full_attrs(attrs))


def _broadcast(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Of each element alone: cut where an operand has the axis, and more than one element along it."""
    shapes = [t.shape if isinstance(t, TensorType) else () for t in types]
    behind = max(map(len, shapes)) - axis  # axes from this one to the last
    if behind < 1:
        return None
    axes = [
        None if len(shape) < behind or same(shape[-behind], 1) else len(shape) - behind for shape in shapes
    ]
    return axes if any(found is not None for found in axes) else None


def _rows(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Of the features of a row: cut the first operand, and read what there is besides whole."""
    return _first(axis, types) if axis < _ndim(types[0]) - 1 else None


def _product(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Rows of the left matrix, all of the right one."""
    left, right = map(_ndim, types)
    return (axis, None) if right == 2 and axis < left - 1 else None


def _low_rank(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Tokens of both the product and what it is of; all of them have the adapter of their sequence."""
    inside = 0 < axis < _ndim(types[0]) - 1
    return (axis, axis, None, None, None) if inside else None


def _normalized(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    return _first(axis, types) if axis < _ndim(types[0]) - len(_as_tuple(attrs["normalized_shape"])) else None


def _besides(name: str) -> _Rule:
    """Of what lies along the axes that an attribute names: cut the first operand along any other."""

    def rule(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
        return None if axis in _as_tuple(attrs[name]) else _first(axis, types)

    return rule


def _joined(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Along any axis but that along which operands lie one after the other."""
    return None if axis == attrs["dim"] else [axis] * len(types)


def _reduced(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Along any axis but those that are reduced, which the result may lack."""
    gone = range(_ndim(types[0])) if attrs["axis"] is None else _as_tuple(attrs["axis"])
    kept = [at for at in range(_ndim(types[0])) if attrs["keepdims"] or at not in gone]
    return None if kept[axis] in gone else _first(kept[axis], types)


def _with_new_axis(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    return None if axis == attrs["dim"] else (axis - (axis > attrs["dim"]),)


def _gathered(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    return None if axis == attrs["axis"] else (axis, axis)


def _experts(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Tokens, their experts and the weights of these."""
    return (0, None, None, 0, 0, None, None) if axis == 0 else None


def _each(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    return (axis,)


def _first(axis: int, types: Sequence[Type | None]) -> Axes:
    return (axis, *[None] * (len(types) - 1))


def _ndim(type: Type | None) -> int:
    assert isinstance(type, TensorType)
    return type.ndim


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


_REDUCTIONS = (reduce.all, reduce.any, reduce.max, reduce.mean, reduce.min, reduce.prod, reduce.sum)

_RULES: Mapping[Op, _Rule] = {
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys((linear, linear_int8), _rows),
    **dict.fromkeys((log_softmax, softmax, split, reduce.topk), _besides("axis")),
    add_low_rank: _low_rank,
    all_reduce: _each,
    chunk: _besides("dim"),
    concat: _joined,
    gather: _gathered,
    layer_norm: _normalized,
    matmul: _product,
    moe_mlp: _experts,
    rms_norm: _besides("axes"),
    unsqueeze: _with_new_axis,
}
