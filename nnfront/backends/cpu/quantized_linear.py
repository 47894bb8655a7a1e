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

from nnfront import dtypes
from nnfront.backends.cpu import float8
from nnfront.backends.cpu.activations import GATES, activation, activation_name
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import FewRowsQuantized, Multiply, Stored, find
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layout

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
    NATIVE.gate(both.numel() // max(width, 1), width // 2, GATES.index(name), both, y)
    return y


def _refusal(run: Run, context: Context, layout: str, scale: str | None = None) -> str:
    """Why no kernel takes a weight; `layout` is the reason that its layout gives, `scale` the dtype of scales if not that of x."""
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    if layout:
        return layout
    x, _, scales, *_ = run.inputs
    dtype, found = context.tensor(x).dtype, context.tensor(scales).dtype
    if dtype not in ("float32", "float16", "bfloat16"):
        return f"x is {dtype}"
    return ACCEPTED if found == (scale or dtype) else f"scales are {found}, not {scale or dtype}"


def _per_channel(stored: str, scale: str | None = None) -> Callable[[Run, Context], str]:
    """Weights in `stored` with one scale for each output, in `scale` or, if None, in the dtype of x."""

    def accepts(run: Run, context: Context) -> str:
        attrs, dtype = run.attrs, context.tensor(run.inputs[1]).dtype
        if dtype != stored:
            return f"the weight is {dtype}"
        is_single = attrs["axis"] == 1 and not {"packed_axis", "group_size"}.intersection(attrs)
        layout = (
            ""
            if is_single and context.is_none(run.inputs[3])
            else "the weight has no single scale for each output"
        )
        return _refusal(run, context, layout, scale)

    return accepts


def _in_groups(stored: str) -> Callable[[Run, Context], str]:
    """Weights in `stored`, 4 bits if it is uint8, with scales for groups along the input axis, in the dtype of x."""

    def accepts(run: Run, context: Context) -> str:
        attrs, dtype = run.attrs, context.tensor(run.inputs[1]).dtype
        if dtype != stored or (stored == "uint8") != ("packed_axis" in attrs):
            return f"the weight is {dtype}, and not in {4 if stored == 'uint8' else 8} bits"
        is_along = attrs["axis"] == 1 == attrs.get("packed_axis", 1)
        return _refusal(run, context, "" if is_along else "groups or pairs are not along the input axis")

    return accepts


def _dequantized_pieces(
    run: Run, x: Layout, weight: Layout, scales: Layout, zeros: Layout | None, outputs: int
) -> int:
    """The most of the moments in which a piece is unpacked, converted, made smaller by its zero points, multiplied; nothing in C."""
    columns, item = x.shape[-1], x.item
    rows = x.count // max(columns, 1)
    if _runs_in_c(run, x):
        return 0
    piece = min(step_of(columns), outputs)
    decoded, product = piece * columns, rows * piece
    if not run.kernel.startswith(("int4", "int8_groups")):
        return _scaled_pieces(run, x, decoded, product)
    unpacked = decoded if weight.dtype == "uint8" else 0
    subtracted = 0 if zeros is None else piece * scales.shape[-1]
    return max(2 * unpacked, unpacked + item * decoded, item * (decoded + max(subtracted, product)))


def _runs_in_c(run: Run, x: Layout) -> bool:
    """Whether the kernel in C takes these rows."""
    few = few_rows(run)
    return few is not None and x.dtype == "bfloat16" and 0 < x.count <= few.most * x.shape[-1]


def _scaled_pieces(run: Run, x: Layout, decoded: int, product: int) -> int:
    """The most of three moments: a piece is decoded, multiplied, its product scaled in float32. Beside it x in float32, if it is float16."""
    is_fp8 = run.kernel.startswith("fp8")
    if not is_fp8 and 0 < x.count <= INT8_ROWS * x.shape[-1]:
        return 0  # torch's kernel
    item, converted = {"float32": (4, 0), "float16": (4, 4), "bfloat16": (2, 8 if is_fp8 else 0)}[x.dtype]
    moved = 2 * decoded if is_fp8 and item == 4 else 0
    most = max(item * decoded + moved, item * (decoded + product), (item + converted) * product)
    return most + (4 * x.count if x.dtype == "float16" else 0)


def _product_bytes(
    run: Run,
    x: Layout,
    weight: Layout,
    scales: Layout,
    zeros: Layout | None,
    bias: Layout | None,
    scale: Layout | None,
    residual: Layout | None,
) -> int:
    """The pieces; the whole product, unless it is the result because nothing comes after it that takes new memory."""
    attrs, pieces = run.attrs, _dequantized_pieces(run, x, weight, scales, zeros, weight.shape[0])
    is_new = attrs.get("activation", "silu").startswith("gelu") or "scale" in attrs or "dtype" in attrs
    in_c = _runs_in_c(run, x) and only_adds(run)
    if scale is None and (in_c or (not is_new and residual is None)):
        return pieces
    count = x.count // max(x.shape[-1], 1) * weight.shape[0]
    product, result = count * x.item, count * dtypes.size_bytes(attrs.get("dtype", x.dtype))
    return max(pieces + product - result, product)


def _gated_product_bytes(
    run: Run, x: Layout, weight: Layout, scales: Layout, zeros: Layout | None, bias: Layout | None
) -> int:
    """The pieces and one of gate and up; of one row pieces of both; in C both."""
    outputs = weight.shape[0]
    half = x.count // max(x.shape[-1], 1) * (outputs // 2) * x.item
    if _runs_in_c(run, x) and activation_name(run) in GATES:
        return 2 * half
    if x.count != x.shape[-1]:
        return _dequantized_pieces(run, x, weight, scales, zeros, outputs // 2) + half
    pieces = _dequantized_pieces(run, x, weight, scales, zeros, outputs) + half
    return max(pieces, 2 * half) if _names_gelu(run) else pieces


def _names_gelu(run: Run) -> bool:
    """Whether an activation is not made in place."""
    return "approximate" in run.attrs or run.attrs["activation"].startswith("gelu")


_BYTES = "few rows: a kernel that reads a byte for each weight; more rows: decoded piece by piece, scales on the result"
_DECODED = "few rows: a kernel that reads codes; more rows: decoded piece by piece, by moving bits; activations are not rounded"
_GROUPS = "few rows: a kernel that reads codes, and scales the sums of groups; more rows: dequantised piece by piece"
_FORMATS = (
    ("int8", int8, _BYTES, _per_channel("int8")),
    ("int8_groups", grouped, _GROUPS, _in_groups("int8")),
    ("int4", grouped, _GROUPS, _in_groups("uint8")),
    ("fp8", fp8, _DECODED, _per_channel("float8_e4m3fn", "float32")),
)
_SHAPES = (("product", product, _product_bytes), ("gated_product", gated_product, _gated_product_bytes))
KERNELS = tuple(
    Kernel(f"{name}_{shape}", f"quantized_{shape}", make(multiply), why, accepts, workspace=Workspace(held))
    for shape, make, held in _SHAPES
    for name, multiply, why, accepts in _FORMATS
)
