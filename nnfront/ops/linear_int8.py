# SPDX-License-Identifier: Apache-2.0
"""Products of integers: a quantised weight with activations that are rounded to 8 bits as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.dims import Size, product
from nnfront.ir.op import op
from nnfront.ir.types import TensorType, Type
from nnfront.ops.matmul import linear
from nnfront.ops.quant import dequantize, quantize, unpack_int4
from nnfront.ops.quant_blocks import dequantize_blocks
from nnfront.ops.rules import require, require_float, wide
from nnfront.quant_format import BLOCK_FORMATS, FORMATS

TAKEN = ("int8", "int4", "uint4", *BLOCK_FORMATS)
"""Formats whose elements are integers times a scale, less a zero point or a minimum in those from 0."""


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of the weight, for each row."""
    return product([2, *operands[0].shape, operands[1].shape[0]])


@op(stricter="sizes do not broadcast", flops=_flops)
def linear_int8(
    x: TensorType,
    weight: TensorType,
    scales: TensorType | None = None,
    zero_points: TensorType | None = None,
    bias: TensorType | None = None,
    format: str = "int8",
    group_size: int | None = None,
) -> TensorType:
    """x, each row rounded to 8 bits, times the transpose of a weight in integers, plus the bias.

    A row stands for integers from -127 to 127 times max|row| / 127, as `quantize` makes them; sums are of integers.
    Shapes: x [..., in]; weight int8 [out, in] of the format int8, uint8 [out, in / 2] as `pack_int4` stores it of int4 and uint4; scales [out, groups], one for
    `group_size` inputs (None: all), of x's type or float32; zero_points uint8 [out, groups], of uint4 alone; bias [out]; result [..., out] of x's type.
    Of q4_k, q5_k and q6_k the weight is uint8 [out, bytes], blocks as `quantize_blocks` stores them, with all of their scales.
    """
    require(format in TAKEN, "format must be one of {}, got {!r}", ", ".join(TAKEN), format)
    require_float(x, "x")
    require(weight.ndim == 2, "weight must have two axes [out, in], got {}", weight.ndim)
    require(
        weight.dtype == ("int8" if format == "int8" else "uint8"), "weight of {} is {}", format, weight.dtype
    )
    known = FORMATS[format]
    beside = "" if known.block is None else " beside its blocks"
    for name, part in (("scales", scales), ("zero_points", zero_points)):
        has = "has" if name in known.parts else "has no"
        require((part is None) == (name not in known.parts), "{} {} {}{}", format, has, name, beside)
    if scales is None:
        require(group_size is None, "{} has groups of its own, got a group_size of {}", format, group_size)
        dense = dequantize_blocks.infer(weight, format)
    else:
        require(scales.dtype in (x.dtype, "float32"), "scales are {}, x is {}", scales.dtype, x.dtype)
        stored: Type = weight
        if known.packing is not None:
            stored = unpack_int4.infer(weight, axis=1, signed=format == "int4")
        usual = dequantize.full_attrs({"group_size": group_size, "axis": 1})
        given = dequantize.canonical_attrs([stored, scales, zero_points], usual)
        dense = dequantize.infer(stored, scales, zero_points, **given)
    assert isinstance(dense, TensorType)
    result = linear.infer(x, TensorType(dense.shape, x.dtype), bias)
    assert isinstance(result, TensorType)
    return result


@linear_int8.reference
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    group_size: int | None,
) -> torch.Tensor:
    compute = wide(x.dtype)
    name = str(compute).removeprefix("torch.")
    if scales is None:
        dense = dequantize_blocks.run((weight,), {"format": format, "dtype": name})
    else:
        if FORMATS[format].packing is not None:
            weight = unpack_int4.run((weight,), {"axis": 1, "signed": format == "int4"})
        usual = {"group_size": group_size, "axis": 1, "dtype": name, "format": None}
        dense = dequantize.run((weight, scales, zero_points), usual)
    if not x.shape[-1]:
        rounded = x.to(compute)
    else:
        rows = x.reshape(-1, x.shape[-1]).to(compute)
        attrs = quantize.full_attrs({"bits": 8, "axis": 1})
        q, each = quantize.run((rows,), attrs)
        rounded = (q.to(compute) * each).view(x.shape)
    return F.linear(rounded, dense, None if bias is None else bias.to(compute)).to(x.dtype)
