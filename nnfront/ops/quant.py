# SPDX-License-Identifier: Apache-2.0
"""Quantised numbers: x is approximately (q - zero_point) * scale, one scale for each group of neighbours along an axis.

q holds integers, or floats of 8 bits (`dtype="float8_e4m3fn"`), whose own exponent makes the error relative to the element, not to the group; or, for
a format that says what its elements stand for, places in the table of these values: x is approximately values[q] * scale.
"""

from __future__ import annotations

from typing import Any

import torch

from nnfront.dims import Size, divides, floordiv
from nnfront.ir.op import op
from nnfront.ir.types import TensorType, TupleType
from nnfront.ops.rounding import (
    by_pieces,
    fitted,
    fitted_between,
    fitted_values,
    integers,
    looked_up,
    nearest,
    rounded_up,
    scale_places,
)
from nnfront.ops.rules import (
    FLOAT8,
    NO_AXIS,
    Axis,
    Dtype,
    Flag,
    Whole,
    known_format,
    require,
    require_float,
    require_same,
)
from nnfront.quant_format import FORMATS, QuantFormat


@op(stricter="x holds floats, where the reference would convert", rowwise=True)
def quantize(
    x: TensorType,
    bits: Whole = 8,
    group_size: Whole | None = None,
    axis: Axis = -1,
    symmetric: Flag = True,
    scale_dtype: Dtype | None = None,
    dtype: Dtype | None = None,
    format: str | None = None,
    fit: Flag = False,
) -> TupleType:
    """Round each group of `group_size` neighbours along `axis` (None: the whole axis) to integers of `bits` bits, 2 to 8.

    Shapes: x [..., n, ...]; scale [..., n / group_size, ...] of type `scale_dtype` (x's if None).
    symmetric: (q, scale), q int8 in [-m, m], m = 2**(bits - 1) - 1, scale = max|x| / m; the error is at most scale / 2.
    Otherwise (q, scale, zero_point), q and zero_point uint8 in [0, 2**bits - 1], scale = (max(x, 0) - min(x, 0)) / (2**bits - 1);
    the error is at most scale. A group of zeros gets scale 1; one that holds NaN or an infinity becomes NaN, its scale NaN.
    fit: scales, and zero points, by the least squared error of the group instead, of a few that are tried, for integers; symmetric ones then reach down to -m - 1, and
    scales may be negative.
    dtype: a float of 8 bits for q instead of integers, `float8_e4m3fn` (m = 448) or `float8_e5m2` (m = 57344): (q, scale), scale = max|x| / m.
    The error is at most 2**-4 (2**-3) of the element, or 2**-10 (2**-17) of scale where that is more; NaN makes its whole group NaN.
    format: a name of `nnfront.quant_format`, in the place of bits, symmetric, scale_dtype and dtype, and of group_size if that is None. With a table of values
    q is the place of the nearest one to x / scale, of two as near the even place, and the largest value stands for max|x|; where scales too are places in a table
    (mxfp4: powers of two), scale is the largest that lets the greatest power of two among the values stand for no more than max|x|.
    A format with a factor (nvfp4) gives (q, scale, factor), factor float32 [..., 1, ...]: x is approximately values[q] * (scale * factor), by the least error of a few scales.
    """
    require_float(x)
    size = x.shape[axis]
    if group_size is None:
        groups: Size = 1
        require(not (isinstance(size, int) and size == 0), "axis {} is empty", axis)
    else:
        _require_groups(group_size, size, axis)
        groups = floordiv(size, group_size)
    shape = (*x.shape[:axis], groups, *x.shape[axis + 1 :])
    if format is not None:
        known = _format(format)
        scale_dtype, symmetric, dtype = known.scale_dtype, known.symmetric, known.dtype
    scale = TensorType(shape, scale_dtype or x.dtype)
    if format is not None and _format(format).has_factor:
        factor = TensorType((*x.shape[:axis], 1, *x.shape[axis + 1 :]), "float32")
        return TupleType((TensorType(x.shape, "uint8"), scale, factor))
    if dtype is not None:
        return TupleType((TensorType(x.shape, dtype), scale))
    if symmetric:
        return TupleType((TensorType(x.shape, "int8"), scale))
    return TupleType((TensorType(x.shape, "uint8"), scale, TensorType(shape, "uint8")))


@quantize.normalize
def _(
    x: TensorType,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    scale_dtype: str | None,
    dtype: str | None,
    format: Any,
    fit: bool,
) -> dict[str, Any]:
    if format is not None:
        require(
            (bits, symmetric, scale_dtype, dtype) == (8, True, None, None),
            "format says how {} is stored: leave bits, symmetric, scale_dtype and dtype at their default",
            format,
        )
        known = _format(format)
        group_size = known.group_size if group_size is None else group_size
        if not known.values:
            bits, symmetric, scale_dtype, format = known.bits, known.symmetric, known.scale_dtype, None
            dtype = known.dtype if known.dtype in FLOAT8 else None
    require(bits in range(2, 9), "bits must be 2 to 8, got {}", bits)
    is_fit = format is not None and _format(format).has_factor
    require(
        not fit or is_fit or (dtype is None and format is None),
        "fit is for integers, not for {}",
        format or dtype,
    )
    if dtype is not None:
        require(dtype in FLOAT8, "dtype must be one of {}, got {}", ", ".join(sorted(FLOAT8)), dtype)
        require(bits == 8 and symmetric, "{} has 8 bits and is symmetric: leave both at their default", dtype)
    if scale_dtype is not None:
        require_float(TensorType((), scale_dtype), "the scale")
    require(group_size is None or group_size > 0, "group_size must be positive, got {}", group_size)
    return {
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "scale_dtype": None if scale_dtype == x.dtype else scale_dtype,
        "dtype": dtype,
        "format": format,
        "fit": fit and not is_fit,
    }


def _format(name: object) -> QuantFormat:
    found = known_format(name)
    require(found.block is None, "{} lies in blocks: use quantize_blocks and dequantize_blocks", name)
    return found


@quantize.reference
def _(
    x: torch.Tensor,
    bits: int,
    group_size: int | None,
    axis: int,
    symmetric: bool,
    scale_dtype: str | None,
    dtype: str | None,
    format: str | None,
    fit: bool,
) -> tuple[torch.Tensor, ...]:
    out = x.dtype if scale_dtype is None else getattr(torch, scale_dtype)
    size = x.shape[axis]
    length = size if group_size is None else group_size
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    y = y.reshape(*x.shape[:axis], size // length, length, *x.shape[axis + 1 :])
    if format is not None and FORMATS[format].has_factor:
        places, scale, factor = fitted_values(y.movedim(axis + 1, -1).contiguous(), axis, FORMATS[format])
        return places.movedim(-1, axis + 1).reshape(x.shape), scale.squeeze(-1), factor.squeeze(-1)
    if format is not None:
        known, most = FORMATS[format], y.abs().amax(axis + 1, keepdim=True)
        if known.scale_values:
            scale = scale_places(most, known)
            y = y / looked_up(scale, known.scale_values, y.dtype)
        else:
            scale = rounded_up(most / max(map(abs, known.values)), out)
            y = y / scale.to(y.dtype)
        return nearest(y, known.values).reshape(x.shape), scale.squeeze(axis + 1)
    if dtype is not None:
        float8: torch.dtype = getattr(torch, dtype)
        largest = torch.finfo(float8).max
        scale = rounded_up(y.abs().amax(axis + 1, keepdim=True) / largest, out)
        codes = (y / scale.to(y.dtype)).clamp(-largest, largest).to(float8)
        return codes.reshape(x.shape), scale.squeeze(axis + 1)
    if fit:
        y = y.movedim(axis + 1, -1).contiguous()  # sums in one order, whatever the axis
        by_error = fitted if symmetric else fitted_between
        parts = by_pieces(lambda part: by_error(part, bits, out), y)
        q, *others = (part.movedim(-1, axis + 1) for part in parts)
        return q.reshape(x.shape), *(other.squeeze(axis + 1) for other in others)
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = rounded_up(y.abs().amax(axis + 1, keepdim=True) / most, out)
        q = integers(y / scale.to(y.dtype), -most, most, torch.int8)
        return q.reshape(x.shape), scale.squeeze(axis + 1)
    most = 2**bits - 1
    low, high = y.amin(axis + 1, keepdim=True).clamp(max=0), y.amax(axis + 1, keepdim=True).clamp(min=0)
    scale = rounded_up((high - low) / most, out)
    zero = integers(-low / scale.to(y.dtype), 0, most, torch.uint8)
    q = integers((y / scale.to(y.dtype)).round_().add_(zero), 0, most, torch.uint8)
    return q.reshape(x.shape), scale.squeeze(axis + 1), zero.squeeze(axis + 1)


@op(stricter=NO_AXIS, rowwise=True)
def dequantize(
    q: TensorType,
    scale: TensorType,
    zero_point: TensorType | None = None,
    group_size: Whole | None = None,
    axis: Axis = -1,
    dtype: Dtype | None = None,
    format: str | None = None,
) -> TensorType:
    """(q - zero_point) * scale, or values[q] * scale with the table of a `format`; each scale for `group_size` neighbours along `axis` (None: the whole axis).

    Shapes: q [..., n, ...] int8, uint8 or a float of 8 bits; scale and zero_point [..., n / group_size, ...]; the result has q's shape and type
    `dtype` (the scale's if None). The product is made in float32, then rounded. Floats have no zero_point, and values of a table neither.
    """
    if format is not None:
        known = _format(format)
        require(q.dtype == known.dtype, "q of {} must be {}, got {}", format, known.dtype, q.dtype)
        require(zero_point is None, "{} has no zero_point", format)
    require(
        q.dtype in ("int8", "uint8") or q.dtype in FLOAT8,
        "q must be int8, uint8 or float8, got {}",
        q.dtype,
    )
    require(zero_point is None or q.dtype not in FLOAT8, "q is {}, which has no zero_point", q.dtype)
    if format is not None and known.scale_values:
        require(
            scale.dtype == known.scale_dtype,
            "scale of {} must be {}, got {}",
            format,
            known.scale_dtype,
            scale.dtype,
        )
        require(dtype is not None, "scales of {} are no floats: give the dtype of the result", format)
    else:
        require_float(scale, "scale")
    groups: Size = 1 if group_size is None else floordiv(q.shape[axis], group_size)
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor is None:
            continue
        require(tensor.ndim == q.ndim, "{} has {} axes, q has {}", name, tensor.ndim, q.ndim)
        for i, (mine, its) in enumerate(zip(tensor.shape, q.shape, strict=True)):
            require_same(
                mine, groups if i == axis else its, f"{name} has size {{}} on axis {i}, q asks for {{}}"
            )
    if zero_point is not None:
        require(zero_point.dtype == q.dtype, "q is {}, zero_point is {}", q.dtype, zero_point.dtype)
    return TensorType(q.shape, dtype or scale.dtype)


@dequantize.normalize
def _(
    q: TensorType, scale: TensorType, group_size: int | None, axis: int, dtype: str | None, format: Any
) -> dict[str, Any]:
    if format is not None:
        known = _format(format)
        group_size = known.group_size if group_size is None else group_size
        format = format if known.values else None
    if dtype is not None:
        require_float(TensorType((), dtype), "the result")
    if group_size is not None:
        require(group_size > 0, "group_size must be positive, got {}", group_size)
        _require_groups(group_size, q.shape[axis], axis)
    return {"group_size": group_size, "dtype": None if dtype == scale.dtype else dtype, "format": format}


def _require_groups(group_size: int, size: Size, axis: int) -> None:
    fits = divides(group_size, size) is True
    require(fits, "axis {} of size {} does not divide into groups of {}", axis, size, group_size)


@dequantize.reference
def _(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    group_size: int | None,
    axis: int,
    dtype: str | None,
    format: str | None,
) -> torch.Tensor:
    wide = torch.float64 if scale.dtype == torch.float64 else torch.float32
    known = None if format is None else FORMATS[format]
    y = q.to(wide) if known is None else looked_up(q & (2**known.bits - 1), known.values, wide)
    if known is not None and known.scale_values:
        scale = looked_up(scale, known.scale_values, wide)
    length = q.shape[axis] if group_size is None else group_size
    y = y.reshape(*scale.shape[: axis + 1], length, *q.shape[axis + 1 :])
    if zero_point is not None:
        y.sub_(zero_point.to(wide).unsqueeze(axis + 1))
    y.mul_(scale.to(wide).unsqueeze(axis + 1))
    return y.reshape(q.shape).to(scale.dtype if dtype is None else getattr(torch, dtype))


@op(stricter=NO_AXIS, rowwise=True)
def pack_int4(x: TensorType, axis: Axis = -1) -> TensorType:
    """Put two 4-bit integers into each byte along `axis`, which has an even size: the first one in the low half.

    Shapes: x [..., n, ...] int8 in [-8, 7] or uint8 in [0, 15] (higher bits are dropped); result uint8 [..., n / 2, ...].
    """
    require(x.dtype in ("int8", "uint8"), "x must be int8 or uint8, got {}", x.dtype)
    size = x.shape[axis]
    require(
        divides(2, size) is True,
        "axis {} of size {} is not even",
        axis,
        size,
        help="pad it, or give the dim multiple_of=2",
    )
    return TensorType((*x.shape[:axis], floordiv(size, 2), *x.shape[axis + 1 :]), "uint8")


@pack_int4.reference
def _(x: torch.Tensor, axis: int) -> torch.Tensor:
    pairs = (x.view(torch.uint8) & 15).reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return pairs.select(axis + 1, 0) | (pairs.select(axis + 1, 1) << 4)


@op(stricter=NO_AXIS, rowwise=True)
def unpack_int4(x: TensorType, axis: Axis = -1, signed: Flag = True) -> TensorType:
    """Undo pack_int4: uint8 [..., n, ...] gives [..., 2 n, ...], int8 in [-8, 7], or uint8 in [0, 15] if not signed."""
    require(x.dtype == "uint8", "x must be uint8, got {}", x.dtype)
    return TensorType(
        (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :]), "int8" if signed else "uint8"
    )


@unpack_int4.reference
def _(x: torch.Tensor, axis: int, signed: bool) -> torch.Tensor:
    if signed:
        halves = [(x << 4).view(torch.int8) >> 4, x.view(torch.int8) >> 4]  # the right shift repeats the sign
    else:
        halves = [x & 15, x >> 4]
    return torch.stack(halves, axis + 1).flatten(axis, axis + 1)
