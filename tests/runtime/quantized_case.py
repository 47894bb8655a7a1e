# SPDX-License-Identifier: Apache-2.0
"""Operands of products with weights in few bits, at odd places, and what they stand for in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nnfront.backends.cpu import quantized_linear
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import GROUPS, find_dequantizer, find_many_rows
from nnfront.backends.cpu.quantized_linear import product
from nnfront.ir import OPS
from nnfront.lower import Run, Structure
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

BLOCKS = [(name, FORMATS[name].group_size) for name in BLOCK_FORMATS]
WAYS = [("int8", None), ("fp8", None), ("fp8", 128)] + [
    (s, g) for s in ("int8_groups", "int4", "uint4") for g in GROUPS
]
TABLES = [(name, FORMATS[name].group_size) for name in ("mxfp4", "nvfp4", "nl4")]
# Rows from which tiles take what values in groups of 16 stand for, rounded to bfloat16, where there are tiles.
BY_TILES = 6
GUARD = 64
# Sets that multiply four bits as integers, with x as integers of 16 bits.
IN_INTEGERS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni")


def inside(values: torch.Tensor, offset: int, beside: float | int) -> torch.Tensor:
    """The values at an odd place of a larger buffer, beside others that would show."""
    buffer = torch.full((values.numel() + 2 * GUARD,), beside, dtype=values.dtype)
    return buffer[GUARD + offset :][: values.numel()].view(values.shape).copy_(values)


def format_of(stored: str, group: int | None) -> QuantFormat:
    return replace(FORMATS["int8" if stored == "int8_groups" else stored], group_size=group)


def meaning(stored: str, quantized: torch.Tensor) -> torch.Tensor:
    """What bytes stand for, two values for each byte in 4 bits."""
    if stored.startswith("int8"):
        return quantized.view(torch.int8).double()
    if stored == "fp8":
        return quantized.view(torch.float8_e4m3fn).double()
    values = torch.stack([quantized % 16, quantized // 16], -1).flatten(1).double()
    if table := FORMATS[stored].values:
        return torch.tensor(table, dtype=torch.float64)[values.long()]
    return values if stored == "uint4" else (values + 8) % 16 - 8


def as_stored(stored: str, quantized: torch.Tensor) -> torch.Tensor:
    """Bytes in the type that the weight has."""
    dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int8_groups": torch.int8}
    return quantized.view(dtypes.get(stored, torch.uint8))


def in_16_bits(x: torch.Tensor) -> torch.Tensor:
    """Rows, each 32 neighbours of which are whole numbers of one power of two, of which the largest is 2^14 or more; rows with the largest numbers of all are left as they are."""
    blocks = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    unit = torch.exp2(blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-97).log2().floor() - 14)
    rounded = ((blocks / unit).round() * unit).flatten(-2)[..., : x.shape[-1]]
    return torch.where(x.abs().amax(-1, keepdim=True) < 2.0**97, rounded, x)


def left_to_others(*operands: torch.Tensor | None) -> torch.Tensor:
    """What stands for the other way."""
    return torch.zeros(0)


def in_c(format: QuantFormat, *operands: torch.Tensor | None, with_tiles: bool = True) -> torch.Tensor | None:
    """The product by the kernel in C; None where it is not for these operands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_linear, "TILES", with_tiles)
        run = Run("", "quantized_product", (), Structure(0))
        y = product(run, format, left_to_others)(*operands)
    return y if y.ndim > 1 else None


class Case:
    """Operands at odd places, and the weight that they stand for."""

    def __init__(
        self,
        stored: str,
        group: int | None,
        rows: int,
        columns: int,
        outputs: int,
        offset: int = 0,
        most_zero: int = 15,
        with_tiles: bool = True,
        are_wide: bool = False,
    ) -> None:
        self.format, self.with_tiles = format_of(stored, group), with_tiles
        self.dequantize = find_dequantizer(NATIVE, self.format)
        self.many = find_many_rows(NATIVE, self.format)
        is_rounded = stored in ("q6_k", "nvfp4", "nl4")
        self.is_rounded = is_rounded and with_tiles and rows >= BY_TILES and NATIVE.has_tiles()
        self.x = inside(torch.randn(rows, columns).bfloat16(), offset, torch.nan)
        self.bias = inside(torch.randn(outputs).bfloat16(), offset, torch.nan)
        self.scales = self.zeros = None
        if stored in BLOCK_FORMATS:
            blocks = OPS["quantize_blocks"].run((torch.randn(outputs, columns),), {"format": stored})
            self.weight = inside(blocks, offset, 0x7F)
            back = {"format": stored, "dtype": "float64"}
            self.dense = OPS["dequantize_blocks"].run((blocks,), back)
            return
        groups = 1 if group is None else columns // group
        per_byte = 2 if stored.endswith("4") else 1
        quantized = torch.randint(0, 256, (outputs, columns // per_byte), dtype=torch.uint8)
        if stored == "fp8":
            quantized[quantized % 128 == 127] -= 1
        scales = torch.rand(outputs, groups) / 8 + 0.01
        scales = scales if stored in ("fp8", "nvfp4", "nl4") or are_wide else scales.bfloat16()
        self.weight = as_stored(stored, inside(quantized, offset, 0x7F))
        self.scales = inside(scales, offset % 8, torch.nan)
        if stored == "mxfp4":
            exponents = torch.randint(120, 130, (outputs, groups), dtype=torch.uint8)
            self.scales, scales = inside(exponents, offset, 255), 2.0 ** (exponents.double() - 127)
        if self.format.has_factor and not are_wide:
            stored_scales = torch.exp2(
                8.7
                * torch.rand(outputs, groups)
                * torch.tensor([-1.0, 1.0])[torch.randint(2, (outputs, groups))]
            )
            stored_scales = stored_scales.to(torch.float8_e4m3fn)
            factors = torch.rand(outputs, 1) / 512 + 0.001
            self.scales, self.zeros = (
                inside(stored_scales, offset, torch.nan),
                inside(factors, offset % 8, torch.nan),
            )
            scales = stored_scales.double() * factors.double()
        values = meaning(stored, quantized)
        if stored == "uint4":
            self.zeros = inside(
                torch.randint(0, most_zero + 1, (outputs, groups), dtype=torch.uint8), offset, 255
            )
            values = values - self.zeros.double().repeat_interleave(columns // groups, 1)
        self.dense = values * scales.double().repeat_interleave(columns // groups, 1)

    def run_many(self, bias: bool = True) -> torch.Tensor:
        """By the kernel for many rows, which multiplies what numbers stand for in bfloat16."""
        self.is_rounded = True
        return self.many(self.x, self.weight, self.scales, self.zeros, self.bias if bias else None)

    def run(self, bias: bool = True) -> torch.Tensor:
        operands = self.x, self.weight, self.scales, self.zeros, self.bias if bias else None
        y = in_c(self.format, *operands, with_tiles=self.with_tiles)
        assert y is not None
        return y

    def rounded(self) -> torch.Tensor:
        """What the kernel dequantises the weight to, which must be what it stands for to half of the last bit of bfloat16, and what float32 rounds of scales and minima."""
        y = self.dequantize(self.weight, self.scales, self.zeros).double()
        most = self.dense.abs().amax(1, keepdim=True)
        assert ((y - self.dense).abs() <= self.dense.abs() * 2.0**-8 * 1.0001 + most * 2.0**-22).all()
        return y

    def check(self, y: torch.Tensor, bias: bool = True) -> None:
        """Within the rounding of the result and of a float32 sum of so many products with quantised values, or with what they stand for in bfloat16; of x in 16 bits where that is multiplied."""
        b = self.bias.double() if bias else torch.zeros(len(self.bias)).double()
        dense = self.rounded() if self.is_rounded else self.dense
        x = self.x.double()
        if self.format.name in ("int4", "uint4") and NATIVE.used_set() in IN_INTEGERS:
            x = in_16_bits(x)
        exact = x @ dense.T + b
        sizes = x.abs() @ dense.abs().T + b.abs()
        assert y.dtype == torch.bfloat16
        assert y.shape == exact.shape
        assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 2.0**-20).all()
