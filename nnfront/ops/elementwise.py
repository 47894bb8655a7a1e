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
from nnfront.ir.op import alike, op
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


def _any_two(a: OperandType, b: OperandType) -> TensorType:
    """Any dtype but float8."""
    return TensorType(*broadcast_operands(a, b))


def _any_extremes(x1: OperandType, x2: OperandType) -> TensorType:
    return _any_two(x1, x2)


def _no_bool(a: OperandType, b: OperandType) -> TensorType:
    """Numbers only: bool with bool has no such operation."""
    shape, dtype = broadcast_operands(a, b)
    require(dtype != "bool", "not defined for bool", help="cast with astype first")
    return TensorType(shape, dtype)


def _of_reals(x: TensorType) -> TensorType:
    """Real-valued: integers and bool become float32."""
    dtype = as_float(x.dtype)
    return x if dtype == x.dtype else TensorType(x.shape, dtype)


def _of_numbers(x: TensorType) -> TensorType:
    """Any number, not bool."""
    require_number(x)
    return x


_arithmetic = alike(_any_two, pointwise=True, scratch=False, dtype_policy="follow")
_extreme = alike(_any_extremes, pointwise=True, dtype_policy="follow")
_whole = alike(_no_bool, pointwise=True, dtype_policy="follow")
_number = alike(_of_numbers, pointwise=True, dtype_policy="follow")
_real = alike(_of_reals, pointwise=True, scratch=False, dtype_policy="wide")

_NO_PRODUCTS = "no arithmetic in float8, though torch multiplies"
_NO_ABS = "torch takes the absolute value of a float8 tensor; nothing else computes in float8"

add = _arithmetic("add", "a + b; for two bool tensors their or.", operator.add)
# torch's own `-` refuses bool with a number
subtract = _whole("subtract", "a - b.", of_tensors(torch.sub), scratch=False)
multiply = _arithmetic(
    "multiply", "a * b; for two bool tensors their and.", operator.mul, stricter=_NO_PRODUCTS
)


@op(pointwise=True, scratch=False, dtype_policy="follow", reference=operator.truediv)
def divide(a: OperandType, b: OperandType) -> TensorType:
    """a / b, the true quotient: float32 for two integers."""
    shape, dtype = broadcast_operands(a, b)
    return TensorType(shape, as_float(dtype))


_QUOTIENT = "The quotient rounded towards minus infinity; integers stay integers."
_REMAINDER = "a - b * floor_divide(a, b): has the sign of b, like Python's %."
floor_divide = _whole("floor_divide", _QUOTIENT, operator.floordiv)
remainder = _whole("remainder", _REMAINDER, operator.mod)


@op(pointwise=True, dtype_policy="wide", reference=operator.pow)
def power(a: OperandType, b: OperandType) -> TensorType:
    """a to the power b. An integer to a negative integer power is refused, at run time if the exponent is a tensor."""
    result = _no_bool(a, b)
    if isinstance(b, ScalarType) and isinstance(b.value, int) and b.value < 0:
        require(
            dtypes.is_float(result.dtype),
            "an integer to the power {} is not an integer",
            b.value,
            help="cast with astype first",
        )
    return result


maximum = _extreme("maximum", "The larger of two; NaN if either is NaN.", of_tensors(torch.maximum))
minimum = _extreme("minimum", "The smaller of two; NaN if either is NaN.", of_tensors(torch.minimum))


@op(
    pointwise=True,
    stricter="at least one bound must be given, where the reference would do nothing",
    dtype_policy="follow",
)
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


negative = _number("negative", "-x.", operator.neg, scratch=False)
abs = _number("abs", "The absolute value.", torch.abs, scratch=False, stricter=_NO_ABS)
sign = _number("sign", "-1, 0 or 1.", torch.sign, stricter="torch's sign of bool is the identity")
square = _number(
    "square",
    "x * x.",
    torch.square,
    stricter="torch squares bool to int64",
    scratch=False,
    dtype_policy="wide",
)
floor = _number(
    "floor", "Round towards minus infinity; integers stay as they are.", torch.floor, scratch=False
)
ceil = _number("ceil", "Round towards infinity; integers stay as they are.", torch.ceil, scratch=False)
round = _number("round", "Round to the nearest integer, halves to the even one.", torch.round)

sqrt = _real("sqrt", "The square root; NaN below 0.", torch.sqrt)
rsqrt = _real("rsqrt", "1 / sqrt(x).", torch.rsqrt)
reciprocal = _real("reciprocal", "1 / x.", torch.reciprocal)
exp = _real("exp", "e to the power x.", torch.exp)
log = _real("log", "The natural logarithm; NaN below 0.", torch.log)
sin = _real("sin", "The sine of x in radians.", torch.sin)
cos = _real("cos", "The cosine of x in radians.", torch.cos)
tanh = _real("tanh", "The hyperbolic tangent.", torch.tanh, dtype_policy="follow")
erf = _real("erf", "The error function.", torch.erf)
sigmoid = _real("sigmoid", "1 / (1 + exp(-x)).", torch.sigmoid, dtype_policy="follow")


@op(pointwise=True, view="sometimes", moves=True, scratch=False, dtype_policy="given")
def astype(x: TensorType, dtype: Dtype) -> TensorType:
    """Cast to `dtype`. Floats become integers by dropping the fraction; NaN, infinities and values out of range become anything."""
    return TensorType(x.shape, dtype)


@astype.reference
def _(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype))
