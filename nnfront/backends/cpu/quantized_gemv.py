# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows of bfloat16 with a weight in few bits, at the speed of memory, and its pieces dequantised for those of many rows: `c/quantized.c`
and `c/dequantize.c`, where they were built and can run."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch

from nnfront.backends.cpu.gemv import TILES, Multiply
from nnfront.quant_format import FORMATS, QuantFormat

GROUPS = (32, 64, 128)


class _Reads(NamedTuple):
    """A way to store that the kernel in C reads, by its number there: a format, the sizes of groups, and up to how many rows it is the faster way."""

    stored: int
    format: str
    groups: tuple[int | None, ...]
    most: int


# 9728 x 896, two threads, 64 rows of fp8 5.2 ms against 9.4 by decoding, of int8 5.3 against 5.7.
_READS = (
    _Reads(0, "int8", (None,), 64),
    _Reads(1, "int8", GROUPS, 64),
    _Reads(2, "fp8", (None,), 64),
    _Reads(3, "fp8", (128,), 64),
    _Reads(4, "int4", GROUPS, 64),
    _Reads(5, "uint4", GROUPS, 64),
    _Reads(6, "mxfp4", (32,), 64),
    _Reads(6, "nvfp4", (16,), 64),
    _Reads(6, "nl4", (16,), 64),
    _Reads(7, "q4_k", (32,), 64),
    _Reads(8, "q5_k", (32,), 64),
    _Reads(9, "q6_k", (16,), 64),
)

FORMATS_READ = frozenset(reads.format for reads in _READS)


# What scales are, by their numbers in C; bytes are powers of two.
SCALE_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}


def takes_scales(format: QuantFormat, dtype: torch.dtype | None) -> bool:
    """Whether kernels in C read a format with scales of a dtype; None where they lie in blocks."""
    if format.block is not None or dtype is None:
        return format.block is not None and dtype is None
    if dtype == torch.uint8:
        return bool(format.scale_values)
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


def _reads(format: QuantFormat) -> _Reads | None:
    known = FORMATS[format.name]
    if replace(format, group_size=known.group_size) != known:
        return None
    return next((r for r in _READS if r.format == format.name and format.group_size in r.groups), None)


Dequantize: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]
"""(weight, scales, zeros) -> what they stand for, bfloat16 [outputs, columns], each number rounded once; operands in one piece."""


def find_dequantizer(module: ModuleType | None, format: QuantFormat) -> Dequantize | None:
    """Return the kernel that dequantises weights in a format, if there is one."""
    reads = _reads(format)
    if module is None or reads is None:
        return None
    run, threads, how, group = module.dequantize, torch.get_num_threads, reads.stored, format.group_size
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


@dataclass(frozen=True)
class SmallBatchQuantized:
    """A kernel for up to `most` rows and a weight in a format, `stored` by its number in C.

    multiply    (x, weight, scales, zeros, bias, added) -> x @ ((weight - zeros) * scales).T + bias + added

    Shapes: x [..., columns], bias [outputs] and added [..., outputs] bfloat16; weight [outputs, columns] int8 or float8_e4m3fn, or uint8 [outputs, columns / 2] with
    the first of two 4-bit codes in the low half, or [outputs, bytes] in blocks; scales [outputs, groups], float32, or bfloat16 unless for float8, None for blocks; zeros
    uint8 [outputs, groups], for uint4 alone.
    """

    most: int
    multiply: Multiply
    stored: int
    format: QuantFormat

    def takes_scales(self, dtype: torch.dtype | None) -> bool:
        """Whether scales may be of a dtype; None where they lie in blocks."""
        return takes_scales(self.format, dtype)

    @property
    def has_zeros(self) -> bool:
        """Whether there are zero points."""
        return not self.format.symmetric and not self.format.block

    def groups(self, columns: int) -> int:
        """How many scales an output has."""
        return columns // self.format.group_size if self.format.group_size else 1

    def takes(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> bool:
        """Whether `x` is of few rows in bfloat16, and each operand is of its type and lies in one piece."""
        if added is not None:
            is_one_each = added.shape[:-1] == x.shape[:-1] and added.shape[-1] == weight.shape[0]
            if added.dtype != x.dtype or not is_one_each or not added.is_contiguous():
                return False
        is_few = x.dtype == torch.bfloat16 and 0 < x.numel() <= self.most * x.shape[-1]
        are_whole = is_few and x.is_contiguous() and weight.is_contiguous()
        return (
            are_whole
            and self.takes_scales(None if scales is None else scales.dtype)
            and (scales is None or scales.is_contiguous())
            and (zeros is not None and zeros.is_contiguous() if self.has_zeros else zeros is None)
            and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        )


def find(
    module: ModuleType | None, format: QuantFormat, *, with_tiles: bool = TILES
) -> SmallBatchQuantized | None:
    """Return the kernel for weights in a format, if there is one."""
    group, reads = format.group_size, _reads(format)
    if module is None or reads is None:
        return None
    values, unit = table_of(format)
    product, threads, how = module.multiply_quantized, torch.get_num_threads, reads.stored

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs, columns = weight.shape[0], x.shape[-1]
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
        rows, groups = x.numel() // columns, columns // group if group else 1
        product(
            how,
            rows,
            columns,
            outputs,
            groups,
            0 if scales is None else SCALE_KINDS[scales.dtype],
            *values,
            with_tiles,
            threads(),
            unit,
            weight,
            scales,
            zeros,
            x,
            bias,
            added,
            y,
        )
        return y

    return SmallBatchQuantized(reads.most, multiply, reads.stored, format)
