# SPDX-License-Identifier: Apache-2.0
"""Many elements into one, or into their order: sums, extremes, cumulative sums, sorting.

`axis` is one axis, several, or None for all; with `keepdims` the axes stay, with size 1. Sums of integers and bools are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import torch

from nnfront.dims import Size, less_equal, product, to_size
from nnfront.dtypes import is_float
from nnfront.ir.op import alike, op
from nnfront.ir.types import TensorType, TupleType
from nnfront.ops.rules import (
    FLOAT8,
    NO_AXIS,
    Axis,
    Dtype,
    Flag,
    Shape,
    Whole,
    axes_of,
    require,
    require_float,
    require_number,
)


def _axes(axis: Any, ndim: int) -> tuple[int, ...] | None:
    """Return axes in increasing order, None if they are all there are."""
    axes = None if axis is None else tuple(sorted(axes_of(axis, ndim)))
    return None if axes is not None and len(axes) == ndim else axes


OrNone: TypeAlias = Annotated[bool | None, lambda value, *_: True if value else None]
Axes: TypeAlias = Annotated[int | Sequence[int] | None, lambda axis, _, x: _axes(axis, x.ndim)]


def _reduced(x: TensorType, axis: Axes, keepdims: bool) -> Shape:
    """Return the shape after a reduction."""
    if axis is None:
        return (1,) * x.ndim if keepdims else ()
    assert isinstance(axis, tuple)
    if keepdims:
        return tuple([1 if i in axis else size for i, size in enumerate(x.shape)])
    return tuple([size for i, size in enumerate(x.shape) if i not in axis])


def _all_axes(x: torch.Tensor, axis: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axis is None else tuple(axis)


def _require_computable(x: TensorType) -> None:
    require(x.dtype not in FLOAT8, "no arithmetic in {}", x.dtype, help="cast with astype first")


def _require_elements(x: TensorType, axis: Axes) -> None:
    """Refuse a reduction without a neutral element over an axis that is known to be empty."""
    sizes = x.shape if axis is None else [x.shape[a] for a in axis] if isinstance(axis, tuple) else []
    for size in sizes:
        require(not (isinstance(size, int) and size == 0), "the extreme of no elements does not exist")


def _sum_dtype(dtype: str) -> str:
    return dtype if is_float(dtype) else "int64"


@op(stricter=NO_AXIS, dtype_policy="wide", reference=torch.sum)
def sum(x: TensorType, axis: Axes = None, keepdims: Flag = False) -> TensorType:
    """The sum; 0 over no elements."""
    _require_computable(x)
    return TensorType(_reduced(x, axis, keepdims), _sum_dtype(x.dtype))


@op(stricter=NO_AXIS, view="sometimes", dtype_policy="wide")
def prod(x: TensorType, axis: Axes = None, keepdims: Flag = False) -> TensorType:
    """The product; 1 over no elements."""
    _require_computable(x)
    return TensorType(_reduced(x, axis, keepdims), _sum_dtype(x.dtype))


@prod.reference
def _(x: torch.Tensor, axis: Sequence[int] | None, keepdims: bool) -> torch.Tensor:
    result = x if x.is_floating_point() else x.long()
    for a in _all_axes(x, axis):
        result = torch.prod(result, a, keepdim=True)
    return result if keepdims else result.squeeze(_all_axes(x, axis))


def _extreme(x: TensorType, axis: Axes = None, keepdims: Flag = False) -> TensorType:
    _require_computable(x)
    _require_elements(x, axis)
    return TensorType(_reduced(x, axis, keepdims), x.dtype)


_of_extremes = alike(_extreme, stricter=NO_AXIS, dtype_policy="follow")
max = _of_extremes("max", "The largest element, NaN if any is NaN.", torch.amax)
min = _of_extremes("min", "The smallest element, NaN if any is NaN.", torch.amin)


@op(stricter=NO_AXIS, dtype_policy="wide", reference=torch.mean)
def mean(x: TensorType, axis: Axes = None, keepdims: Flag = False) -> TensorType:
    """The mean of floats; NaN over no elements."""
    require_float(x)
    return TensorType(_reduced(x, axis, keepdims), x.dtype)


@op(stricter=NO_AXIS, dtype_policy="wide")
def var(x: TensorType, axis: Axes = None, keepdims: Flag = False, correction: Whole = 0) -> TensorType:
    """The mean squared distance from the mean; the sum is divided by the count minus `correction` (1: torch's default)."""
    require_float(x)
    return TensorType(_reduced(x, axis, keepdims), x.dtype)


@var.reference
def _(x: torch.Tensor, axis: Sequence[int] | None, keepdims: bool, correction: int) -> torch.Tensor:
    y = x.to(torch.float64) if x.dtype == torch.float64 else x.float()
    axes = _all_axes(x, axis)
    count = torch.tensor([x.shape[a] for a in axes], dtype=torch.int64).prod() - correction
    squares = (y - y.mean(axes, keepdim=True)).square()
    return (squares.sum(axes, keepdim=keepdims) / count.clamp(min=0).to(y.device)).to(x.dtype)


def _truth(x: TensorType, axis: Axes = None, keepdims: Flag = False) -> TensorType:
    return TensorType(_reduced(x, axis, keepdims), "bool")


def _of_bools(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, axis, keepdims: reduce(x.bool(), _all_axes(x, axis), keepdim=keepdims)


_of_truths = alike(_truth, stricter=NO_AXIS)
any = _of_truths("any", "Whether at least one element is nonzero: bool.", _of_bools(torch.any))
all = _of_truths("all", "Whether every element is nonzero: bool.", _of_bools(torch.all))


def _position(x: TensorType, axis: Axis | None = None, keepdims: Flag = False) -> TensorType:
    require_number(x)
    axes = None if axis is None else (axis,)
    _require_elements(x, axes)
    return TensorType(_reduced(x, axes, keepdims), "int64")


_FIRST = "The position of the first {} element, int64; with axis=None its position in row-major order."
_of_positions = alike(_position, stricter=NO_AXIS, dtype_policy="follow")
argmax = _of_positions("argmax", _FIRST.format("largest"), torch.argmax)
argmin = _of_positions("argmin", _FIRST.format("smallest"), torch.argmin)


@op(stricter=NO_AXIS, dtype_policy="wide")
def cumsum(
    data: TensorType, axis: Axis | None = None, dtype: Dtype | None = None, exclusive: OrNone = None
) -> TensorType:
    """Running sums along an axis; without one, of the elements as a vector. `exclusive` leaves each element out of its own sum.

    dtype: the dtype to sum in and of the result; by default the data's, int64 for integers and bools.
    """
    _require_computable(data)
    require(dtype is None or (dtype != "bool" and dtype not in FLOAT8), "no sums in {}", dtype)
    shape = data.shape if axis is not None else (product(data.shape),)
    return TensorType(shape, dtype or _sum_dtype(data.dtype))


@cumsum.reference
def _(data: torch.Tensor, axis: int | None, dtype: str | None, exclusive: bool | None) -> torch.Tensor:
    x, along = (data.reshape(-1), 0) if axis is None else (data, axis)
    sums = torch.cumsum(x, along, dtype=None if dtype is None else getattr(torch, dtype))
    if not exclusive or sums.shape[along] == 0:
        return sums
    first = torch.zeros_like(sums.narrow(along, 0, 1))
    return torch.cat([first, sums.narrow(along, 0, sums.shape[along] - 1)], along)


@op(stricter=NO_AXIS, dtype_policy="follow")
def sort(x: TensorType, axis: Axis = -1, descending: Flag = False) -> TensorType:
    """The elements in order along an axis; equal elements keep theirs, NaN counts as the largest."""
    _require_computable(x)
    return x


@sort.reference
def _(x: torch.Tensor, axis: int, descending: bool) -> torch.Tensor:
    return torch.sort(x, stable=True, dim=axis, descending=descending).values


@op(stricter=NO_AXIS, dtype_policy="follow")
def argsort(
    data: TensorType, axis: Axis = -1, descending: Flag = False, dtype: Dtype = "int32"
) -> TensorType:
    """The positions that put the elements in order along an axis, stably."""
    _require_computable(data)
    return TensorType(data.shape, dtype)


@argsort.reference
def _(data: torch.Tensor, axis: int, descending: bool, dtype: str) -> torch.Tensor:
    order = torch.sort(data, stable=True, dim=axis, descending=descending).indices
    return order.to(getattr(torch, dtype))


@op(stricter=NO_AXIS, dtype_policy="follow")
def topk(
    data: TensorType,
    k: Size = 1,
    axis: Axis = -1,
    ret_type: str = "both",
    largest: Flag = True,
    dtype: Dtype = "int32",
) -> TensorType | TupleType:
    """The k largest (or smallest) elements along an axis in order, and their positions of type `dtype`; k < 1 takes all.

    ret_type: "both" gives a tuple, "values" or "indices" one tensor. Which of several equal elements come is open.
    """
    require_number(data, "data")
    size = data.shape[axis]
    count = size if isinstance(k, int) and k < 1 else k
    require(
        less_equal(count, size) is not False,
        "there are no {} elements on axis {} of size {}",
        count,
        axis,
        size,
    )
    shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
    values, indices = TensorType(shape, data.dtype), TensorType(shape, dtype)
    if ret_type == "both":
        return TupleType((values, indices))
    return values if ret_type == "values" else indices


@topk.normalize
def _(k: Any, ret_type: Any) -> dict[str, Any]:
    require(
        ret_type in ("both", "values", "indices"),
        "ret_type must be 'both', 'values' or 'indices', got {!r}",
        ret_type,
    )
    return {"k": -1 if isinstance(k, int) and k < 1 else to_size(k)}


@topk.reference
def _(
    data: torch.Tensor, k: int, axis: int, ret_type: str, largest: bool, dtype: str
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(data, data.shape[axis] if k < 1 else k, axis, largest=largest)
    indices = indices.to(getattr(torch, dtype))
    if ret_type == "both":
        return values, indices
    return values if ret_type == "values" else indices
