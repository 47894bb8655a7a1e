# SPDX-License-Identifier: Apache-2.0
"""Of which slices of its operands an op computes a slice of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nnfront.dims import same
from nnfront.ir.op import Op
from nnfront.ir.types import TensorType, Type
from nnfront.ops.collective import all_reduce
from nnfront.ops.join import chunk, concat, split
from nnfront.ops.linear_int8 import linear_int8
from nnfront.ops.low_rank import add_low_rank
from nnfront.ops.matmul import linear, matmul
from nnfront.ops.norm import layer_norm, log_softmax, rms_norm, softmax
from nnfront.ops.shape import reshape

Axes: TypeAlias = Sequence[int | None]
"""For each operand the axis along which it is cut, None for one that is read whole."""

_Rule: TypeAlias = Callable[[int, Sequence[Type | None], Mapping[str, Any]], Axes | None]


def sliced_axes(op: Op, axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """Return along which axes operands of these types are cut for a slice of the result along `axis`, of each if there are several.

    The slice is then what the op computes of operands cut to the same positions, a `shape` among the attributes cut as well. None: nothing says so.
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


def _same_axes(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    """An axis that the other shape has in the same place, all before it being the same as well."""
    (x,) = types
    assert isinstance(x, TensorType)
    ends = [shape[: axis + 1] for shape in (x.shape, attrs["shape"])]
    is_kept = all(len(end) == axis + 1 for end in ends) and all(map(same, *ends))
    return (axis,) if is_kept else None


def _each(axis: int, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Axes | None:
    return (axis,)


def _first(axis: int, types: Sequence[Type | None]) -> Axes:
    return (axis, *[None] * (len(types) - 1))


def _ndim(type: Type | None) -> int:
    assert isinstance(type, TensorType)
    return type.ndim


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


_RULES: Mapping[Op, _Rule] = {
    add_low_rank: _low_rank,
    all_reduce: _each,
    chunk: _besides("dim"),
    concat: _joined,
    layer_norm: _normalized,
    linear: _rows,
    linear_int8: _rows,
    log_softmax: _besides("axis"),
    matmul: _product,
    reshape: _same_axes,
    rms_norm: _besides("axes"),
    softmax: _besides("axis"),
    split: _besides("axis"),
}
