# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows of bfloat16 with a weight in 8 or 4 bits, at the speed of memory: `c/quantized.c`, where it was built and can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from nnfront.backends.cpu.gemv import TILES
from nnfront.backends.cpu.quantized_pieces import Multiply
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
    _Reads(3, "int4", GROUPS, 64),
    _Reads(4, "uint4", GROUPS, 64),
    _Reads(5, "q4_k", (32,), 64),
    _Reads(6, "q5_k", (32,), 64),
    _Reads(7, "q6_k", (16,), 64),
)

FORMATS_READ = frozenset(reads.format for reads in _READS)


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
        if self.format.block is not None or dtype is None:
            return self.format.block is not None and dtype is None
        return dtype == torch.float32 or (dtype == torch.bfloat16 and self.format.scale_dtype is None)

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
    group, known = format.group_size, FORMATS[format.name]
    reads = next((r for r in _READS if r.format == format.name and group in r.groups), None)
    if module is None or reads is None or replace(format, group_size=known.group_size) != known:
        return None
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
            scales is not None and scales.dtype == torch.float32,
            with_tiles,
            threads(),
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
