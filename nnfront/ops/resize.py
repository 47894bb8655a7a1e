# SPDX-License-Identifier: Apache-2.0
"""Images, signals and volumes in another resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.dims import Dim, Size, floordiv
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import require, require_float, sizes_of_shape

_LAYOUTS = {"NCW": 1, "NWC": 1, "NCHW": 2, "NHWC": 2, "NCDHW": 3, "NDHWC": 3}
# mode -> the numbers of spatial axes it is for
_MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "area": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}


@op(
    stricter="half types are refused for 'bicubic' and 'area', whose support in torch varies; an empty input is refused",
    dtype_policy="follow",
)
def interpolate(
    x: TensorType,
    size: int | Sequence[Size] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool | None = None,
    data_layout: str = "NCHW",
) -> TensorType:
    """Resize the spatial axes of x to `size`, or by `scale_factor` (the new size is rounded down).

    mode: nearest, nearest-exact, area; linear for one spatial axis, bilinear and bicubic for two, trilinear for three.
    A dim is scaled by an integer or one over an integer. Source: torch.nn.functional.interpolate, in all its details.
    """
    require_float(x)
    require(
        x.ndim == len(data_layout),
        "data_layout {} has {} axes, x has {}",
        data_layout,
        len(data_layout),
        x.ndim,
    )
    for s in x.shape:
        require(not (isinstance(s, int) and s == 0), "x is empty")
    old = x.shape[1:-1] if data_layout[-1] == "C" else x.shape[2:]
    if size is not None:
        assert isinstance(size, tuple)
        new: tuple[Size, ...] = size
    else:
        assert isinstance(scale_factor, tuple)
        new = tuple([_scaled(s, factor) for s, factor in zip(old, scale_factor, strict=True)])
    for s in new:
        require(not (isinstance(s, int) and s < 1), "the new size {} is not positive", s)
    channels = x.shape[-1] if data_layout[-1] == "C" else x.shape[1]
    return TensorType(
        (x.shape[0], *new, channels) if data_layout[-1] == "C" else (x.shape[0], channels, *new), x.dtype
    )


def _scaled(size: Size, factor: float) -> Size:
    if isinstance(size, int):
        return math.floor(size * factor)
    if factor.is_integer():
        return size * int(factor)
    if (1 / factor).is_integer():
        return floordiv(size, int(1 / factor))
    raise InferError(
        f"{size} times {factor} is not a dim",
        help="scale by an integer or one over an integer, or give the size",
    )


@interpolate.normalize
def _(
    x: TensorType,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool | None,
    data_layout: str,
) -> dict[str, Any]:
    require(
        data_layout in _LAYOUTS,
        "unknown data_layout {!r}",
        data_layout,
        help=f"use one of {', '.join(_LAYOUTS)}",
    )
    count = _LAYOUTS[data_layout]
    require(
        count in _MODES.get(mode, ()),
        "mode {!r} is not for {} spatial axes",
        mode,
        count,
        help=f"modes are {', '.join(_MODES)}",
    )
    require(not recompute_scale_factor, "recompute_scale_factor is not supported", help="give the size")
    require((size is None) != (scale_factor is None), "give either size or scale_factor")
    smooth = mode.endswith("linear") or mode == "bicubic"
    require(align_corners is None or smooth, "align_corners has no meaning for mode {!r}", mode)
    require(
        not antialias or mode in ("bilinear", "bicubic"),
        "antialias is for bilinear and bicubic, got {!r}",
        mode,
    )
    require(
        mode not in ("bicubic", "area") or x.dtype in ("float32", "float64"),
        "mode {!r} needs float32 or float64, got {}",
        mode,
        x.dtype,
        help="cast with astype",
    )
    return {
        "size": None if size is None else _spread(sizes_of_shape(size), count, "size"),
        "scale_factor": None if scale_factor is None else _factors(scale_factor, count),
        "align_corners": align_corners or None,
        "recompute_scale_factor": None,
        "antialias": True if antialias else None,
    }


def _spread(values: tuple[Any, ...], count: int, name: str) -> tuple[Any, ...]:
    values = values * count if len(values) == 1 else values
    require(len(values) == count, "{} has {} numbers for {} spatial axes", name, len(values), count)
    return values


def _factors(scale_factor: Any, count: int) -> tuple[float, ...]:
    listed = tuple(scale_factor) if isinstance(scale_factor, tuple | list) else (scale_factor,)
    for factor in listed:
        require(
            not isinstance(factor, Dim) and float(factor) > 0,
            "scale_factor must be a positive number, got {}",
            factor,
        )
    return tuple(map(float, _spread(listed, count, "scale_factor")))


@interpolate.reference
def _(
    x: torch.Tensor,
    size: Sequence[int] | None,
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: None,
    antialias: bool | None,
    data_layout: str,
) -> torch.Tensor:
    last = data_layout[-1] == "C"
    smooth = mode.endswith("linear") or mode == "bicubic"
    result = F.interpolate(
        x.movedim(-1, 1) if last else x,
        None if size is None else list(size),
        None if scale_factor is None else list(scale_factor),
        mode,
        bool(align_corners) if smooth else None,
        antialias=bool(antialias),
    )
    return result.movedim(1, -1) if last else result
