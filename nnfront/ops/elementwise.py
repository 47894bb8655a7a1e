# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and mathematics on each element, with broadcasting.

Binary ops take tensors or Python numbers; the result's dtype is torch's: numbers and tensors without axes do not widen a
tensor of the same rung, an integer tensor times 0.5 is float32. Functions with real values turn integers and bool to float32.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from nnfront import dtypes
from nnfront.ir.op import op
from nnfront.ir.operands import OperandType
from nnfront.ir.types import ScalarType, TensorType
from nnfront.ops.rules import (
    Dtype,
    as_float,
    as_tensor,
    broadcast_operands,
    of_tensors,
    require,
    require_number,
)


def _arithmetic(a: OperandType, b: OperandType) -> TensorType:
    """Any dtype but float8."""
    return TensorType(*broadcast_operands(a, b))


def _no_bool(a: OperandType, b: OperandType) -> TensorType:
    """Numbers only: bool with bool has no such operation."""
    shape, dtype = broadcast_operands(a, b)
    require(dtype != "bool", "not defined for bool", help="cast with astype first")
    return TensorType(shape, dtype)


def _real(x: TensorType) -> TensorType:
    """Real-valued: integers and bool become float32."""
    dtype = as_float(x.dtype)
    return x if dtype == x.dtype else TensorType(x.shape, dtype)


def _number(x: TensorType) -> TensorType:
    """Any number, not bool."""
    require_number(x)
    return x


@op(scratch=False, dtype_policy="follow", reference=operator.add)
def add(a: OperandType, b: OperandType) -> TensorType:
    """a + b; for two bool tensors their or."""
    return _arithmetic(a, b)


# torch's own `-` refuses bool with a number
@op(scratch=False, dtype_policy="follow", reference=of_tensors(torch.sub))
def subtract(a: OperandType, b: OperandType) -> TensorType:
    """a - b."""
    return _no_bool(a, b)


@op(
    stricter="no arithmetic in float8, though torch multiplies",
    scratch=False,
    dtype_policy="follow",
    reference=operator.mul,
)
def multiply(a: OperandType, b: OperandType) -> TensorType:
    """a * b; for two bool tensors their and."""
    return _arithmetic(a, b)


@op(scratch=False, dtype_policy="follow", reference=operator.truediv)
def divide(a: OperandType, b: OperandType) -> TensorType:
    """a / b, the true quotient: float32 for two integers."""
    shape, dtype = broadcast_operands(a, b)
    return TensorType(shape, as_float(dtype))


@op(dtype_policy="follow", reference=operator.floordiv)
def floor_divide(a: OperandType, b: OperandType) -> TensorType:
    """The quotient rounded towards minus infinity; integers stay integers."""
    return _no_bool(a, b)


@op(dtype_policy="follow", reference=operator.mod)
def remainder(a: OperandType, b: OperandType) -> TensorType:
    """a - b * floor_divide(a, b): has the sign of b, like Python's %."""
    return _no_bool(a, b)


@op(dtype_policy="wide", reference=operator.pow)
def power(a: OperandType, b: OperandType) -> TensorType:
    """a to the power b. An integer to a negative integer power is refused, at run time if the exponent is a tensor."""
    shape, dtype = broadcast_operands(a, b)
    require(dtype != "bool", "not defined for bool", help="cast with astype first")
    if isinstance(b, ScalarType) and isinstance(b.value, int) and b.value < 0:
        require(
            dtypes.is_float(dtype),
            "an integer to the power {} is not an integer",
            b.value,
            help="cast with astype first",
        )
    return TensorType(shape, dtype)


@op(dtype_policy="follow", reference=of_tensors(torch.maximum))
def maximum(x1: OperandType, x2: OperandType) -> TensorType:
    """The larger of two; NaN if either is NaN."""
    return _arithmetic(x1, x2)


@op(dtype_policy="follow", reference=of_tensors(torch.minimum))
def minimum(x1: OperandType, x2: OperandType) -> TensorType:
    """The smaller of two; NaN if either is NaN."""
    return _arithmetic(x1, x2)


@op(stricter="at least one bound must be given, where the reference would do nothing", dtype_policy="follow")
def clip(x: TensorType, min: OperandType | None = None, max: OperandType | None = None) -> TensorType:
    """minimum(maximum(x, min), max): limit x to [min, max]. An absent bound does not limit."""
    require(min is not None or max is not None, "give min, max or both")
    for bound in (min, max):
        if bound is not None:
            x = _no_bool(x, bound)
    return x


@clip.reference
def _(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    if min is not None:
        x = torch.maximum(as_tensor(x, min), as_tensor(min, x))
    return x if max is None else torch.minimum(as_tensor(x, max), as_tensor(max, x))


@op(scratch=False, dtype_policy="follow", reference=operator.neg)
def negative(x: TensorType) -> TensorType:
    """-x."""
    return _number(x)


@op(
    stricter="torch takes the absolute value of a float8 tensor; nothing else computes in float8",
    scratch=False,
    dtype_policy="follow",
    reference=torch.abs,
)
def abs(x: TensorType) -> TensorType:
    """The absolute value."""
    return _number(x)


@op(stricter="torch's sign of bool is the identity", dtype_policy="follow", reference=torch.sign)
def sign(x: TensorType) -> TensorType:
    """-1, 0 or 1."""
    return _number(x)


@op(stricter="torch squares bool to int64", scratch=False, dtype_policy="wide", reference=torch.square)
def square(x: TensorType) -> TensorType:
    """x * x."""
    return _number(x)


@op(scratch=False, dtype_policy="follow", reference=torch.floor)
def floor(x: TensorType) -> TensorType:
    """Round towards minus infinity; integers stay as they are."""
    return _number(x)


@op(scratch=False, dtype_policy="follow", reference=torch.ceil)
def ceil(x: TensorType) -> TensorType:
    """Round towards infinity; integers stay as they are."""
    return _number(x)


@op(dtype_policy="follow", reference=torch.round)
def round(x: TensorType) -> TensorType:
    """Round to the nearest integer, halves to the even one."""
    return _number(x)


@op(scratch=False, dtype_policy="wide", reference=torch.sqrt)
def sqrt(x: TensorType) -> TensorType:
    """The square root; NaN below 0."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.rsqrt)
def rsqrt(x: TensorType) -> TensorType:
    """1 / sqrt(x)."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.reciprocal)
def reciprocal(x: TensorType) -> TensorType:
    """1 / x."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.exp)
def exp(x: TensorType) -> TensorType:
    """e to the power x."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.log)
def log(x: TensorType) -> TensorType:
    """The natural logarithm; NaN below 0."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.sin)
def sin(x: TensorType) -> TensorType:
    """The sine of x in radians."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.cos)
def cos(x: TensorType) -> TensorType:
    """The cosine of x in radians."""
    return _real(x)


@op(scratch=False, dtype_policy="follow", reference=torch.tanh)
def tanh(x: TensorType) -> TensorType:
    """The hyperbolic tangent."""
    return _real(x)


@op(scratch=False, dtype_policy="wide", reference=torch.erf)
def erf(x: TensorType) -> TensorType:
    """The error function."""
    return _real(x)


@op(scratch=False, dtype_policy="follow", reference=torch.sigmoid)
def sigmoid(x: TensorType) -> TensorType:
    """1 / (1 + exp(-x))."""
    return _real(x)


@op(view="sometimes", moves=True, scratch=False, dtype_policy="given")
def astype(x: TensorType, dtype: Dtype) -> TensorType:
    """Cast to `dtype`. Floats become integers by dropping the fraction; NaN, infinities and values out of range become anything."""
    return TensorType(x.shape, dtype)


@astype.reference
def _(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype))
