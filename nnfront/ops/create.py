# SPDX-License-Identifier: Apache-2.0
"""Tensors from nothing but a shape, and dims as tensors. References make them on torch's current default device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nnfront import dtypes
from nnfront.dims import Dim, Size, ceildiv, less_equal, maximum, to_size
from nnfront.errors import InferError
from nnfront.ir.op import alike, op
from nnfront.ir.operands import OperandType
from nnfront.ir.types import TensorType
from nnfront.ops.rules import FLOAT8, Dtype, Length, NewShape, OtherDtype, moving, require

_NO_AXES = "a fill value has no axes, where the reference would broadcast it"


def _of_shape(shape: NewShape, dtype: Dtype = "float32") -> TensorType:
    assert isinstance(shape, tuple)
    return TensorType(shape, dtype)


def _like(x: TensorType, dtype: OtherDtype | None = None) -> TensorType:
    return TensorType(x.shape, dtype or x.dtype)


def _require_no_axes(fill_value: OperandType) -> None:
    if isinstance(fill_value, TensorType):
        require(not fill_value.shape, "fill_value must have no axes, got {}", fill_value.ndim)


def _made(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda shape, dtype: make(tuple(shape), dtype=getattr(torch, dtype))


def _made_like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, dtype: make(x, dtype=None if dtype is None else getattr(torch, dtype))


@op(stricter=_NO_AXES, moves=True, scratch=False)
def full(shape: NewShape, fill_value: OperandType, dtype: Dtype = "float32") -> TensorType:
    """Every element is `fill_value`, a number or a tensor without axes."""
    _require_no_axes(fill_value)
    return _of_shape(shape, dtype)


@full.reference
def _(shape: Sequence[int], fill_value: Any, dtype: str) -> torch.Tensor:
    if isinstance(fill_value, torch.Tensor):
        return fill_value.to(getattr(torch, dtype)).expand(tuple(shape)).clone()
    return torch.full(tuple(shape), fill_value, dtype=getattr(torch, dtype))


_filled = alike(_of_shape, moves=True, scratch=False)
zeros = _filled("zeros", "Every element is 0.", _made(torch.zeros))
ones = _filled("ones", "Every element is 1.", _made(torch.ones))
empty = _filled("empty", "Elements that mean nothing until they are written.", _made(torch.empty))


@moving(stricter=_NO_AXES)
def full_like(x: TensorType, fill_value: OperandType, dtype: OtherDtype | None = None) -> TensorType:
    """Every element is `fill_value`, a number or a tensor without axes; shape and, unless given, dtype are x's."""
    _require_no_axes(fill_value)
    return TensorType(x.shape, dtype or x.dtype)


@full_like.reference
def _(x: torch.Tensor, fill_value: Any, dtype: str | None) -> torch.Tensor:
    wanted = x.dtype if dtype is None else getattr(torch, dtype)
    if isinstance(fill_value, torch.Tensor):
        return fill_value.to(wanted).expand(x.shape).clone()
    return torch.full_like(x, fill_value, dtype=wanted)


_EVERY = "Every element is {}; shape and, unless given, dtype are x's."
_filled_like = alike(_like, moves=True, scratch=False, dtype_policy="follow")
zeros_like = _filled_like("zeros_like", _EVERY.format(0), _made_like(torch.zeros_like))
ones_like = _filled_like("ones_like", _EVERY.format(1), _made_like(torch.ones_like))


@op(stricter="integers are counted in integers, dims or ints", moves=True, scratch=False)
def arange(
    start: Size | float, end: Size | float | None = None, step: Size | float = 1, dtype: Dtype = "float32"
) -> TensorType:
    """start, start + step, ... below end, as a vector; `arange(n)` is 0 ... n - 1.

    start, end and step are ints, dims, or floats if no dim is among them; the step of a range of dims is an int.
    """
    require(dtype != "bool" and dtype not in FLOAT8, "no range of {}", dtype)
    if not dtypes.is_float(dtype) and any(isinstance(value, float) for value in (start, end, step)):
        raise InferError(f"a range of {dtype} has integer bounds and step, got {start}, {end}, {step}")
    assert end is not None
    return TensorType((_count(start, end, step),), dtype)


def _count(start: Size | float, end: Size | float, step: Size | float) -> Size:
    """Return the number of elements, never negative."""
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return max(-((start - end) // step), 0)
    if isinstance(start, float) or isinstance(end, float) or isinstance(step, float):
        if isinstance(start, Dim) or isinstance(end, Dim) or isinstance(step, Dim):
            raise InferError(
                "a range has either dims or floats, not both", help="compute on arange(n) instead"
            )
        return max(math.ceil((end - start) / step), 0)
    if not isinstance(step, int):
        raise InferError("the step of a range must be an int or a float, not a dim")
    low, high = (start, end) if step > 0 else (end, start)
    count = high - low if abs(step) == 1 else ceildiv(high - low, abs(step))
    return count if less_equal(low, high) is True else maximum(count, 0)


@arange.normalize
def _(start: Any, end: Any, step: Any) -> dict[str, Any]:
    first, last = (0, start) if end is None else (start, end)
    stride = _bound(step, "step")
    require(isinstance(stride, Dim) or stride != 0, "the step of a range must not be 0")
    return {"start": _bound(first, "start"), "end": _bound(last, "end"), "step": stride}


def _bound(value: Any, name: str) -> Size | float:
    if isinstance(value, Dim) or type(value) is int:
        return value
    if isinstance(value, str):
        return to_size(value)
    if isinstance(value, bool) or not isinstance(value, float):
        raise InferError(f"{name} must be an int, a dim or a float, got {value!r}")
    require(math.isfinite(value), "{} must be finite, got {}", name, value)
    return value


@arange.reference
def _(start: float, end: float, step: float, dtype: str) -> torch.Tensor:
    if (end - start) * step <= 0:
        return torch.empty(0, dtype=getattr(torch, dtype))
    return torch.arange(start, end, step, dtype=getattr(torch, dtype))


@op(moves=True)
def dim_value(dim: Length) -> TensorType:
    """A dim as an int64 tensor without axes."""
    return TensorType((), "int64")


@dim_value.reference
def _(dim: int) -> torch.Tensor:
    return torch.tensor(dim, dtype=torch.int64)
