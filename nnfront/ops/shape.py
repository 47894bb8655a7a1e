# SPDX-License-Identifier: Apache-2.0
"""The same elements in another shape or order, or the same bytes as elements of another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch

from nnfront import dtypes
from nnfront.dims import Size, divides, equal, floordiv, product, same, to_size
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import (
    NO_AXIS,
    Axis,
    Dtype,
    NewShape,
    Shape,
    Sizes,
    axes_of,
    axis_of,
    differ_help,
    moving,
    positional,
    require,
    require_not_negative,
    require_same,
    sizes_of_shape,
)

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _reshape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """torch.reshape; bytes that stay beside one another, which it would copy one by one, are copied as words."""
    size = x.shape[-1] if x.dim() and x.element_size() == 1 and not x.is_contiguous() else 0
    if (
        size not in _WORDS
        or x.stride(-1) != 1
        or any(s % size for s in (x.storage_offset(), *x.stride()[:-1]))
    ):
        return x.reshape(shape)
    try:
        return x.view(shape)  # what is a view stays one
    except RuntimeError:
        return x.view(_WORDS[size]).contiguous().view(x.dtype).view(shape)


@moving(view="by strides", in_order=True, reference=_reshape)
def reshape(x: TensorType, shape: Sizes) -> TensorType:
    """The same elements, in row-major order, under another shape.

    One size may be -1: it becomes what is left. The element counts must be provably equal. Result: `shape`, x's dtype.
    """
    assert isinstance(shape, tuple)
    if not _same_count(x.shape, shape):
        mine, wanted = product(x.shape), product(shape)
        raise InferError(f"{mine} elements do not fill a shape of {wanted}", help=differ_help(mine, wanted))
    return TensorType(shape, x.dtype)


def _same_count(a: Shape, b: Shape) -> bool:
    """Whether two shapes provably hold as many elements; sizes common to both ends are not multiplied."""
    start, stop_a, stop_b = 0, len(a), len(b)
    while start < min(stop_a, stop_b) and _is(a[start], b[start]):
        start += 1
    while start < min(stop_a, stop_b) and _is(a[stop_a - 1], b[stop_b - 1]):
        stop_a, stop_b = stop_a - 1, stop_b - 1
    if start == stop_a == stop_b:
        return True
    return same(product(a[start:stop_a]), product(b[start:stop_b])) or same(product(a), product(b))


def _is(a: Size, b: Size) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


@reshape.normalize
def _(x: TensorType, shape: Sizes) -> dict[str, Any]:
    sizes = sizes_of_shape(shape)
    holes = [i for i, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    require(len(holes) <= 1, "only one size may be -1, got {}", len(holes))
    if holes:
        sizes = _fill(x.shape, sizes, holes[0])
    return {"shape": require_not_negative(sizes)}


def _fill(shape: Shape, sizes: Shape, hole: int) -> Shape:
    """Return `sizes` with the -1 at `hole` replaced by what is left of the elements of `shape`."""
    before, after = sizes[:hole], sizes[hole + 1 :]
    start, end = 0, 0  # sizes common to both ends say nothing about the hole
    while start < min(len(before), len(shape)) and _is(before[start], shape[start]):
        start += 1
    while end < min(len(after), len(shape) - start) and _is(
        after[len(after) - 1 - end], shape[len(shape) - 1 - end]
    ):
        end += 1
    common = shape[:start] + shape[len(shape) - end :]
    if any(isinstance(size, int) and size == 0 for size in common):
        raise InferError("-1 is ambiguous in a shape without elements", help="write the size")
    total = product(shape[start : len(shape) - end])
    known = product((*before[start:], *after[: len(after) - end]))
    if isinstance(known, int) and known == 0:
        raise InferError("-1 is ambiguous in a shape without elements", help="write the size")
    left = total if isinstance(known, int) and known == 1 else floordiv(total, known)
    if left is not total and not same(left * known, total):
        raise InferError(f"{total} elements do not divide by {known}, so -1 is no whole size")
    return (*before, left, *after)


@moving(view="always", reference=positional(torch.permute))
def permute_dims(x: TensorType, axes: Sequence[int] | None = None) -> TensorType:
    """Reorder axes: axis i of the result is axis axes[i] of x; None reverses them."""
    order = axes if axes is not None else range(x.ndim - 1, -1, -1)
    return TensorType(tuple([x.shape[a] for a in order]), x.dtype)


@permute_dims.normalize
def _(x: TensorType, axes: Any = None) -> dict[str, Any]:
    if axes is None:
        return {"axes": tuple(range(x.ndim - 1, -1, -1))}
    order = axes_of(axes, x.ndim, "axes")
    require(len(order) == x.ndim, "axes {} do not name each of {} axes once", order, x.ndim)
    return {"axes": order}


@moving(view="always", in_order=True, reference=torch.unsqueeze)
def unsqueeze(x: TensorType, dim: int) -> TensorType:
    """Insert an axis of size 1, which becomes axis `dim` of the result."""
    return TensorType((*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)


@unsqueeze.normalize
def _(x: TensorType, dim: int) -> dict[str, Any]:
    return {"dim": axis_of(dim, x.ndim + 1, "dim")}


@moving(
    stricter="an axis named must have size 1, where torch keeps it",
    view="always",
    in_order=True,
    reference=torch.squeeze,
)
def squeeze(x: TensorType, axis: int | Sequence[int] | None = -1) -> TensorType:
    """Drop axes of size 1: those named, or with None all that are known to be 1. A dim is never taken for 1."""
    assert isinstance(axis, tuple)
    for a in axis:
        require(
            isinstance(x.shape[a], int) and equal(x.shape[a], 1) is True,
            "axis {} has size {}, not 1",
            a,
            x.shape[a],
        )
    return TensorType(tuple([size for i, size in enumerate(x.shape) if i not in axis]), x.dtype)


@squeeze.normalize
def _(x: TensorType, axis: Any = -1) -> dict[str, Any]:
    if axis is None:
        return {"axis": tuple(i for i, size in enumerate(x.shape) if isinstance(size, int) and size == 1)}
    return {"axis": tuple(sorted(axes_of(axis, x.ndim)))}


@moving(view="always", reference=positional(torch.broadcast_to))
def broadcast_to(x: TensorType, shape: NewShape) -> TensorType:
    """Repeat axes of size 1, and new axes in front, to `shape`."""
    assert isinstance(shape, tuple)
    require(len(shape) >= x.ndim, "a shape of {} axes is too short for {}", len(shape), x.ndim)
    for mine, wanted in zip(x.shape, shape[len(shape) - x.ndim :], strict=True):
        if not (isinstance(mine, int) and mine == 1):
            require_same(mine, wanted, "size {} does not broadcast to {}")
    return TensorType(shape, x.dtype)


Count: TypeAlias = Annotated[Size, lambda count, *_: require_not_negative((to_size(count),))[0]]


@op(stricter=NO_AXIS, moves=True, dtype_policy="follow")
def repeat(x: TensorType, repeats: Count, axis: Axis | None = None) -> TensorType:
    """Repeat each element `repeats` times in place, along an axis; without one, of x as a vector: a b becomes a a b b."""
    if axis is None:
        return TensorType((product((*x.shape, repeats)),), x.dtype)
    return TensorType((*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]), x.dtype)


@repeat.reference
def _(x: torch.Tensor, repeats: int, axis: int | None) -> torch.Tensor:
    return torch.repeat_interleave(x.reshape(-1) if axis is None else x, repeats, 0 if axis is None else axis)


@moving(reference=positional(torch.tile))
def tile(x: TensorType, repeats: NewShape) -> TensorType:
    """Lay copies of x side by side, repeats[i] of them along axis i counted from the last: a b becomes a b a b."""
    assert isinstance(repeats, tuple)
    ndim = max(x.ndim, len(repeats))
    shape = (1,) * (ndim - x.ndim) + x.shape
    counts = (1,) * (ndim - len(repeats)) + repeats
    return TensorType(tuple([size * count for size, count in zip(shape, counts, strict=True)]), x.dtype)


@moving(stricter=NO_AXIS, reference=positional(torch.flip))
def flip(x: TensorType, axis: int | Sequence[int] | None = None) -> TensorType:
    """Reverse the order along axes; None reverses all."""
    require(not x.dtype.startswith("float8"), "{} cannot be flipped", x.dtype, help="cast with astype first")
    return x


@flip.normalize
def _(x: TensorType, axis: Any = None) -> dict[str, Any]:
    return {"axis": tuple(range(x.ndim)) if axis is None else tuple(sorted(axes_of(axis, x.ndim)))}


@op(stricter=NO_AXIS, view="by strides", scratch=False, dtype_policy="given")
def bitcast(x: TensorType, dtype: Dtype) -> TensorType:
    """Read the bytes of x, little-endian along the last axis, as elements of another dtype.

    Shapes: x [..., n], result [..., n * bytes of an element of x / bytes of one of `dtype`]. Numbers only, no bool.
    """
    require(x.ndim > 0, "x has no axis")
    for each in (x.dtype, dtype):
        require(each != "bool", "not defined for bool", help="cast with astype first")
    mine, its = dtypes.size_bytes(x.dtype), dtypes.size_bytes(dtype)
    size = x.shape[-1] * mine
    require(
        divides(its, size) is True,
        "the last axis has {} bytes, which are no whole number of {}",
        size,
        dtype,
    )
    return TensorType((*x.shape[:-1], floordiv(size, its)), dtype)


@bitcast.reference
def _(x: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    flat = x.reshape(-1)
    # Torch views no element that begins inside of one.
    if flat.storage_offset() * x.itemsize % wanted.itemsize:
        flat = flat.clone()
    return flat.view(wanted).reshape(*x.shape[:-1], x.shape[-1] * x.itemsize // wanted.itemsize)
