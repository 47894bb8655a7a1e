# SPDX-License-Identifier: Apache-2.0
"""Normalisation: softmax and the norms. Half types are computed in float32 and rounded once, at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch

from nnfront.dims import Size, divides
from nnfront.ir.op import alike, op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import (
    NO_AXIS,
    Axis,
    Number,
    Whole,
    axes_of,
    require,
    require_float,
    require_same,
    sizes_of_shape,
    wide,
)

NormalizedShape: TypeAlias = Annotated[Sequence[Size] | Size, lambda shape, *_: sizes_of_shape(shape)]
_FLOATS = "all operands are floats, where the reference would convert"


def _along(x: TensorType, axis: Axis = -1) -> TensorType:
    require_float(x)
    return x


_probabilities = alike(_along, stricter=NO_AXIS, dtype_policy="wide")
softmax = _probabilities("softmax", "exp(x) over its sum along an axis.", torch.softmax, scratch=False)
_LOGARITHM = "The logarithm of softmax(x, axis), without overflow."
log_softmax = _probabilities("log_softmax", _LOGARITHM, torch.log_softmax)


def _check_affine(x: TensorType, shape: tuple[Size, ...], **tensors: TensorType | None) -> None:
    """Require scale and offset of a norm to be floats of the shape that is normalised."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_float(tensor, name)
        require(tensor.ndim == len(shape), "{} must have {} axes, got {}", name, len(shape), tensor.ndim)
        for mine, expected in zip(tensor.shape, shape, strict=True):
            require_same(mine, expected, f"{name} has size {{}} where x has {{}}")


def _scale_and_shift(
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Apply weight and bias, viewed as `shape`, to a wide result, and round it."""
    if weight is not None:
        y = y * weight.to(y.dtype).reshape(shape)
    if bias is not None:
        y = y + bias.to(y.dtype).reshape(shape)
    return y.to(dtype)


@op(stricter=_FLOATS, dtype_policy="first")
def layer_norm(
    x: TensorType,
    normalized_shape: NormalizedShape,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    eps: Number = 1e-5,
) -> TensorType:
    """(x - mean) / sqrt(variance + eps) over the last axes, those of `normalized_shape`; then times weight plus bias.

    Shapes: weight and bias have `normalized_shape`. The result has x's type.
    Source: Layer Normalization (arXiv 1607.06450), eq. 4.
    """
    require_float(x)
    shape = normalized_shape if isinstance(normalized_shape, tuple) else (normalized_shape,)
    assert isinstance(shape, tuple)
    require(0 < len(shape) <= x.ndim, "normalized_shape has {} axes, x has {}", len(shape), x.ndim)
    for mine, expected in zip(x.shape[-len(shape) :], shape, strict=True):
        require_same(mine, expected, "the last sizes of x are not normalized_shape: {} and {}")
    _check_affine(x, shape, weight=weight, bias=bias)
    return x


@layer_norm.reference
def _(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    y = x.to(wide(x.dtype))
    y = y - y.mean(axes, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + eps)
    return _scale_and_shift(y, weight, bias, normalized_shape, x.dtype)


@op(stricter=_FLOATS, dtype_policy="first")
def rms_norm(
    x: TensorType,
    weight: TensorType | None,
    axes: int | Sequence[int],
    epsilon: Number = 1e-5,
    bias: TensorType | None = None,
) -> TensorType:
    """x / sqrt(mean of x squared over `axes` + epsilon), times weight, plus bias.

    Shapes: weight and bias have x's sizes along `axes`, in order. The result has x's type.
    Source: Root Mean Square Layer Normalization (arXiv 1910.07467), eq. 4.
    """
    require_float(x)
    if weight is not None or bias is not None:
        assert isinstance(axes, tuple)
        _check_affine(x, tuple([x.shape[a] for a in axes]), weight=weight, bias=bias)
    return x


@rms_norm.normalize
def _(x: TensorType, axes: Any) -> dict[str, Any]:
    found = tuple(sorted(axes_of(axes, x.ndim, "axes")))
    require(bool(found), "axes is empty")
    return {"axes": found}


@rms_norm.reference
def _(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    axes: Sequence[int],
    epsilon: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(tuple(axes), keepdim=True) + epsilon)
    shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    return _scale_and_shift(y, weight, bias, shape, x.dtype)


@op(stricter=_FLOATS, dtype_policy="first")
def group_norm(
    x: TensorType,
    num_groups: Whole,
    weight: TensorType | None,
    bias: TensorType | None,
    eps: Number = 1e-5,
    channel_axis: Axis = 1,
    axes: Sequence[int] | None = None,
) -> TensorType:
    """Normalise each group of channels over its channels and `axes`; then times weight plus bias, one of each per channel.

    `axes` defaults to every axis but the first and the channels'. Shapes: weight and bias [channels]; the result has x's type.
    Source: Group Normalization (arXiv 1803.08494), section 3.1.
    """
    require_float(x)
    channels = x.shape[channel_axis]
    require(
        num_groups > 0 and divides(num_groups, channels) is True,
        "{} channels do not divide into {} groups",
        channels,
        num_groups,
    )
    _check_affine(x, (channels,), weight=weight, bias=bias)
    return x


@group_norm.normalize
def _(x: TensorType, channel_axis: int, axes: Any) -> dict[str, Any]:
    found = (
        tuple(a for a in range(1, x.ndim) if a != channel_axis)
        if axes is None
        else tuple(sorted(axes_of(axes, x.ndim, "axes")))
    )
    require(
        channel_axis not in found,
        "axes {} hold the channel axis {}, which is always part of a group",
        found,
        channel_axis,
    )
    return {"axes": found}


@group_norm.reference
def _(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    channel_axis: int,
    axes: Sequence[int],
) -> torch.Tensor:
    channels = x.shape[channel_axis]
    grouped = (*x.shape[:channel_axis], num_groups, channels // num_groups, *x.shape[channel_axis + 1 :])
    y = x.to(wide(x.dtype)).reshape(grouped)
    # The group axis stands before its channels.
    reduced = (channel_axis + 1, *[a if a < channel_axis else a + 1 for a in axes])
    y = y - y.mean(reduced, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(reduced, keepdim=True) + eps)
    shape = [1] * x.ndim
    shape[channel_axis] = channels
    return _scale_and_shift(y.flatten(channel_axis, channel_axis + 1), weight, bias, shape, x.dtype)
