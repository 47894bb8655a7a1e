# SPDX-License-Identifier: Apache-2.0
"""Products with weights in 8 or 4 bits, on a CPU, and what comes after them in their regions.

Few rows of bfloat16 go to a kernel in C that reads the codes at the speed of memory. For all others pieces of the weight are decoded as they are
multiplied, never the weight as a whole. Torch has a kernel of its own for few rows of int8, which is next where there is none in C.

Shapes: x [..., columns], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups], bias [outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from nnfront.backends.cpu import float8
from nnfront.backends.cpu.activations import GATES, activation, activation_name
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import FewRowsQuantized, Multiply, Stored, find
from nnfront.lower import Run

# Elements of a weight that are decoded at a time, 8 MiB of bfloat16. 512 rows with 2048 x 8192 in 4 bits, two threads: 49 ms, and 66 with a
# quarter of it, since a product with few outputs is a slow one; the whole weight in bfloat16 takes 43.
PIECE = 1 << 22
# Rows up to which torch's product with int8 weights is the faster way.
INT8_ROWS = 8

# How weights are stored, as the names of kernels begin.
KINDS = ("int8", "int8_groups", "int4", "fp8")

Multiplier: TypeAlias = Callable[[Run], Multiply]


def few_rows(run: Run) -> FewRowsQuantized | None:
    """Return the kernel in C for a region's weight, if there is one."""
    group, signed = run.attrs.get("group_size"), run.attrs.get("signed")
    stored: Stored
    if run.kernel.startswith("fp8"):
        stored = "fp8"
    elif signed is not None:
        stored = "int4" if signed else "uint4"
    else:
        stored = "int8" if group is None else "int8_groups"
    return find(NATIVE, stored, group)


def step_of(columns: int) -> int:
    """Return how many outputs a piece has."""
    return max(PIECE // max(columns, 1), 1)


def _few_or(run: Run, others: Multiply) -> Multiply:
    """The kernel in C for what it takes."""
    few = few_rows(run)
    if few is None:
        return others
    takes, in_c = few.takes, few.multiply

    def multiply(*operands: Any) -> torch.Tensor:
        return (in_c if takes(*operands) else others)(*operands)

    return multiply


def scaled(decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Multiply:
    """A product with a weight that has a scale for each output: products with codes are scaled. float16 is computed in float32, which holds sums of those."""

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
            codes = weight[first : first + step]
            # No name for what is decoded: it would keep one piece while the next is made.
            product = F.linear(wide, decode(codes, wide.dtype))
            torch.mul(product, scales[first : first + step].view(-1), out=y.narrow(-1, first, len(codes)))
            del product
        return y if bias is None else y.add_(bias)

    return multiply


def fp8(run: Run) -> Multiply:
    """float8_e4m3fn with a float32 scale for each output."""
    return _few_or(run, scaled(float8.decode))


def int8(run: Run) -> Multiply:
    """int8 with a scale for each output.

    Torch's kernel, 9728 x 896 in bfloat16, one thread: 1 row 1.3 ms, 8 rows 3.4; oneDNN's product with a bfloat16 weight takes 2.3 and 2.9.
    """
    in_pieces = scaled(torch.Tensor.to)

    def others(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not (0 < len(rows) <= INT8_ROWS and weight.is_contiguous()):
            return in_pieces(x, weight, scales, zeros, bias)
        y = torch._weight_int8pack_mm(rows.contiguous(), weight, scales.view(-1))
        y = y.view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    return _few_or(run, others)


def grouped(run: Run) -> Multiply:
    """int8, or two 4-bit integers in a byte, with a scale for each group of columns, and with or without zero points."""
    signed = run.attrs.get("signed")

    def others(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs, columns = len(weight), x.shape[-1]
        y, step = x.new_empty((*x.shape[:-1], outputs)), step_of(columns)
        for first in range(0, outputs, step):
            some = slice(first, first + step)
            subtract = None if zeros is None else zeros[some]
            # No names for what is made: they would keep one piece while the next is made.
            y.narrow(-1, first, min(step, outputs - first)).copy_(
                F.linear(x, _dequantized(weight[some], scales[some], subtract, signed))
            )
        return y if bias is None else y.add_(bias)

    return _few_or(run, others)


def _dequantized(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, signed: bool | None
) -> torch.Tensor:
    """(weight - zeros) * scales, rounded once: each difference of codes is exact in the dtype of the scales."""
    wide = (weight if signed is None else _unpacked(weight, signed)).to(scales.dtype)
    groups = wide.view(*scales.shape, -1)
    if zeros is not None:
        groups.sub_(zeros.to(scales.dtype).unsqueeze(-1))
    groups.mul_(scales.unsqueeze(-1))
    return wide


def _unpacked(weight: torch.Tensor, signed: bool) -> torch.Tensor:
    """Each byte becomes the two of a 16-bit integer, the low half first as in memory."""
    pairs = weight.to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    if not signed:
        return pairs.view(torch.uint8)
    return pairs.view(torch.int8).bitwise_xor_(8).sub_(8)


def product(multiplier: Multiplier) -> Callable[[Run], Callable[..., Any]]:
    """A kernel that multiplies so, and does what comes after it."""

    def make(run: Run) -> Callable[..., Any]:
        multiply, finish = multiplier(run), _finish(run)
        few = few_rows(run) if only_adds(run) else None

        def quantized_product(
            x: torch.Tensor,
            weight: torch.Tensor,
            scales: torch.Tensor,
            zeros: torch.Tensor | None,
            bias: torch.Tensor | None,
            scale: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> torch.Tensor:
            if few and scale is None and few.takes(x, weight, scales, zeros, bias, residual):
                return few.multiply(x, weight, scales, zeros, bias, residual)
            return finish(multiply(x, weight, scales, zeros, bias), scale, residual)

        return quantized_product

    return make


def only_adds(run: Run) -> bool:
    """Whether nothing but a residual comes after a product, if anything does; a scale that is a tensor aside."""
    return not {"activation", "scale", "dtype"}.intersection(run.attrs)


def _finish(run: Run) -> Callable[..., torch.Tensor]:
    """What comes after a product, in the order in which regions have it: activation, scale, residual, cast."""
    attrs = run.attrs
    activate = activation(run) if "activation" in attrs else None
    factor = attrs.get("scale")
    dtype: torch.dtype | None = getattr(torch, attrs["dtype"]) if "dtype" in attrs else None

    def finish(y: torch.Tensor, scale: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        y = y if activate is None else activate(y)
        by = factor if scale is None else scale
        y = y if by is None else y * by
        y = y if residual is None else y + residual
        return y if dtype is None else y.to(dtype)

    return finish


def gated_product(multiplier: Multiplier) -> Callable[[Run], Callable[..., Any]]:
    """A kernel for activation(gate) * up by such products, gate and up the halves of one weight; in C, and of one row, both at once."""

    def make(run: Run) -> Callable[..., Any]:
        multiply, activate = multiplier(run), activation(run)
        few = few_rows(run) if activation_name(run) in GATES else None

        def quantized_gated_product(
            x: torch.Tensor,
            weight: torch.Tensor,
            scales: torch.Tensor,
            zeros: torch.Tensor | None,
            bias: torch.Tensor | None,
        ) -> torch.Tensor:
            if few and few.takes(x, weight, scales, zeros, bias):
                return gate(few.multiply(x, weight, scales, zeros, bias), activation_name(run))
            half = len(weight) // 2
            if x.numel() == x.shape[-1]:
                both = multiply(x, weight, scales, zeros, bias)
                return activate(both.narrow(-1, 0, half)).mul_(both.narrow(-1, half, half))

            def part(of: slice) -> torch.Tensor:
                zero, added = (None if t is None else t[of] for t in (zeros, bias))
                return multiply(x, weight[of], scales[of], zero, added)

            return activate(part(slice(half))).mul_(part(slice(half, None)))

        return quantized_gated_product

    return make


def gate(both: torch.Tensor, name: str) -> torch.Tensor:
    """activation(first half) * second half of few rows, by the kernel in C."""
    assert NATIVE is not None
    *rows, width = both.shape
    y = torch.empty([*rows, width // 2], dtype=torch.bfloat16)
    NATIVE.gate(both.data_ptr(), y.data_ptr(), both.numel() // max(width, 1), width // 2, GATES.index(name))
    return y
