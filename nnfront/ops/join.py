# SPDX-License-Identifier: Apache-2.0
"""Tensors put together and taken apart along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnfront.dims import Size, divides, floordiv, less_equal
from nnfront.ir.budget import MAX_FIELDS
from nnfront.ir.types import TensorType, TupleType
from nnfront.ops.rules import (
    NO_AXIS,
    Axis,
    Whole,
    axis_of,
    integer,
    moving,
    require,
    require_same,
    result_dtype,
    sizes_of_shape,
)


@moving(
    stricter="an empty vector does not concatenate with tensors of more axes",
    in_order="dim",
    reference=torch.cat,
)
def concat(x: Sequence[TensorType], dim: int = 0) -> TensorType:
    """Join tensors end to end along an axis; all other sizes are equal. The dtype is that of their promotion."""
    first = x[0]
    total: Size = first.shape[dim]
    for i, other in enumerate(x[1:], 1):
        _require_fit(first, other, i, dim)
        total = total + other.shape[dim]
    return TensorType((*first.shape[:dim], total, *first.shape[dim + 1 :]), result_dtype(*x))


@concat.normalize
def _(x: Sequence[TensorType], dim: int) -> dict[str, Any]:
    require(bool(x), "nothing to concatenate")
    return {"dim": axis_of(dim, x[0].ndim, "dim")}


@moving(in_order="dim", reference=torch.stack)
def stack(x: Sequence[TensorType], dim: int = 0) -> TensorType:
    """Join tensors of one shape along a new axis, which becomes axis `dim`."""
    first = x[0]
    for i, other in enumerate(x[1:], 1):
        _require_fit(first, other, i, None)
    return TensorType((*first.shape[:dim], len(x), *first.shape[dim:]), result_dtype(*x))


@stack.normalize
def _(x: Sequence[TensorType], dim: int) -> dict[str, Any]:
    require(bool(x), "nothing to stack")
    return {"dim": axis_of(dim, x[0].ndim + 1, "dim")}


def _require_fit(first: TensorType, other: TensorType, index: int, free: int | None) -> None:
    """Require the shapes of two tensors to be equal but for the axis `free`."""
    require(other.ndim == first.ndim, "tensor 0 has {} axes, tensor {} has {}", first.ndim, index, other.ndim)
    for axis, (mine, its) in enumerate(zip(first.shape, other.shape, strict=True)):
        if axis != free:
            require_same(mine, its, "tensors 0 and {} differ on axis {}: {} and {}", index, axis)


@moving(stricter="the axis must divide into equal parts", view="always")
def split(ary: TensorType, indices_or_sections: int | Sequence[Size], axis: Axis = 0) -> TupleType:
    """Take a tensor apart along an axis: into so many equal parts (an int), or before each of the given positions.

    Positions are increasing and within the axis, provably. The result is a tuple.
    """
    size = ary.shape[axis]
    if isinstance(indices_or_sections, int):
        part = floordiv(size, indices_or_sections)
        sizes: list[Size] = [part] * indices_or_sections
        field = TensorType((*ary.shape[:axis], part, *ary.shape[axis + 1 :]), ary.dtype)
        return TupleType((field,) * len(sizes))
    ends = (*indices_or_sections, size)
    starts = (0, *indices_or_sections)
    for start, end in zip(starts, ends, strict=True):
        require(
            less_equal(start, end) is True,
            "nothing says that position {} comes before {} on an axis of size {}",
            start,
            end,
            size,
        )
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return TupleType(
        tuple([TensorType((*ary.shape[:axis], s, *ary.shape[axis + 1 :]), ary.dtype) for s in sizes])
    )


def _require_parts(x: TensorType, axis: int, parts: int, help: str) -> None:
    """Require an axis to divide into so many equal parts."""
    what = "axis {} of size {} does not divide into {} equal parts"
    require(divides(parts, x.shape[axis]) is True, what, axis, x.shape[axis], parts, help=help)


@split.normalize
def _(ary: TensorType, indices_or_sections: Any, axis: int) -> dict[str, Any]:
    if isinstance(indices_or_sections, tuple | list):
        return {"indices_or_sections": sizes_of_shape(indices_or_sections)}
    parts = integer(indices_or_sections, "indices_or_sections")
    require(0 < parts <= MAX_FIELDS, "{} parts", parts)
    _require_parts(ary, axis, parts, "use chunk, or give the dim multiple_of")
    return {"indices_or_sections": parts}


@split.reference
def _(ary: torch.Tensor, indices_or_sections: int | Sequence[int], axis: int) -> tuple[torch.Tensor, ...]:
    spec = indices_or_sections if isinstance(indices_or_sections, int) else tuple(indices_or_sections)
    return tuple(torch.tensor_split(ary, spec, axis))


@moving(stricter=NO_AXIS + "; a dim must divide into equal parts", view="always", reference=torch.chunk)
def chunk(x: TensorType, chunks: Whole, dim: Axis = 0) -> TupleType:
    """Take a tensor apart along an axis into at most `chunks` parts of equal size, the last one smaller if it must be.

    The result is a tuple. Source: torch.chunk.
    """
    require(0 < chunks <= MAX_FIELDS, "{} chunks", chunks)
    size = x.shape[dim]
    if isinstance(size, int):
        part = max(-(-size // chunks), 0)
        sizes: list[Size] = (
            [min(part, size - start) for start in range(0, size, part)] if size else [0] * chunks
        )
    else:
        _require_parts(x, dim, chunks, "give the dim multiple_of")
        sizes = [floordiv(size, chunks)] * chunks
    return TupleType(tuple([TensorType((*x.shape[:dim], s, *x.shape[dim + 1 :]), x.dtype) for s in sizes]))
