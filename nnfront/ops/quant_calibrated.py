# SPDX-License-Identifier: Apache-2.0
"""Quantised weights, rounded by what they are multiplied with: `quantize` and `quantize_blocks` with the moments of the inputs as one operand more."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from nnfront.ir.op import op
from nnfront.ir.types import TensorType, Type
from nnfront.ops.block_rounding import scales_in, with_numbers
from nnfront.ops.error_feedback import PIECE, ErrorFeedback, scratch_bytes
from nnfront.ops.quant import quantize
from nnfront.ops.quant_blocks import quantize_blocks
from nnfront.ops.rounding import by_rows, integers, looked_up, nearest
from nnfront.ops.rules import FLOAT8, known_format, require, require_float, require_same
from nnfront.quant_format import FORMATS, QuantFormat


@op(stricter="x holds floats, where the reference would convert", holds=scratch_bytes)
def quantize_calibrated(
    x: TensorType,
    moments: TensorType,
    format: str,
    group_size: int | None = None,
    scales: TensorType | None = None,
) -> Type:
    """Store a weight in a format of `nnfront.quant_format`, rounded so that its products with inputs like those of the moments are near what they were (GPTQ).

    Shapes: x [..., n], moments float32 [n / m, m, m]: of each m neighbouring inputs the sums of their products with each other, as `input_moments` gives them.
    The results and the scales are those of `quantize` with `fit`, or of `quantize_blocks`; integers are chosen one input after the other, those of large inputs first, each making up
    for what the ones before it have added to the product. A block of moments that are those of no inputs (not finite, or not positive definite) changes nothing.
    scales: float32 [..., groups], of a float of 8 bits, which outputs may share: the result is what is stored under these, a tensor of x's shape.
    """
    require_float(x)
    require(x.ndim > 1, "x has {} axes, expected rows", x.ndim)
    require(
        moments.dtype == "float32" and moments.ndim == 3,
        "moments must be float32 with 3 axes, got {}",
        moments,
    )
    blocks, size, again = moments.shape
    inputs = x.shape[-1]
    require(
        isinstance(inputs, int) and isinstance(blocks, int) and isinstance(size, int) and size == again and blocks * size == inputs > 0,
        "moments of sizes {} are not those of {} inputs",
        list(moments.shape),
        inputs,
    )  # fmt: skip
    if scales is not None:
        require(
            scales.dtype == "float32" and scales.ndim == x.ndim,
            "scales must be float32 with {} axes, got {}",
            x.ndim,
            scales,
        )
        for size, of_x in zip(scales.shape[:-1], x.shape[:-1], strict=True):
            require_same(size, of_x, "x is {} and its scales are {}", x, scales)
        groups = scales.shape[-1]
        require(
            isinstance(groups, int) and 0 < groups and inputs % groups == 0,
            "{} inputs do not divide into {} groups",
            inputs,
            groups,
        )
        require(
            known_format(format).dtype in FLOAT8, "scales are given for floats of 8 bits, not for {}", format
        )
        return TensorType(x.shape, known_format(format).dtype)
    if known_format(format).block is not None:
        return quantize_blocks.infer(x, format=format)
    return quantize.infer(x, **_attrs(x, known_format(format), group_size))


@quantize_calibrated.normalize
def _(x: TensorType, format: Any, group_size: Any) -> dict[str, Any]:
    known = known_format(format)
    if known.block is not None:
        require(group_size is None, "{} has groups of its own: leave group_size out", format)
        return {"format": format, "group_size": None}
    return {"format": format, "group_size": _attrs(x, known, group_size)["group_size"]}


def _attrs(x: TensorType, format: QuantFormat, group_size: int | None) -> dict[str, Any]:
    """The attributes of `quantize`."""
    fit = replace(format, group_size=group_size or format.group_size).fit
    given = {"group_size": group_size, "axis": x.ndim - 1, "format": format.name, "fit": fit}
    return quantize.full_attrs(quantize.canonical_attrs([x], given))


@quantize_calibrated.reference
def _(
    x: torch.Tensor,
    moments: torch.Tensor,
    format: str,
    group_size: int | None,
    scales: torch.Tensor | None = None,
) -> Any:
    known, feedback = FORMATS[format], ErrorFeedback.of(moments)
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    if scales is not None:
        given = scales.reshape(len(rows), scales.shape[-1])
        (q,) = by_rows(lambda part, its: (_in_floats(part, feedback, known, its),), PIECE, rows, given)
        return q.view(x.shape)
    if known.block is not None:
        (blocks,) = by_rows(lambda part: (_in_blocks(part, feedback, known),), PIECE, rows)
        return blocks.view(*x.shape[:-1], blocks.shape[-1])
    type = TensorType(tuple(rows.shape), str(x.dtype).removeprefix("torch."))
    attrs = _attrs(type, known, group_size)
    found = by_rows(lambda part: _in_parts(part, feedback, known, attrs), PIECE, rows)
    return tuple(part.view(*x.shape[:-1], part.shape[-1]) for part in found)


def _in_blocks(rows: torch.Tensor, feedback: ErrorFeedback, format: QuantFormat) -> torch.Tensor:
    blocks = quantize_blocks.run((rows,), {"format": format.name})
    half = 2 ** (format.bits - 1) if format.symmetric else 0
    ends = (-half, 2**format.bits - 1 - half)
    scale, minimum = scales_in(blocks, format)
    wanted = feedback.compensated(rows, _between(ends), scale, minimum)
    return with_numbers(blocks, _placed(wanted, scale, minimum, ends) + half, format)


def _in_parts(
    rows: torch.Tensor, feedback: ErrorFeedback, format: QuantFormat, attrs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    q, stored, *others = quantize.run((rows,), attrs)

    scale = looked_up(stored, format.scale_values, torch.float32) if format.scale_values else stored.float()
    if format.values or format.dtype in FLOAT8:
        scale = scale * others[0] if format.has_factor else scale
        return _in_floats(rows, feedback, format, scale), stored, *others
    half = 2 ** (format.bits - 1) if format.symmetric else 0
    ends = (-half if attrs["fit"] or not half else 1 - half, 2**format.bits - 1 - half)
    minimum = _of_each(torch.zeros_like(scale) if format.symmetric else others[0] * scale, rows)
    scale = _of_each(scale, rows)
    wanted = feedback.compensated(rows, _between(ends), scale, minimum)
    return integers(_placed(wanted, scale, minimum, ends), *ends, q.dtype), stored, *others


def _in_floats(
    rows: torch.Tensor, feedback: ErrorFeedback, format: QuantFormat, scale: torch.Tensor
) -> torch.Tensor:
    scale = _of_each(scale, rows)
    return _float_places(format, feedback.compensated(rows, _of_floats(format), scale) / scale)


def _of_each(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What is said of groups, for each number of the rows."""
    return x.repeat_interleave(rows.shape[1] // x.shape[1], 1)


def _placed(
    y: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, ends: tuple[int, int]
) -> torch.Tensor:
    """The integers of which scale * q - minimum is nearest to y."""
    return ((y + minimum) / torch.where(scale == 0, 1, scale)).round_().clamp_(*ends)


def _between(ends: tuple[int, int]) -> Any:
    def found(y: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        return _placed(y, scale, minimum, ends).mul_(scale).sub_(minimum)

    return found


def _of_floats(format: QuantFormat) -> Any:
    def found(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        places = _float_places(format, y / scale)
        return (looked_up(places, format.values, y.dtype) if format.values else places.to(y.dtype)) * scale

    return found


def _float_places(format: QuantFormat, y: torch.Tensor) -> torch.Tensor:
    if format.values:
        return nearest(y, format.values)
    float8: torch.dtype = getattr(torch, format.dtype)
    largest = torch.finfo(float8).max
    return y.clamp(-largest, largest).to(float8)
