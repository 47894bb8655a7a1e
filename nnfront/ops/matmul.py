# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: matmul, linear, einsum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from nnfront import dtypes
from nnfront.dims import Size, product, same
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import OtherDtype, broadcast, require, require_number, require_same


def _product_dtype(a: TensorType, b: TensorType, out_dtype: str | None) -> str:
    """Return the dtype of a product of two tensors of one dtype."""
    require(
        a.dtype == b.dtype, "dtypes differ: {} and {}", a.dtype, b.dtype, help="cast one of them with astype"
    )
    if out_dtype is None:
        require_number(a, "the operands")
        return a.dtype
    require(a.dtype != "bool" and out_dtype != "bool", "not defined for bool", help="cast with astype first")
    dtypes.check(out_dtype)
    return out_dtype


def _widened(dtype: torch.dtype, out_dtype: str) -> torch.dtype:
    """Return the dtype to compute in when the result is to have another one: no narrower than either."""
    out: torch.dtype = getattr(torch, out_dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    wide = torch.promote_types(dtype, out) if out.itemsize > 1 else torch.promote_types(dtype, torch.int32)
    return torch.float32 if wide in (torch.float16, torch.bfloat16) else wide


_TRANSPOSED = "b looks like [out, in]: use linear(a, b), or matmul(a, permute_dims(b))"
_NUMBERS = "bool and float8 have no products, though torch computes some"
_ROW_AND_COLUMN = "inner sizes differ: a has {} (axis -1), b has {} (axis 0)"
_ROW_AND_MATRIX = "inner sizes differ: a has {} (axis -1), b has {} (axis -2)"


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of the result and each element of the axis that is summed over."""
    return product([2, operands[0].shape[-1], *results[0].shape])


@op(stricter=_NUMBERS, flops=_flops, dtype_policy="compute")
def matmul(a: TensorType, b: TensorType, out_dtype: OtherDtype | None = None) -> TensorType:
    """Multiply matrices, or vectors with them; axes before the last two broadcast.

    Shapes: a [..., m, k], b [..., k, n], result [..., m, n]. An a [k] or b [k] is a row or column whose axis the result lacks.
    Both have one dtype; `out_dtype` is the result's, and then products are also summed in a dtype no narrower than it.
    """
    dtype = _product_dtype(a, b, out_dtype)
    left, right = a.shape, b.shape
    require(bool(left) and bool(right), "a tensor without axes is no matrix", help="use multiply")
    row, column = len(left) == 1, len(right) == 1
    inner = right[0] if column else right[-2]
    if not column and not same(left[-1], inner) and same(left[-1], right[-1]):
        raise InferError(_ROW_AND_MATRIX.format(left[-1], inner), help=_TRANSPOSED)
    require_same(left[-1], inner, _ROW_AND_COLUMN if column else _ROW_AND_MATRIX)
    batch = broadcast(left[:-2], right[:-2])
    result = batch if row else (*batch, left[-2])
    return TensorType(result if column else (*result, right[-1]), dtype)


@matmul.reference
def _(a: torch.Tensor, b: torch.Tensor, out_dtype: str | None) -> torch.Tensor:
    if out_dtype is None:
        return torch.matmul(a, b)
    compute = _widened(a.dtype, out_dtype)
    return torch.matmul(a.to(compute), b.to(compute)).to(getattr(torch, out_dtype))


@op(stricter=_NUMBERS, scratch=False, flops=_flops, dtype_policy="compute")
def linear(
    x: TensorType, weight: TensorType, bias: TensorType | None = None, out_dtype: OtherDtype | None = None
) -> TensorType:
    """x times the transpose of the weight, plus the bias.

    Shapes: x [..., in], weight [out, in], bias [out], result [..., out]. The bias has the result's dtype.
    """
    dtype = _product_dtype(x, weight, out_dtype)
    require(weight.ndim == 2, "weight must have two axes [out, in], got {}", weight.ndim)
    require(bool(x.shape), "x has no axes")
    require_same(
        x.shape[-1], weight.shape[1], "inner sizes differ: x has {} (axis -1), weight has {} (axis 1)"
    )
    if bias is not None:
        require(bias.ndim == 1, "bias must have one axis [out], got {}", bias.ndim)
        require_same(bias.shape[0], weight.shape[0], "bias has {} elements, weight has {} rows")
        require(
            bias.dtype == dtype, "bias is {}, the result is {}", bias.dtype, dtype, help="cast it with astype"
        )
    return TensorType((*x.shape[:-1], weight.shape[0]), dtype)


@linear.reference
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: str | None
) -> torch.Tensor:
    if out_dtype is None:
        return F.linear(x, weight, bias)
    compute = _widened(x.dtype, out_dtype)
    result = F.linear(x.to(compute), weight.to(compute)).to(getattr(torch, out_dtype))
    return result if bias is None else result + bias


def _einsum_flops(
    operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]
) -> Size:
    """For each combination of letters a product of all operands, and a sum if a letter is summed over."""
    terms, result = _parse(attrs["subscripts"])
    sizes = {
        letter: size
        for term, x in zip(terms, operands, strict=True)
        for letter, size in zip(term, x.shape, strict=True)
    }
    each = len(terms) - 1 + (len(sizes) > len(result))
    return product([each, *sizes.values()])


@op(
    stricter="sizes of 1 do not broadcast, and there is no ellipsis: every axis has its letter",
    view="sometimes",
    flops=_einsum_flops,
    dtype_policy="compute",
)
def einsum(subscripts: str, *operands: TensorType) -> TensorType:
    """Sum products over named axes: `einsum("bshd,bthd->bhst", q, k)`.

    Each letter names an axis; letters that the result lacks are summed over. Without `->` the result has the letters that
    occur once, in alphabetical order. All operands have one dtype.
    """
    terms, result = _parse(subscripts)
    require(len(terms) == len(operands), "{} operands for {} subscripts", len(operands), len(terms))
    sizes: dict[str, Size] = {}
    for i, (term, x) in enumerate(zip(terms, operands, strict=True)):
        require(len(term) == x.ndim, "operand {} has {} axes, its subscripts are {!r}", i, x.ndim, term)
        require(
            x.dtype == operands[0].dtype,
            "dtypes differ: {} and {}",
            operands[0].dtype,
            x.dtype,
            help="cast with astype",
        )
        require_number(x, "every operand")
        for letter, size in zip(term, x.shape, strict=True):
            require_same(sizes.setdefault(letter, size), size, f"axis {letter!r} has sizes {{}} and {{}}")
    for letter in result:
        require(letter in sizes, "the result's axis {!r} is in no operand", letter)
    return TensorType(tuple([sizes[letter] for letter in result]), operands[0].dtype)


@einsum.normalize
def _(subscripts: str) -> dict[str, Any]:
    terms, result = _parse(subscripts)
    return {"subscripts": ",".join(terms) + "->" + result}


@einsum.reference
def _(subscripts: str, *operands: torch.Tensor) -> torch.Tensor:
    dtype = operands[0].dtype
    if dtype.is_floating_point:
        return torch.einsum(subscripts, *operands)
    # Torch sums some integers as int64.
    return torch.einsum(subscripts, *[x.long() for x in operands]).to(dtype)


def _parse(subscripts: str) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result."""
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = "".join(terms)
    require(
        (bool(letters + result) and (letters + result).isalpha()) or not letters,
        "cannot read the subscripts {!r}",
        subscripts,
        help="write each axis as one letter",
    )
    if not arrow:
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    require(len(set(result)) == len(result), "the result names an axis twice: {!r}", result)
    return terms, result
