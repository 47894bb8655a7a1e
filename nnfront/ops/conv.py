# SPDX-License-Identifier: Apache-2.0
"""Convolutions over one, two or three axes, and their transpose over one.

Weights are [out, in / groups, kernel...] in every data layout. `padding` is an int, one int for each spatial axis, one pair
(before, after) for each, "valid" (none) or "same" (the result is as long as the input; stride 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from nnfront.dims import Size, divides, floordiv, less, product
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import integer, require, require_alike, require_float, require_same, wide

Amount: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | str | Sequence[int | Sequence[int]]

_UNEVEN = "{} channels do not divide into {} groups"
# Torch multiplies strides and dilations with sizes in 64 bits and does not look whether the product fits: a larger one makes it read outside its operands.
_MOST = 2**31 - 1
_FLOATS_ONLY = "integers are refused, which torch convolves on a CPU only"


def _amounts(value: Any, count: int, name: str, least: int) -> tuple[int, ...]:
    """Return one int for each spatial axis."""
    listed = value if isinstance(value, tuple | list) else (value,) * count
    found = tuple([integer(v, name) for v in listed])
    require(len(found) == count, "{} has {} numbers for {} spatial axes", name, len(found), count)
    for amount in found:
        require(amount >= least, "{} must be at least {}, got {}", name, least, amount)
        require(amount <= _MOST, "{} must be at most {}, got {}", name, _MOST, amount)
    return found


def _pairs(
    padding: Any, kernel: Sequence[Size], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return padding as (before, after) for each spatial axis."""
    count = len(stride)
    if isinstance(padding, str):
        require(
            padding.lower() in ("same", "valid"),
            "padding must be numbers, 'same' or 'valid', got {!r}",
            padding,
        )
        if padding.lower() == "valid":
            return ((0, 0),) * count
        require(all(s == 1 for s in stride), "padding 'same' needs stride 1, got {}", stride)
        totals = []
        for size, step in zip(kernel, dilation, strict=True):
            if not isinstance(size, int):
                raise InferError(
                    f"padding 'same' needs a known kernel, got {size}", help="give the padding as numbers"
                )
            totals.append(step * (size - 1))
        return tuple([(total // 2, total - total // 2) for total in totals])
    if isinstance(padding, tuple | list) and any(isinstance(p, tuple | list) for p in padding):
        require(len(padding) == count, "padding has {} entries for {} spatial axes", len(padding), count)
        both = [_amounts(pair, 2, "padding", 0) for pair in padding]
        return tuple([(before, after) for before, after in both])
    return tuple([(p, p) for p in _amounts(padding, count, "padding", 0)])


def _canonical(count: int, *layouts: str) -> Callable[..., dict[str, Any]]:
    """Return what makes the attributes of a convolution over so many axes canonical."""

    def canonical(
        weight: TensorType, stride: Any, padding: Any, dilation: Any, groups: Any, data_layout: str = ""
    ) -> dict[str, Any]:
        known = not layouts or data_layout in layouts
        require(known, "data_layout must be {!r} or {!r}, got {!r}", *layouts, data_layout)
        require(weight.ndim == count + 2, "weight must have {} axes, got {}", count + 2, weight.ndim)
        steps = _amounts(1 if stride is None else stride, count, "stride", 1)
        spread = _amounts(1 if dilation is None else dilation, count, "dilation", 1)
        parts = integer(1 if groups is None else groups, "groups")
        require(parts > 0, "groups must be positive, got {}", parts)
        pairs = _pairs(0 if padding is None else padding, weight.shape[2:], steps, spread)
        return {"stride": steps, "padding": pairs, "dilation": spread, "groups": parts}

    return canonical


def _check(x: TensorType, weight: TensorType, bias: TensorType | None, count: int) -> None:
    """Check what all convolutions share: axes and dtypes."""
    require_float(x)
    require(x.ndim == count + 2, "x must have {} axes, got {}", count + 2, x.ndim)
    require_alike(x=x, weight=weight, bias=bias)
    for size in (*x.shape[1:], *weight.shape):
        require(not (isinstance(size, int) and size == 0), "only the batch may be empty")


def _convolved(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    channels_last: bool = False,
) -> TensorType:
    """Return the type of a convolution; all attributes are canonical."""
    count = len(stride)
    _check(x, weight, bias, count)
    channels, spatial = (x.shape[-1], x.shape[1:-1]) if channels_last else (x.shape[1], x.shape[2:])
    out, kernel = weight.shape[0], weight.shape[2:]
    require_same(channels, weight.shape[1] * groups, "x has {} channels, the weight and its groups take {}")
    require(divides(groups, out) is True, _UNEVEN, out, groups)
    if bias is not None:
        _check_bias(bias, out)
    sizes = []
    for size, width, step, (before, after), spread in zip(
        spatial, kernel, stride, padding, dilation, strict=True
    ):
        room = size + (before + after) - spread * (width - 1) - 1
        require(
            less(room, 0) is not True,
            "a kernel of {} with dilation {} does not fit into {}",
            width,
            spread,
            size,
        )
        sizes.append(floordiv(room, step) + 1)
    return TensorType((x.shape[0], *sizes, out) if channels_last else (x.shape[0], out, *sizes), x.dtype)


def _check_bias(bias: TensorType, out: Size) -> None:
    require(bias.ndim == 1, "bias must have one axis, got {}", bias.ndim)
    require_same(bias.shape[0], out, "bias has {} elements, there are {} output channels")


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    data_layout: str = "NCW",
) -> torch.Tensor:
    if data_layout[-1] == "C":
        return _convolve(x.movedim(-1, 1), weight, bias, stride, padding, dilation, groups).movedim(1, -1)
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(stride)]
    x, weight, bias, dtype = *_safe(x, weight, bias), x.dtype
    amounts: int | list[int] = [before for before, _ in padding]
    if any(before != after for before, after in padding):
        # Torch pads the last axis first.
        x = F.pad(x, [amount for pair in reversed(padding) for amount in pair])
        amounts = 0
    return function(x, weight, bias, stride, amounts, dilation, groups).to(dtype)


def _safe(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands as they are convolved: on a CPU in float32 or wider.

    There torch 2.13 reads memory that is not its own, and dies, where half types meet strides of 64, more padding than a kernel covers, or
    the dilation of a kernel of one element.
    """
    dtype = wide(x.dtype) if x.is_cpu else x.dtype
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of the result and each number that its filter has."""
    return product([2, *results[0].shape, *operands[1].shape[1:]])


_convolution = partial(op, stricter=_FLOATS_ONLY, flops=_flops, dtype_policy="compute", reference=_convolve)


@_convolution(normalize=_canonical(1))
def conv1d(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Amount = 1,
    padding: Padding = 0,
    dilation: Amount = 1,
    groups: int = 1,
) -> TensorType:
    """Convolve one axis: x [batch, in, w], weight [out, in / groups, kernel], bias [out] give [batch, out, w']."""
    return _convolved(x, weight, bias, stride, padding, dilation, groups)


@_convolution(normalize=_canonical(2, "NCHW", "NHWC"))
def conv2d(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Amount = 1,
    padding: Padding = 0,
    dilation: Amount = 1,
    groups: int = 1,
    data_layout: str = "NCHW",
) -> TensorType:
    """Convolve two axes: x [batch, in, h, w], weight [out, in / groups, kh, kw], bias [out] give [batch, out, h', w'].

    data_layout "NHWC": x and the result have their channels last, the weight stays as it is.
    """
    return _convolved(x, weight, bias, stride, padding, dilation, groups, data_layout == "NHWC")


@_convolution(normalize=_canonical(3, "NCDHW", "NDHWC"))
def conv3d(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Amount = 1,
    padding: Padding = 0,
    dilation: Amount = 1,
    groups: int = 1,
    data_layout: str = "NCDHW",
) -> TensorType:
    """Convolve three axes: x [batch, in, d, h, w], weight [out, in / groups, kd, kh, kw], bias [out] give [batch, out, d', h', w'].

    data_layout "NDHWC": x and the result have their channels last, the weight stays as it is.
    """
    return _convolved(x, weight, bias, stride, padding, dilation, groups, data_layout == "NDHWC")


def _transposed_flops(
    operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]
) -> Size:
    """Two operations for each element of x and each number that it is multiplied with."""
    x, weight = operands[:2]
    return product([2, *x.shape, *weight.shape[1:]])


@op(stricter=_FLOATS_ONLY, flops=_transposed_flops, dtype_policy="compute")
def conv1d_transpose(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Amount = 1,
    padding: Padding = 0,
    output_padding: Amount = 0,
    dilation: Amount = 1,
    groups: int = 1,
) -> TensorType:
    """The gradient of conv1d: x [batch, in, w], weight [in, out / groups, kernel], bias [out] give [batch, out, w'].

    w' = (w - 1) * stride - padding + dilation * (kernel - 1) + output_padding + 1; output_padding is less than stride or dilation.
    """
    return _transposed(x, weight, bias, stride, padding, output_padding, dilation, groups)


def _transposed(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: int,
) -> TensorType:
    """Return the type of a transposed convolution; all attributes are canonical."""
    (step,), ((before, after),), (extra,), (spread,) = stride, padding, output_padding, dilation
    _check(x, weight, bias, 1)
    require_same(x.shape[1], weight.shape[0], "x has {} channels, the weight takes {}")
    require(divides(groups, weight.shape[0]) is True, _UNEVEN, weight.shape[0], groups)
    require(extra < max(step, spread), "output_padding {} must be less than stride or dilation", extra)
    out = weight.shape[1] * groups
    if bias is not None:
        _check_bias(bias, out)
    size = (x.shape[2] - 1) * step + spread * (weight.shape[2] - 1) + extra + 1 - before - after
    require(less(size, 1) is not True, "padding {} leaves nothing of the result", (before, after))
    return TensorType((x.shape[0], out, size), x.dtype)


@conv1d_transpose.normalize
def _(
    weight: TensorType, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: Any
) -> dict[str, Any]:
    require(not isinstance(padding, str), "padding must be numbers, got {!r}", padding)
    extra = _amounts(0 if output_padding is None else output_padding, 1, "output_padding", 0)
    return {**_canonical(1)(weight, stride, padding, dilation, groups), "output_padding": extra}


@conv1d_transpose.reference
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    operands, (before, after) = _safe(x, weight, bias), padding[0]
    whole = F.conv_transpose1d(*operands, stride, 0, output_padding, groups, dilation)
    return whole.narrow(2, before, whole.shape[2] - before - after).to(x.dtype)
