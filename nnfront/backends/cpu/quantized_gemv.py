# SPDX-License-Identifier: Apache-2.0
"""What kernels in C read of quantised weights: in products of a few rows of bfloat16 (`c/quantized.c`), in those of many rows, with what is dequantised as it is
multiplied (`c/dequantized_tiles.c`), and when pieces are dequantised ahead (`c/dequantize.c`).

Shapes: x [..., columns], bias [outputs] and what is added [..., outputs] bfloat16; weight [outputs, columns] int8 or float8_e4m3fn, or uint8 [outputs, columns / 2] with
the first of two 4-bit numbers in the low half, or [outputs, bytes] in blocks; scales [outputs, groups], float32, or bfloat16 unless for float8, None for blocks; zeros
uint8 [outputs, groups], for uint4 alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch

from nnfront.backends.cpu.extension import TILES, work_bytes
from nnfront.quant_format import FORMATS, QuantFormat

GROUPS = (32, 64, 128)
# Rows of quantised weights and of adapters that a product in C takes where tiles multiply them.
MOST_ROWS = 64


class _Reads(NamedTuple):
    """A way to store that the kernel in C reads, by its number there: a format, and the sizes of groups."""

    stored: int
    format: str
    groups: tuple[int | None, ...]


# 9728 x 896, two threads, 64 rows of fp8 5.2 ms against 9.4 by decoding, of int8 5.3 against 5.7.
_READS = (
    _Reads(0, "int8", (None,)),
    _Reads(1, "int8", GROUPS),
    _Reads(2, "fp8", (None,)),
    _Reads(3, "fp8", (128,)),
    _Reads(4, "int4", GROUPS),
    _Reads(5, "uint4", GROUPS),
    _Reads(6, "mxfp4", (32,)),
    _Reads(6, "nvfp4", (16,)),
    _Reads(6, "nl4", (16,)),
    _Reads(7, "q4_k", (32,)),
    _Reads(8, "q5_k", (32,)),
    _Reads(9, "q6_k", (16,)),
)

FORMATS_READ = frozenset(reads.format for reads in _READS)


# Rows that tiles multiply at a time, and how often of what has been dequantised once.
_TILED_ROWS, _MOST_TOGETHER = 32, 16
# What scales are, by their numbers in C; bytes are powers of two, and those in float8 are multiplied by a factor for each output.
SCALE_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2, torch.float8_e4m3fn: 3}


def takes_scales(format: QuantFormat, dtype: torch.dtype | None) -> bool:
    """Whether kernels in C read a format with scales of a dtype; None where they lie in blocks."""
    if format.block is not None or dtype is None:
        return format.block is not None and dtype is None
    if dtype == torch.uint8:
        return bool(format.scale_values)
    if dtype == torch.float8_e4m3fn:
        return format.has_factor
    return not format.scale_values and (
        dtype == torch.float32 or (dtype == torch.bfloat16 and format.scale_dtype is None)
    )


@cache
def table_of(format: QuantFormat) -> tuple[tuple[int, ...], float]:
    """What elements stand for, if not for themselves, as C takes it: 16 signed bytes, four to a number, and the unit that these are multiples of."""
    if not format.values:
        return (0, 0, 0, 0), 1.0
    unit = next(u for u in (0.5**i for i in range(8)) if all((v / u).is_integer() for v in format.values))
    return struct.unpack("<4I", struct.pack("<16b", *(int(v / unit) for v in format.values))), unit


def stored_as(format: QuantFormat) -> int | None:
    """Return the number by which kernels in C know a format; None for one that they do not read."""
    known = FORMATS[format.name]
    if replace(format, group_size=known.group_size) != known:
        return None
    groups = format.group_size
    return next((r.stored for r in _READS if r.format == format.name and groups in r.groups), None)


Dequantize: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]
"""(weight, scales, zeros) -> what they stand for, bfloat16 [outputs, columns], each number rounded once; operands in one piece."""


def find_dequantizer(module: ModuleType | None, format: QuantFormat) -> Dequantize | None:
    """Return the kernel that dequantises weights in a format, if there is one."""
    how, group = stored_as(format), format.group_size
    if module is None or how is None:
        return None
    run, threads = module.dequantize, torch.get_num_threads
    values, unit = table_of(format)

    def dequantize(
        weight: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        outputs, width = weight.shape
        columns = width * (1 if format.packing is None else 2)
        if format.block is not None:
            columns = format.block.columns(width) or 0
        y = torch.empty((outputs, columns), dtype=torch.bfloat16)
        kind = 0 if scales is None else SCALE_KINDS[scales.dtype]
        groups = columns // group if group else 1
        run(how, outputs, columns, groups, kind, *values, threads(), unit, weight, scales, zeros, y)
        return y

    return dequantize


def many_rows_bytes(rows: int, columns: int) -> int:
    """What the kernel for many rows works in."""
    return work_bytes("multiply_dequantized", {"together": _together(rows), "columns": columns})


def _together(rows: int) -> int:
    return min(max(-(-rows // _TILED_ROWS), 1), _MOST_TOGETHER)


def find_many_rows(
    module: ModuleType | None, format: QuantFormat, *, with_tiles: bool = True
) -> Callable[..., torch.Tensor] | None:
    """Return the kernel for many rows and a weight in a format, if the processor has tiles for it: (x, weight, scales, zeros, bias) -> the product with what the weight stands for in
    bfloat16, each number rounded once; operands in one piece, scales as `takes_scales` says."""
    how, group = stored_as(format), format.group_size
    if module is None or how is None or not (TILES and with_tiles and module.has_tiles()):
        return None
    run, threads = module.multiply_dequantized, torch.get_num_threads
    values, unit = table_of(format)

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs, columns = weight.shape[0], x.shape[-1]
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
        rows = x.numel() // max(columns, 1)
        work = torch.empty(many_rows_bytes(rows, columns), dtype=torch.uint8)
        kind = 0 if scales is None else SCALE_KINDS[scales.dtype]
        sizes = rows, columns, outputs, columns // group if group else 1, kind, *values
        run(how, *sizes, _together(rows), threads(), unit, weight, scales, zeros, x, bias, work, y)
        return y

    return multiply
