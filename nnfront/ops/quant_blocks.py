# SPDX-License-Identifier: Apache-2.0
"""Quantised numbers that lie in blocks of bytes with their scales, and these again as integers: a tensor for all of it, where `quantize` gives several."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import torch

from nnfront.dims import Size
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.block_rounding import in_blocks, out_of_blocks
from nnfront.ops.rules import dtype_name, known_format, require, require_float
from nnfront.quant_format import BLOCK_FORMATS, FORMATS


def _float_dtype(dtype: Any) -> str:
    name = dtype_name(dtype)
    require_float(TensorType((), name), "the result")
    return name


BlockFormat: TypeAlias = Annotated[str, lambda name, *_: known_format(name, BLOCK_FORMATS).name]
FloatDtype: TypeAlias = Annotated[str, lambda dtype, *_: _float_dtype(dtype)]


@op(stricter="x holds floats, where the reference would convert", rowwise=True)
def quantize_blocks(x: TensorType, format: BlockFormat) -> TensorType:
    """Store neighbours along the last axis in blocks of bytes, in a format of `nnfront.quant_format` that has such: q4_k, q5_k or q6_k.

    Shapes: x [..., n], n a multiple of 128; result uint8 [..., bytes]. A block is 256 neighbours, the last one may be 128.
    q4_k, q5_k: x is approximately d * scale * q - dmin * minimum, q of 4 or 5 bits from 0, scale and minimum integers of 6 bits for 32 neighbours, d and dmin float16 for the block.
    q6_k: x is approximately d * scale * q, q from -32 to 31, scale an int8 for 16 neighbours. Of the scales that are tried it is those of the least squared error. A block that
    holds NaN or an infinity becomes NaN.
    """
    require_float(x)
    known = known_format(format, BLOCK_FORMATS)
    require(x.ndim > 0, "x has no axes")
    size = x.shape[-1]
    assert known.block is not None
    half = known.block.numbers // 2
    require(
        isinstance(size, int) and size % half == 0,
        "the last axis of size {} does not divide into {}",
        size,
        half,
    )
    assert isinstance(size, int)
    return TensorType((*x.shape[:-1], known.block.row_bytes(size)), "uint8")


@quantize_blocks.reference
def _(x: torch.Tensor, format: str) -> torch.Tensor:
    return in_blocks(x, FORMATS[format])


@op(rowwise=True)
def dequantize_blocks(q: TensorType, format: BlockFormat, dtype: FloatDtype = "float32") -> TensorType:
    """Undo quantize_blocks: uint8 [..., bytes] gives [..., n] of type `dtype`, computed in float32, then rounded."""
    known = known_format(format, BLOCK_FORMATS)
    require(q.dtype == "uint8", "q must be uint8, got {}", q.dtype)
    require(q.ndim > 0, "q has no axes")
    size, columns = q.shape[-1], None
    assert known.block is not None
    if isinstance(size, int):
        columns = known.block.columns(size)
    require(
        columns is not None,
        "the last axis of size {} is no blocks of {} bytes, the last one {} or {}",
        size,
        known.block.bytes,
        known.block.half,
        known.block.bytes,
    )
    shape: tuple[Size, ...] = (*q.shape[:-1], columns or 0)
    return TensorType(shape, dtype)


@dequantize_blocks.reference
def _(q: torch.Tensor, format: str, dtype: str) -> torch.Tensor:
    return out_of_blocks(q, FORMATS[format]).to(getattr(torch, dtype))
