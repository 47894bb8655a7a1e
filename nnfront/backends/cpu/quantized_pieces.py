# SPDX-License-Identifier: Apache-2.0
"""Products with a quantised weight by pieces of it, on a CPU: each is decoded, multiplied and dropped, so the whole weight is never there.

A kernel in C multiplies such pieces by matrix tiles, or decodes those that stay in a near cache, where it was built. A `Decoding` is how that is done by torch for some formats, and what memory it takes;
`DECODINGS` are all that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from nnfront.backends.cpu import float8
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.linear import BFLOAT16
from nnfront.backends.cpu.quantized_gemv import (
    find_dequantizer,
    find_many_rows,
    many_rows_bytes,
    takes_scales,
)
from nnfront.ir import OPS
from nnfront.lower import Run, Structure
from nnfront.memory.layout import Layout
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

Multiply: TypeAlias = Callable[..., torch.Tensor]
"""(x, weight, scales, zeros, bias) -> the product, with the shapes of `quantized_linear`."""

# Elements of a weight that are decoded at a time, 8 MiB of bfloat16. 512 rows with 2048 x 8192 in 4 bits, two threads: 49 ms, and 66 with a
# quarter of it, since a product with few outputs is a slow one; the whole weight in bfloat16 takes 43.
PIECE = 1 << 22
# The same in C, 2 MiB: smaller ones are nearer, but products with fewer outputs slower.
NEAR_PIECE = 1 << 20
# What multiplies a weight in bfloat16: oneDNN takes five times as long where no instruction multiplies that.
_BFLOAT16 = BFLOAT16.bind(Run(BFLOAT16.name, "linear", (), Structure(0)))
# Rows up to which torch's product with int8 weights is the faster way.
INT8_ROWS = 8


@dataclass(frozen=True)
class Decoding:
    """How weights of some formats are multiplied by pieces.

    name        as the names of its kernels begin
    formats     the names of the formats; in any groups, with and without zero points, if `any_groups`
    why         for `explain`
    by_torch    gives the product with a weight of a format
    held        the most bytes that this holds besides its result, from the format, the layouts of x and scales, and how many outputs there are
    """

    name: str
    formats: tuple[str, ...]
    why: str
    by_torch: Callable[[QuantFormat], Multiply]
    held: Callable[[QuantFormat, Layout, Any, int], int]
    any_groups: bool = False

    def refusal(self, format: QuantFormat) -> str:
        """Why it does not take a format; "" if it does."""
        known = FORMATS[format.name]
        if format.name in self.formats and (format.is_like(known) if self.any_groups else format == known):
            return ""
        groups = " in any groups along the input axis" if self.any_groups else ""
        return f"the format is {format}, it takes {' or '.join(self.formats)}{groups}"

    def multiply(self, format: QuantFormat) -> Multiply:
        """Return the product with a weight of a format: in C for what it takes, by torch for what it does not."""
        by_torch, dequantize = self.by_torch(format), find_dequantizer(NATIVE, format)

        def others(x: torch.Tensor, *stored: torch.Tensor | None) -> torch.Tensor:
            return by_torch(x, *_with_float_scales(*stored))

        if dequantize is None:
            return others
        in_c = find_many_rows(NATIVE, format)
        in_c = in_c or in_pieces(lambda *stored: dequantize(*stored[:3]), NEAR_PIECE, _BFLOAT16)

        def multiply(x: torch.Tensor, *stored: torch.Tensor | None) -> torch.Tensor:
            _, scales, _, bias = stored
            is_known = takes_scales(format, None if scales is None else scales.dtype)
            is_known = is_known and {x.dtype, x.dtype if bias is None else bias.dtype} == {torch.bfloat16}
            if is_known and all(t is None or t.is_contiguous() for t in stored):
                return in_c(x.contiguous(), *stored)
            return others(x, *stored)

        return multiply

    def most_held(self, format: QuantFormat, x: Layout, scales: Layout | None, outputs: int) -> int:
        """Return the most bytes that `multiply` holds besides its result."""
        dtype = None if scales is None else getattr(torch, scales.dtype)
        is_in_c = x.dtype == "bfloat16" and takes_scales(format, dtype)
        if not is_in_c or find_dequantizer(NATIVE, format) is None:
            multiplied = 4 * scales.count if dtype == torch.float8_e4m3fn and scales is not None else 0
            return self.held(format, x, scales, outputs) + multiplied
        if find_many_rows(NATIVE, format) is not None:
            columns = max(x.shape[-1], 1)
            return many_rows_bytes(x.count // columns, columns)
        decoded, product = _piece_elements(x, outputs, NEAR_PIECE)
        return x.item * (decoded + product)


def _with_float_scales(*stored: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """A weight, scales, zeros and bias, scales in float8 multiplied by the factors that stand in the place of zeros."""
    weight, scales, zeros, bias = stored
    if scales is None or zeros is None or scales.dtype != torch.float8_e4m3fn:
        return stored
    return weight, scales.float() * zeros, None, bias


def step_of(columns: int, most: int | None = None) -> int:
    """Return how many outputs a piece has, of so many elements if that is said."""
    return max((PIECE if most is None else most) // max(columns, 1), 1)


def scaled(decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Multiply:
    """A product with a weight that has a scale for each output: products with quantised values are scaled. float16 is computed in float32, which holds sums of those."""

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs, columns = weight.shape
        wide = x if x.dtype == torch.bfloat16 else x.float()
        y, step = x.new_empty((*x.shape[:-1], outputs)), step_of(columns)
        for first in range(0, outputs, step):
            quantized = weight[first : first + step]
            # No name for what is decoded: it would keep one piece while the next is made.
            product = F.linear(wide, decode(quantized, wide.dtype))
            torch.mul(product, scales[first : first + step].view(-1), out=y.narrow(-1, first, len(quantized)))
            del product
        return y if bias is None else y.add_(bias)

    return multiply


def _fp8(format: QuantFormat) -> Multiply:
    """float8_e4m3fn with a float32 scale for each output."""
    return scaled(float8.decode)


def _int8(format: QuantFormat) -> Multiply:
    """int8 with a scale for each output.

    Torch's kernel, 9728 x 896 in bfloat16, one thread: 1 row 1.3 ms, 8 rows 3.4; oneDNN's product with a bfloat16 weight takes 2.3 and 2.9.
    """
    in_pieces = scaled(torch.Tensor.to)

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        is_few = 0 < len(rows) <= INT8_ROWS and scales.dtype == x.dtype
        if not (is_few and weight.is_contiguous()):
            return in_pieces(x, weight, scales, zeros, bias)
        # One scale for all outputs may be seen as many, which the kernel would read behind it.
        y = torch._weight_int8pack_mm(rows.contiguous(), weight, scales.reshape(-1).contiguous())
        y = y.view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    return multiply


def _grouped(format: QuantFormat) -> Multiply:
    """int8, or two 4-bit integers in a byte, with a scale for each group of columns, and with or without zero points."""
    return in_pieces(partial(dequantized, format))


def _by_ops(format: QuantFormat) -> Multiply:
    """Weights in any format, by what the ops' references make of them."""
    return in_pieces(partial(dequantized_by_ops, format))


def in_pieces(
    dequantized: Callable[..., torch.Tensor],
    most: int | None = None,
    linear: Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor] = F.linear,
) -> Multiply:
    """A product with a weight of which `dequantized(weight, scales, zeros, dtype)` makes some outputs at a time, in the dtype of x."""

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs, columns = len(weight), x.shape[-1]
        y, step = x.new_empty((*x.shape[:-1], outputs)), step_of(columns, most)
        for first in range(0, outputs, step):
            some = slice(first, first + step)
            others = (None if part is None else part[some] for part in (scales, zeros))
            # No names for what is made: they would keep one piece while the next is made.
            y.narrow(-1, first, min(step, outputs - first)).copy_(
                linear(x, dequantized(weight[some], *others, x.dtype), None)
            )
        return y if bias is None else y.add_(bias)

    return multiply


def dequantized(
    format: QuantFormat,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(weight - zeros) * scales in the dtype of the scales, rounded once: each difference of quantised values is exact there."""
    quantized = weight if format.packing is None else _unpacked(weight, signed=format.dtype == "int8")
    wide = quantized.to(scales.dtype)
    del quantized
    groups = wide.view(*scales.shape, -1)
    if zeros is not None:
        groups.sub_(zeros.to(scales.dtype).unsqueeze(-1))
    groups.mul_(scales.unsqueeze(-1))
    return wide.to(dtype)


def _unpacked(weight: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Each byte becomes the two of a 16-bit integer, the low half first as in memory."""
    pairs = weight.to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    if not signed:
        return pairs.view(torch.uint8)
    return pairs.view(torch.int8).bitwise_xor_(8).sub_(8)


def dequantized_by_ops(
    format: QuantFormat,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the ops' references give, for any format, scales of any dtype, on any device."""
    if format.block is not None:
        dense: torch.Tensor = OPS["dequantize_blocks"].run(
            (weight,), {"format": format.name, "dtype": str(dtype).removeprefix("torch.")}
        )
        return dense
    if format.packing is not None:
        signed = {"axis": format.packing, "signed": format.dtype == "int8"}
        weight = OPS["unpack_int4"].run((weight,), signed)
    name = format.name if format.values else None
    attrs = {"group_size": format.group_size, "axis": format.axis, "format": name}
    y: torch.Tensor = OPS["dequantize"].run(
        (weight, scales, zeros), {**attrs, "dtype": str(dtype).removeprefix("torch.")}
    )
    return y


def _by_ops_pieces(format: QuantFormat, x: Layout, scales: Layout | None, outputs: int) -> int:
    """Elements, found values and scales in float32, and what they are unpacked to and rounded to."""
    decoded, product = _piece_elements(x, outputs)
    return (4 * 4 + 2 + x.item) * decoded + x.item * product


def _from_tables(format: QuantFormat) -> Multiply:
    """Two elements in a byte, with a scale for each group of columns, both places in tables."""
    return in_pieces(partial(looked_up, format))


def looked_up(
    format: QuantFormat, weight: torch.Tensor, scales: torch.Tensor, zeros: None, dtype: torch.dtype
) -> torch.Tensor:
    """values[weight] * scale_values[scales], or values[weight] * scales; made in float32 and rounded once where it is not exact in the dtype."""
    wide = torch.float32 if _is_rounded(format, dtype) else dtype
    pairs, powers = _tables(format, wide)
    # Both values of a byte are moved at once.
    found = pairs.index_select(0, weight.flatten().to(torch.int32)).view(wide)
    by = powers.index_select(0, scales.flatten().to(torch.int32)) if format.scale_values else scales
    found.view(*scales.shape, -1).mul_(by.view(*scales.shape, 1))
    del by
    return found.view(len(weight), -1).to(dtype)


def _is_rounded(format: QuantFormat, dtype: torch.dtype) -> bool:
    """Whether products of values and scales have more bits than a dtype, or exponents that it has not."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not format.scale_values)


@cache
def _tables(format: QuantFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """For each byte the two values that it stands for, as one number of twice the size; what each scale stands for."""
    pairs = torch.tensor(
        [[format.values[byte & 15], format.values[byte >> 4]] for byte in range(256)],
        dtype=dtype,
        device="cpu",
    )
    twice = torch.int32 if dtype.itemsize == 2 else torch.int64
    return pairs.view(twice).flatten(), torch.tensor(format.scale_values, dtype=dtype, device="cpu")


def _table_pieces(format: QuantFormat, x: Layout, scales: Layout, outputs: int) -> int:
    """The most of the moments in which a piece is looked up, scaled, rounded, multiplied."""
    decoded, product = _piece_elements(x, outputs)
    is_rounded = _is_rounded(format, getattr(torch, x.dtype))
    wide, groups = (4 if is_rounded else x.item), decoded // max(x.shape[-1], 1) * scales.shape[-1]
    rounded = x.item * decoded if is_rounded else 0
    scaled = wide * decoded + max((4 + wide) * groups, rounded)
    return max((2 + wide) * decoded, scaled, x.item * (decoded + product))


def _grouped_pieces(format: QuantFormat, x: Layout, scales: Layout, outputs: int) -> int:
    """The most of the moments in which a piece is unpacked, converted, made smaller by its zero points, multiplied."""
    decoded, product = _piece_elements(x, outputs)
    unpacked = 0 if format.packing is None else decoded
    subtracted = 0 if format.symmetric else decoded // max(x.shape[-1], 1) * scales.shape[-1]
    rounded = 0 if scales.item == x.item else x.item * decoded
    scaled = scales.item * decoded + max(scales.item * subtracted, rounded)
    return max(2 * unpacked, unpacked + scales.item * decoded, scaled, x.item * (decoded + product))


def _piece_elements(x: Layout, outputs: int, most: int | None = None) -> tuple[int, int]:
    """The elements of a piece of the weight, and of its product."""
    columns = x.shape[-1]
    piece = min(step_of(columns, most), outputs)
    return piece * columns, x.count // max(columns, 1) * piece


def _int8_pieces(format: QuantFormat, x: Layout, scales: Layout, outputs: int) -> int:
    """Nothing in torch's kernel."""
    is_wide = scales.item > x.item
    if 0 < x.count <= INT8_ROWS * x.shape[-1] and not is_wide:
        return 0
    return _scaled_pieces(x, outputs, moved=0, converted=8 if is_wide else 0)


def _fp8_pieces(format: QuantFormat, x: Layout, scales: Layout, outputs: int) -> int:
    """Quantised values are moved in 16 bits, which is where bfloat16 has its place; products in bfloat16 are scaled in float32."""
    return _scaled_pieces(x, outputs, moved=0 if x.dtype == "bfloat16" else 2, converted=8)


def _scaled_pieces(x: Layout, outputs: int, *, moved: int, converted: int) -> int:
    """The most of three moments: a piece is decoded, multiplied, its product scaled in float32. Beside it x in float32, if it is float16."""
    decoded, product = _piece_elements(x, outputs)
    item, more = {"float32": (4, 0), "float16": (4, 4), "bfloat16": (2, converted)}[x.dtype]
    most = max((item + moved) * decoded, item * (decoded + product), (item + more) * product)
    return most + (4 * x.count if x.dtype == "float16" else 0)


_BYTES = "small batches: a kernel that reads a byte for each weight; larger ones: dequantised piece by piece"
_DECODED = "small batches: a kernel that reads quantised values; larger ones: dequantised piece by piece; activations are not rounded"
_GROUPS = "small batches: a kernel that reads quantised values, and scales the sums of groups; larger ones: dequantised piece by piece"
_TABLES = "small batches: a kernel that reads quantised values, and finds what they stand for in a table; larger ones: dequantised piece by piece; activations are not rounded"
_BLOCKS = "small batches: a kernel that reads blocks; larger ones: dequantised piece by piece"
DECODINGS = (
    Decoding("int8", ("int8",), _BYTES, _int8, _int8_pieces),
    Decoding("int8_groups", ("int8",), _GROUPS, _grouped, _grouped_pieces, any_groups=True),
    Decoding("int4", ("int4", "uint4"), _GROUPS, _grouped, _grouped_pieces, any_groups=True),
    Decoding("fp8", ("fp8",), _DECODED, _fp8, _fp8_pieces),
    Decoding("fp8_groups", ("fp8",), _GROUPS, _grouped, _grouped_pieces, any_groups=True),
    Decoding("mxfp4", ("mxfp4",), _TABLES, _from_tables, _table_pieces),
    Decoding("blocks", BLOCK_FORMATS, _BLOCKS, _by_ops, _by_ops_pieces),
    Decoding("table4", ("nvfp4", "nl4"), _TABLES, _from_tables, _table_pieces),
)
BY_OPS = Decoding("by_ops", (), "dequantised piece by piece", _by_ops, _by_ops_pieces)
"""For formats that none of these takes; no product of one weight is made so."""
