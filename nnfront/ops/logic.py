# SPDX-License-Identifier: Apache-2.0
"""Comparisons, logic, bits and choice."""

from __future__ import annotations

import operator
from typing import Any

import torch

from nnfront import dtypes
from nnfront.ir.op import op
from nnfront.ir.operands import OperandType
from nnfront.ir.types import TensorType
from nnfront.ops.rules import FLOAT8, broadcast, broadcast_operands, require, result_dtype

_FLOAT8 = "no logic in float8, of which torch has some"


def _compare(a: OperandType, b: OperandType) -> TensorType:
    """bool, after promotion of both sides."""
    return TensorType(broadcast_operands(a, b)[0], "bool")


def _logical(a: TensorType, b: TensorType) -> TensorType:
    """bool, of tensors of any dtypes: nonzero is true."""
    for x in (a, b):
        require(x.dtype not in FLOAT8, "no logic in {}", x.dtype, help="cast with astype first")
    return TensorType(broadcast(a.shape, b.shape), "bool")


def _bits(a: OperandType, b: OperandType) -> TensorType:
    """Integers or bool."""
    shape, dtype = broadcast_operands(a, b)
    require(
        not dtypes.is_float(dtype), "bits of {} are not for arithmetic", dtype, help="cast with astype first"
    )
    return TensorType(shape, dtype)


def _shift(a: OperandType, b: OperandType) -> TensorType:
    """Integers."""
    shape, dtype = broadcast_operands(a, b)
    require(dtypes.is_integer(dtype), "only integers shift, got {}", dtype, help="cast with astype first")
    return TensorType(shape, dtype)


@op(scratch=False, dtype_policy="follow", reference=operator.lt)
def less(a: OperandType, b: OperandType) -> TensorType:
    """a < b."""
    return _compare(a, b)


@op(scratch=False, dtype_policy="follow", reference=operator.le)
def less_equal(a: OperandType, b: OperandType) -> TensorType:
    """a <= b."""
    return _compare(a, b)


@op(scratch=False, dtype_policy="follow", reference=operator.gt)
def greater(a: OperandType, b: OperandType) -> TensorType:
    """a > b."""
    return _compare(a, b)


@op(scratch=False, dtype_policy="follow", reference=operator.ge)
def greater_equal(a: OperandType, b: OperandType) -> TensorType:
    """a >= b."""
    return _compare(a, b)


@op(
    stricter="torch compares float8 for equality; nothing else computes in float8",
    scratch=False,
    dtype_policy="follow",
    reference=operator.eq,
)
def equal(a: OperandType, b: OperandType) -> TensorType:
    """a == b, elementwise."""
    return _compare(a, b)


@op(
    stricter="torch compares float8 for equality; nothing else computes in float8",
    scratch=False,
    dtype_policy="follow",
    reference=operator.ne,
)
def not_equal(a: OperandType, b: OperandType) -> TensorType:
    """a != b, elementwise."""
    return _compare(a, b)


@op(stricter=_FLOAT8, reference=torch.logical_and)
def logical_and(a: TensorType, b: TensorType) -> TensorType:
    """Whether both are nonzero."""
    return _logical(a, b)


@op(stricter=_FLOAT8, reference=torch.logical_or)
def logical_or(a: TensorType, b: TensorType) -> TensorType:
    """Whether at least one is nonzero."""
    return _logical(a, b)


@op(stricter=_FLOAT8, reference=torch.logical_xor)
def logical_xor(a: TensorType, b: TensorType) -> TensorType:
    """Whether exactly one is nonzero."""
    return _logical(a, b)


@op(reference=torch.logical_not)
def logical_not(x: TensorType) -> TensorType:
    """Whether x is zero."""
    return _logical(x, x)


@op(reference=operator.and_)
def bitwise_and(a: OperandType, b: OperandType) -> TensorType:
    """The bits that both have."""
    return _bits(a, b)


@op(reference=operator.or_)
def bitwise_or(a: OperandType, b: OperandType) -> TensorType:
    """The bits that at least one has."""
    return _bits(a, b)


@op(reference=operator.xor)
def bitwise_xor(a: OperandType, b: OperandType) -> TensorType:
    """The bits that exactly one has."""
    return _bits(a, b)


@op(reference=torch.bitwise_not)
def bitwise_not(x: TensorType) -> TensorType:
    """Every bit inverted; for bool its negation."""
    return _bits(x, x)


@op(reference=operator.lshift)
def left_shift(a: OperandType, b: OperandType) -> TensorType:
    """a * 2**b, bits beyond the dtype dropped; b must be in [0, bits of the dtype)."""
    return _shift(a, b)


@op(reference=operator.rshift)
def right_shift(a: OperandType, b: OperandType) -> TensorType:
    """a shifted right by b bits, the sign kept; b must be in [0, bits of the dtype)."""
    return _shift(a, b)


@op(moves=True, dtype_policy="follow")
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
