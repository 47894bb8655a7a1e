# SPDX-License-Identifier: Apache-2.0
"""Activation functions: a float tensor to one of the same shape and dtype."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nnfront.ir.op import alike, op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import (
    broadcast_operands,
    positional,
    require,
    require_alike,
    require_float,
    require_number,
    require_same,
    wide,
)

_FLOATS = "both operands are floats, where the reference would convert"


def _activation(x: TensorType) -> TensorType:
    require_float(x)
    return x


def _of_numbers(x: TensorType) -> TensorType:
    """Also defined for integers."""
    require_number(x)
    return x


def _gated(gate: TensorType, up: TensorType) -> TensorType:
    require_float(gate, "gate")
    require_float(up, "up")
    return TensorType(*broadcast_operands(gate, up))


_rectifier = alike(_of_numbers, pointwise=True, dtype_policy="follow")
_smooth = alike(_activation, pointwise=True, dtype_policy="follow")

relu = _rectifier("relu", "max(x, 0).", torch.relu, scratch=False)
relu6 = _rectifier("relu6", "min(max(x, 0), 6).", F.relu6)
silu = _smooth("silu", "x * sigmoid(x), also called swish.", F.silu, scratch=False)
mish = _smooth("mish", "x * tanh(softplus(x)).", F.mish)
hardswish = _smooth("hardswish", "x * min(max(x + 3, 0), 6) / 6.", F.hardswish)


@op(pointwise=True, dtype_policy="follow")
def gelu(x: TensorType, approximate: str | None = None) -> TensorType:
    """x * Phi(x), Phi the normal distribution function; approximate="tanh" is the formula with tanh.

    Source: Gaussian Error Linear Units (arXiv 1606.08415), section 2.
    """
    require(approximate in (None, "tanh"), "approximate must be None or 'tanh', got {!r}", approximate)
    return _activation(x)


@gelu.reference
def _(x: torch.Tensor, approximate: str | None) -> torch.Tensor:
    return F.gelu(x, approximate=approximate or "none")


@op(pointwise=True, dtype_policy="follow", reference=F.softplus)
def softplus(x: TensorType, beta: float = 1.0, threshold: float = 20.0) -> TensorType:
    """log(1 + exp(beta x)) / beta; x itself where beta x exceeds the threshold."""
    require(beta != 0, "beta must not be 0")
    return _activation(x)


@op(pointwise=True, dtype_policy="follow", reference=positional(F.leaky_relu))
def leaky_relu(x: TensorType, alpha: float = 0.01) -> TensorType:
    """x where it is positive, alpha x elsewhere."""
    return _activation(x)


@op(pointwise=True, dtype_policy="follow", reference=F.elu)
def elu(x: TensorType, alpha: float = 1.0) -> TensorType:
    """x where it is positive, alpha (exp(x) - 1) elsewhere."""
    return _activation(x)


@op(dtype_policy="follow", reference=F.prelu)
def prelu(x: TensorType, alpha: TensorType) -> TensorType:
    """x where it is positive, alpha x elsewhere; alpha [1], or [channels] for the channels on axis 1 of x."""
    require_float(x)
    require_alike(alpha=alpha, x=x)
    require(alpha.ndim == 1, "alpha must have one axis, got {}", alpha.ndim)
    size = alpha.shape[0]
    if not (isinstance(size, int) and size == 1):
        require(x.ndim >= 2, "x has no axis 1 for the {} slopes", size)
        require_same(size, x.shape[1], "the number of slopes and of channels differ: {} and {}")
    return x


@op(pointwise=True, stricter=_FLOATS, dtype_policy="follow")
def swiglu(gate: TensorType, up: TensorType) -> TensorType:
    """silu(gate) * up, in float32 for half types, rounded once.

    Source: GLU Variants Improve Transformer (arXiv 2002.05202), eq. 6.
    """
    return _gated(gate, up)


@swiglu.reference
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(gate, up)
    return (F.silu(gate.to(wide(dtype))) * up.to(wide(dtype))).to(dtype)


@op(pointwise=True, stricter=_FLOATS, dtype_policy="follow")
def geglu(gate: TensorType, up: TensorType, approximate: str | None = None) -> TensorType:
    """gelu(gate, approximate) * up, in float32 for half types, rounded once.

    Source: GLU Variants Improve Transformer (arXiv 2002.05202), eq. 6.
    """
    require(approximate in (None, "tanh"), "approximate must be None or 'tanh', got {!r}", approximate)
    return _gated(gate, up)


@geglu.reference
def _(gate: torch.Tensor, up: torch.Tensor, approximate: str | None) -> torch.Tensor:
    dtype = torch.result_type(gate, up)
    wide_gate = F.gelu(gate.to(wide(dtype)), approximate=approximate or "none")
    return (wide_gate * up.to(wide(dtype))).to(dtype)
