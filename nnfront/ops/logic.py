# SPDX-License-Identifier: Apache-2.0
"""Comparisons, logic, bits and choice."""

from __future__ import annotations

import operator
from typing import Any

import torch

from nnfront import dtypes
from nnfront.ir.op import alike, op
from nnfront.ir.operands import OperandType
from nnfront.ir.types import TensorType
from nnfront.ops.rules import FLOAT8, broadcast, broadcast_operands, require, result_dtype


def _compare(a: OperandType, b: OperandType) -> TensorType:
    """bool, after promotion of both sides."""
    return TensorType(broadcast_operands(a, b)[0], "bool")


def _logical_two(a: TensorType, b: TensorType) -> TensorType:
    """bool, of tensors of any dtypes: nonzero is true."""
    for x in (a, b):
        require(x.dtype not in FLOAT8, "no logic in {}", x.dtype, help="cast with astype first")
    return TensorType(broadcast(a.shape, b.shape), "bool")


def _bits_of_two(a: OperandType, b: OperandType) -> TensorType:
    """Integers or bool."""
    shape, dtype = broadcast_operands(a, b)
    require(
        not dtypes.is_float(dtype), "bits of {} are not for arithmetic", dtype, help="cast with astype first"
    )
    return TensorType(shape, dtype)


def _shifted(a: OperandType, b: OperandType) -> TensorType:
    """Integers."""
    shape, dtype = broadcast_operands(a, b)
    require(dtypes.is_integer(dtype), "only integers shift, got {}", dtype, help="cast with astype first")
    return TensorType(shape, dtype)


def _logical_one(x: TensorType) -> TensorType:
    return _logical_two(x, x)


def _bits_of_one(x: TensorType) -> TensorType:
    return _bits_of_two(x, x)


_comparison = alike(_compare, pointwise=True, scratch=False, dtype_policy="follow")
_logical = alike(_logical_two, pointwise=True, stricter="no logic in float8, of which torch has some")
_bits, _shift = alike(_bits_of_two, pointwise=True), alike(_shifted, pointwise=True)

_NO_FLOAT8 = "torch compares float8 for equality; nothing else computes in float8"
less = _comparison("less", "a < b.", operator.lt)
less_equal = _comparison("less_equal", "a <= b.", operator.le)
greater = _comparison("greater", "a > b.", operator.gt)
greater_equal = _comparison("greater_equal", "a >= b.", operator.ge)
equal = _comparison("equal", "a == b, elementwise.", operator.eq, stricter=_NO_FLOAT8)
not_equal = _comparison("not_equal", "a != b, elementwise.", operator.ne, stricter=_NO_FLOAT8)

logical_and = _logical("logical_and", "Whether both are nonzero.", torch.logical_and)
logical_or = _logical("logical_or", "Whether at least one is nonzero.", torch.logical_or)
logical_xor = _logical("logical_xor", "Whether exactly one is nonzero.", torch.logical_xor)
logical_not = alike(_logical_one, pointwise=True)("logical_not", "Whether x is zero.", torch.logical_not)

_INVERTED = "Every bit inverted; for bool its negation."
_LEFT = "a * 2**b, bits beyond the dtype dropped; b must be in [0, bits of the dtype)."
_RIGHT = "a shifted right by b bits, the sign kept; b must be in [0, bits of the dtype)."
bitwise_and = _bits("bitwise_and", "The bits that both have.", operator.and_)
bitwise_or = _bits("bitwise_or", "The bits that at least one has.", operator.or_)
bitwise_xor = _bits("bitwise_xor", "The bits that exactly one has.", operator.xor)
bitwise_not = alike(_bits_of_one, pointwise=True)("bitwise_not", _INVERTED, torch.bitwise_not)
left_shift = _shift("left_shift", _LEFT, operator.lshift)
right_shift = _shift("right_shift", _RIGHT, operator.rshift)


@op(pointwise=True, moves=True, dtype_policy="follow")
def where(condition: TensorType, x1: OperandType, x2: OperandType) -> TensorType:
    """x1 where the condition is nonzero, else x2; all three broadcast."""
    shape = condition.shape
    for x in (x1, x2):
        if isinstance(x, TensorType):
            shape = broadcast(shape, x.shape)
    return TensorType(shape, result_dtype(x1, x2))


@where.reference
def _(condition: torch.Tensor, x1: Any, x2: Any) -> torch.Tensor:
    return torch.where(condition.bool(), x1, x2)
