# SPDX-License-Identifier: Apache-2.0
"""Operands of products of integers, what they stand for in float64, and the kernel in C with them; what rows become is said in plain words here."""

from dataclasses import replace

import torch

import nnfront as nn
from nnfront import ops
from nnfront.backends.cpu.activations import NO_ACTIVATION
from nnfront.backends.cpu.extension import NATIVE, work_bytes
from nnfront.backends.cpu.quantized_gemv import GROUPS, SCALE_KINDS, stored_as
from nnfront.ops.block_rounding import scales_in
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

BESIDE = [("int8", None)] + [(name, group) for name in ("int8", "int4", "uint4") for group in GROUPS]
"""Formats with scales beside the numbers."""
BLOCKS = [(name, FORMATS[name].group_size) for name in BLOCK_FORMATS]
WAYS = BESIDE + BLOCKS
HALF_BLOCK = 128
GUARD = 64


def columns_for(name: str, group: int | None, columns: int) -> int:
    """So many columns, which 32 divides, or others that groups of 128 and halves of blocks divide."""
    return columns if (name, group) in BESIDE and group in (None, 32) else 5 * HALF_BLOCK


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Integers from -127 to 127 times a scale, which the largest element of the row says."""
    scale = x.float().abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x.float() / scale).round().double() * scale.double()


def in_panels(x: torch.Tensor | None, word: int) -> torch.Tensor | None:
    """Of 16 rows so many bytes of the first, of the second and so on, and then what follows of each, but for rows that fill no 16."""
    if x is None:
        return None
    whole = len(x) // 16 * 16
    words = [row.reshape(-1, word).unbind() for row in x[:whole]]
    panels = [words[first : first + 16] for first in range(0, len(words), 16)]
    ordered = [of_row for panel in panels for at in zip(*panel, strict=True) for of_row in at]
    return torch.cat([*ordered, x[whole:].flatten()]).view(x.shape)


def any_blocks(
    name: str, outputs: int, columns: int, size: float, fills: tuple[int, int] | None = None
) -> torch.Tensor:
    """Blocks of any bytes, or of one byte in all numbers and one in all scales, but for the float16 that scales are multiples of: by these numbers and minima are up to 2 * size."""
    block = FORMATS[name].block
    blocks = torch.randint(0, 256, (outputs, block.row_bytes(columns)), dtype=torch.uint8)
    # What a number and a minimum are at most, in units: a scale in int8 times 6 bits with a sign, or scales of 6 bits times 4 or 5 bits.
    most = torch.tensor({"q4_k": (63 * 15, 63), "q5_k": (63 * 31, 63), "q6_k": (128 * 32,)}[name])
    for begin in range(0, blocks.shape[1], block.bytes):
        data = blocks[:, begin : begin + block.bytes]
        numbers = data.shape[1] * block.numbers // block.bytes // HALF_BLOCK * HALF_BLOCK
        scales, units = slice(4, 16), slice(0, 4)
        if name == "q6_k":
            scales, units = slice(numbers * 3 // 4, -2), slice(-2, None)
        if fills is not None:
            data[:], data[:, scales] = fills
        signs = torch.tensor([-1, 1])[torch.randint(2, (outputs, len(most)))]
        unit = signs * (1 + torch.rand(outputs, len(most))) * size / most
        data[:, units] = unit.to(torch.float16).view(torch.uint8)
    return blocks


class Case:
    """Operands, and the weight that they stand for, times `size`: scales in bfloat16 or, if `is_wide`, in float32; blocks that `quantize_blocks` makes or, if `is_wide`, any. Integers are those of `weight` where it is given, as they are stored."""

    def __init__(
        self,
        name: str,
        group: int | None,
        rows: int,
        columns: int,
        outputs: int,
        *,
        is_wide: bool,
        size: float = 1.0,
        weight: torch.Tensor | None = None,
    ) -> None:
        self.format = replace(FORMATS[name], group_size=group)
        self.groups = columns // group if group else 1
        self.x = torch.randn(rows, columns).bfloat16()
        self.scales = self.zeros = None
        if name in BLOCK_FORMATS:
            floats = torch.randn(outputs, columns) * 4 * size
            made = None if is_wide else ops.quantize_blocks.run((floats,), {"format": name})
            self.use_blocks(any_blocks(name, outputs, columns, 4 * size) if made is None else made)
            return
        scales = (torch.rand(outputs, self.groups) / 8 + 0.01) * size
        self.scales = scales if is_wide else scales.bfloat16()
        if name == "int8":
            self.weight = (
                torch.randint(-128, 128, (outputs, columns)).to(torch.int8) if weight is None else weight
            )
            numbers = self.weight.double()
        else:
            some = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8)
            self.weight = some if weight is None else weight
            numbers = torch.stack([self.weight % 16, self.weight // 16], -1).flatten(1).double()
            numbers = numbers if name == "uint4" else (numbers + 8) % 16 - 8
        if name == "uint4":
            self.zeros = torch.randint(0, 256, (outputs, self.groups), dtype=torch.uint8)
            numbers -= self.zeros.double().repeat_interleave(columns // self.groups, 1)
        self.dense = numbers * self.scales.double().repeat_interleave(columns // self.groups, 1)
        self.terms = self.dense.abs()

    def use_blocks(self, blocks: torch.Tensor) -> None:
        """Take these as the weight. What is summed up is as large as numbers and minima before they are subtracted, of which little may be left."""
        self.weight = blocks
        attrs = {"format": self.format.name, "dtype": "float32"}
        self.dense = ops.dequantize_blocks.run((blocks,), attrs).double()
        minima = scales_in(blocks, self.format)[1].double()
        self.terms = (self.dense + minima).abs() + minima.abs()

    def run(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        gate: int = NO_ACTIVATION,
        *,
        is_packed: bool = False,
        is_rounded: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """The product of x, rounded or as it is, of gates the gated one, its result between bytes that must stay as they are; in the packed order of weights that of the same numbers."""
        (rows, columns), outputs = x.shape, len(self.weight) // (1 + (gate != NO_ACTIVATION))
        beside = torch.full((rows * outputs + 2 * GUARD,), 7.0, dtype=dtype)
        sizes = {
            "stored": stored_as(self.format),
            "rows": rows,
            "columns": columns,
            "outputs": outputs,
            "groups": self.groups,
            "scale_kind": 0 if self.scales is None else SCALE_KINDS[self.scales.dtype],
            "gate": gate,
            "is_packed": is_packed,
            "is_rounded": is_rounded,
            "is_wide": dtype == torch.float32,
            "threads": 2,
        }
        work = torch.full((work_bytes("multiply_integers", sizes),), 0xFF, dtype=torch.uint8)
        stored = self.weight, self.scales, self.zeros
        if is_packed:
            stored = in_panels(self.weight, 4), in_panels(self.scales, 1), in_panels(self.zeros, 1)
        NATIVE.multiply_integers(*sizes.values(), *stored, x, bias, added, work, beside[GUARD:])
        assert (beside[:GUARD] == 7).all()
        assert (beside[-GUARD:] == 7).all()
        return beside[GUARD:-GUARD].view(rows, outputs)

    def check(self, y: torch.Tensor, exact: torch.Tensor) -> None:
        """Within the rounding of the result and of a float32 sum of what groups give."""
        sizes = self.x.double().abs() @ self.terms.T
        assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 2.0**-20).all()


def as_stored(session: nn.Session, name: str) -> torch.Tensor | None:
    """A weight that a session holds, in the order of its outputs."""
    found = [(key, tensor) for key, tensor in session.weights.items() if key.startswith(name)]
    if not found or found[0][0] == name:
        return found[0][1] if found else None
    (_, panels), word = found[0], 1 if name.endswith(("scales", "zero_points")) else 4
    rows, size = panels.shape
    whole = rows // 16 * 16
    in_order = panels[:whole].view(rows // 16, size // word, 16, word).transpose(1, 2).reshape(whole, size)
    return torch.cat([in_order, panels[whole:]])


def is_packed(format: QuantFormat, outputs: int, halves: int = 1) -> bool:
    """Whether a weight lies in panels: of whole ones alone where there are gates."""
    return format.block is None and (halves == 1 or outputs % 16 == 0)
