# SPDX-License-Identifier: Apache-2.0
"""The orders in which kernels want weights (`Kernel.layout`), as formulas over them, and how each is undone.

gated_product      gate and up rows alternate: a tile of the product holds both partners; `experts` likewise, for each expert
norm_...           the same regions with a norm of the rows before the product
quantized_product  also gated, by their format: 4-bit weights in the order of `nnfront_kernels.quantized`, values from 0; scales and zero points [K / group, N];
                   float8 weights as they are, with their scales [N, 1]
int8_activations_product
                   also gated, on a CPU, of integers: panels of PANEL outputs, in which four bytes of each follow one another, [N / PANEL, bytes / 4, PANEL, 4];
                   scales and zero points of groups [N / PANEL, K / group, PANEL]; outputs that fill no panel lie behind, one after the other
                   and quantized_product likewise, where a CPU multiplies bfloat16 in pairs
quantized_embedding
                   likewise, so that a head that is the embedding as well is stored once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from nnfront import ops
from nnfront.ir import (
    Formula,
    Function,
    FunctionBuilder,
    Packing,
    Scalar,
    TensorType,
    Var,
    WeightLayout,
    tensor_type,
)
from nnfront.ops.constants import constant
from nnfront.passes.regions import OF_NORM
from nnfront.quant_format import FORMATS, QuantFormat

INTEGERS = frozenset({"int8", "int4", "uint4"})
INT4_GROUPS = (32, 64, 128)
PANEL, WORD = 16, 4
# Byte i of four holds neighbour ORDER[i] (nnfront_kernels.quantized); swapping the middle two undoes itself.
ORDER = (0, 2, 1, 3)


def _has_product(function: Function) -> bool:
    """Whether it is of a plain product with a weight whose sizes are known."""
    weight = next((p.type for p in function.params if p.name == "weight"), None)
    is_known = isinstance(weight, TensorType) and weight.static_shape is not None
    return is_known and function.attrs.get("kind") == "linear"


def _gated_experts(function: Function) -> Packing | None:
    if function.attrs.get("interleaved") or not function.attrs.get("gated", True):
        return None
    names = ("gate_up", "gate_up_bias")
    return dict.fromkeys(names, _interleave_each), dict.fromkeys(names, _apart_each)


def _gated_product(function: Function) -> Packing | None:
    names = ("weight", "bias") if _has_product(function) else None
    return names and (dict.fromkeys(names, _interleave), dict.fromkeys(names, _apart))


def _quantized(packing: Callable[[QuantFormat], Packing | None], *formats: str) -> WeightLayout:
    """The layout of a product with a weight in one of these formats, of which there is a packing."""

    def of(function: Function) -> Packing | None:
        if not _has_product(function) or function.attrs.get("format") not in formats:
            return None
        format = QuantFormat.of(function.attrs)
        known = FORMATS[format.name]
        return packing(format) if replace(format, group_size=known.group_size) == known else None

    return WeightLayout("quantized_product", f"{formats[0]}_product", of)


def _gated(plain: WeightLayout) -> WeightLayout:
    """The same with gate and up rows that alternate."""

    def after(first: Formula | None, second: Formula | None) -> Formula:
        def both(builder: FunctionBuilder, x: Var) -> Var:
            for step in (first, second):
                x = x if step is None else step(builder, x)
            return x

        return both

    def packing(function: Function) -> Packing | None:
        found = plain.packing(function)
        if found is None:
            return None
        names, (pack, unpack) = ("weight", "scales", "zero_points", "bias"), found
        return (
            {name: after(_interleave, pack.get(name)) for name in names},
            {name: after(unpack.get(name), _apart) for name in names},
        )

    of, region = (name.replace("product", "gated_product") for name in (plain.of, plain.region))
    return WeightLayout(of, region, packing)


def _exchange(builder: FunctionBuilder, x: Var, *, is_apart: bool, axis: int = 0) -> Var:
    """Have rows alternate that are in two halves, [2 F, ...] with gate above up, or put such rows apart again."""
    shape = tensor_type(x).shape
    before, size, after = shape[:axis], shape[axis], shape[axis + 1 :]
    assert isinstance(size, int)
    parts = (size // 2, 2) if is_apart else (2, size // 2)
    apart = builder.call(ops.reshape, x, shape=(*before, *parts, *after))
    axes = (*range(axis), axis + 1, axis, *range(axis + 2, axis + 2 + len(after)))
    swapped = builder.call(ops.permute_dims, apart, axes=axes)
    return builder.call(ops.reshape, swapped, shape=shape)


_interleave, _apart = partial(_exchange, is_apart=False), partial(_exchange, is_apart=True)
_interleave_each, _apart_each = partial(_interleave, axis=1), partial(_apart, axis=1)  # of each expert


def _transpose(builder: FunctionBuilder, x: Var) -> Var:
    return builder.call(ops.permute_dims, x, axes=(1, 0))


def _panels(builder: FunctionBuilder, x: Var, *, word: int, is_apart: bool) -> Var:
    """Have words of PANEL rows [N, K] follow one another, or put such rows apart again; rows that fill no panel stay."""
    rows, size = tensor_type(x).shape
    assert isinstance(rows, int) and isinstance(size, int)
    whole = rows // PANEL * PANEL
    panels = x if whole == rows else builder.call(ops.getitem, x, index=(slice(whole),))
    parts = (size // word, PANEL) if is_apart else (PANEL, size // word)
    apart = builder.call(ops.reshape, panels, shape=(rows // PANEL, *parts, word))
    swapped = builder.call(ops.permute_dims, apart, axes=(0, 2, 1, 3))
    ordered = builder.call(ops.reshape, swapped, shape=(whole, size))
    if whole == rows:
        return ordered
    behind = builder.call(ops.getitem, x, index=(slice(whole, None),))
    return builder.call(ops.concat, ordered, behind, dim=0)


# By the bytes of a word: a weight that several functions pack is stored once, as the formula is the same.
_IN_PANELS, _OUT_OF_PANELS = (
    {word: partial(_panels, word=word, is_apart=is_apart) for word in (1, WORD)} for is_apart in (False, True)
)


def _integer_panels(function: Function, *, halves: int = 1) -> Packing | None:
    """A weight in integers, of which each of two `halves` is whole panels; not in blocks, which are read where they lie."""
    types = {p.name: p.type for p in function.params}
    weight, scales = types["weight"], types.get("scales")
    assert isinstance(weight, TensorType)
    if (
        not isinstance(scales, TensorType)
        or function.attrs.get("format") not in INTEGERS
        or weight.static_shape is None
        or weight.static_shape[0] < PANEL
        or weight.static_shape[1] % WORD
        or (halves > 1 and weight.static_shape[0] % (halves * PANEL))
    ):
        return None
    words = {"weight": WORD}
    if scales.static_shape is not None and scales.static_shape[1] > 1:
        words |= {"scales": 1, "zero_points": 1}
    pack, unpack = ({name: of[word] for name, word in words.items()} for of in (_IN_PANELS, _OUT_OF_PANELS))
    return pack, unpack


def _fp8(format: QuantFormat) -> Packing | None:
    """As they are."""
    return None if format.group_size else ({}, {})


def _int8(format: QuantFormat) -> Packing:
    transposed = dict.fromkeys(("scales", "zero_points"), _transpose)
    return transposed, transposed


def _int4(format: QuantFormat) -> Packing | None:
    """From the order of `pack_int4` (neighbours in one byte) to halves of a group in one byte, middle bytes exchanged."""
    group, signed = format.group_size, format.symmetric
    if group not in INT4_GROUPS:
        return None

    def pack(builder: FunctionBuilder, x: Var) -> Var:
        nibbles = builder.call(ops.unpack_int4, x, axis=1, signed=signed)
        if signed:
            nibbles = builder.call(ops.astype, builder.call(ops.add, nibbles, Scalar(8)), dtype="uint8")
        return _through(builder, nibbles, (2, group // 8, 4), (0, 1, 3, 4, 2), last=3)

    def unpack(builder: FunctionBuilder, x: Var) -> Var:
        nibbles = builder.call(ops.unpack_int4, x, axis=1, signed=False)
        if signed:
            nibbles = builder.call(ops.subtract, builder.call(ops.astype, nibbles, dtype="int8"), Scalar(8))
        return _through(builder, nibbles, (group // 8, 4, 2), (0, 1, 4, 2, 3), last=4)

    def _through(
        builder: FunctionBuilder, nibbles: Var, parts: tuple[int, ...], axes: tuple[int, ...], last: int
    ) -> Var:
        """Reorder the nibbles of each group; `last` is the axis of the four neighbours afterwards."""
        rows, depth = tensor_type(nibbles).shape
        grouped = builder.call(ops.reshape, nibbles, shape=(rows, -1, *parts))
        moved = builder.call(ops.permute_dims, grouped, axes=axes)
        chosen = builder.call(ops.take, moved, constant(torch.tensor(ORDER)), axis=last)
        return builder.call(ops.pack_int4, builder.call(ops.reshape, chosen, shape=(rows, depth)), axis=1)

    transposed = dict.fromkeys(("scales", "zero_points"), _transpose)
    return {"weight": pack, **transposed}, {"weight": unpack, **transposed}


_PLAIN = (_quantized(_int8, "int8"), _quantized(_int4, "int4", "uint4"))
_PRODUCTS = (
    WeightLayout("gated_product", "interleaved_product", _gated_product),
    *_PLAIN,
    *map(_gated, (*_PLAIN, _quantized(_fp8, "fp8"))),
)
LAYOUTS = {
    layout.region: layout
    for layout in (
        WeightLayout("experts", "interleaved_experts", _gated_experts),
        WeightLayout("quantized_embedding", "packed_quantized_embedding", _integer_panels, follows=True),
        *_PRODUCTS,
        # The same with a norm of the rows before the product.
        *(WeightLayout(OF_NORM + each.of, OF_NORM + each.region, each.packing) for each in _PRODUCTS),
        *(
            WeightLayout(f"{of}_{product}", f"packed_{of}_{product}", partial(_integer_panels, halves=halves))
            for of in ("int8_activations", "quantized")
            for product, halves in (("product", 1), ("gated_product", 2))
        ),
    )
}
"""By the region whose kernels want them. A product of float8 weights wants them as they are, a gated one in turn."""
