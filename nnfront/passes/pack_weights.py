# SPDX-License-Identifier: Apache-2.0
"""Store weights the way a GPU's kernels read them: the order becomes one more formula, for lifting to move into the transform.

before:
    fused def gated_product[n](x: input float16[n, 4], weight: input float16[6, 4])
            -> float16[n, 3] attrs(activation="silu", kind="linear", region="gated_product", operands=("x", "weight", "bias")) {
        linear: float16[n, 6] = linear(x, weight)
        split: (float16[n, 3], float16[n, 3]) = split(linear, indices_or_sections=2, axis=1)
        gate: float16[n, 3] = split[0]
        up: float16[n, 3] = split[1]
        silu: float16[n, 3] = silu(gate)
        multiply: float16[n, 3] = multiply(silu, up)
        return multiply
    }
    def main[n](x: input float16[n, 4], w: weight float16[6, 4]) -> float16[n, 3] {
        y: float16[n, 3] = @gated_product(x, w)
        return y
    }
after:
    fused def gated_product[n](x: input float16[n, 4], weight: input float16[6, 4])
            -> float16[n, 3] attrs(activation="silu", kind="linear", region="gated_product", operands=("x", "weight", "bias")) {
        linear: float16[n, 6] = linear(x, weight)
        split: (float16[n, 3], float16[n, 3]) = split(linear, indices_or_sections=2, axis=1)
        gate: float16[n, 3] = split[0]
        up: float16[n, 3] = split[1]
        silu: float16[n, 3] = silu(gate)
        multiply: float16[n, 3] = multiply(silu, up)
        return multiply
    }
    fused def interleaved_product[n](x: input float16[n, 4], weight: input float16[6, 4])
            -> float16[n, 3] attrs(activation="silu", kind="linear", region="interleaved_product", operands=("x", "weight", "bias")) {
        reshape: float16[3, 2, 4] = reshape(weight, shape=(3, 2, 4))
        permute_dims: float16[2, 3, 4] = permute_dims(reshape, axes=(1, 0, 2))
        reshape_1: float16[6, 4] = reshape(permute_dims, shape=(6, 4))
        gated_product: float16[n, 3] = @gated_product(x, reshape_1)
        return gated_product
    }
    def main[n](x: input float16[n, 4], w: weight float16[6, 4]) -> float16[n, 3] {
        reshape: float16[2, 3, 4] = reshape(w, shape=(2, 3, 4))
        permute_dims: float16[3, 2, 4] = permute_dims(reshape, axes=(1, 0, 2))
        reshape_1: float16[6, 4] = reshape(permute_dims, shape=(6, 4))
        y: float16[n, 3] = @interleaved_product(x, reshape_1)
        return y
    }

gated_product      gate and up rows alternate: a tile of the product holds both partners; `experts` likewise, for each expert
norm_...           the same regions with a norm of the rows before the product
quantized_product  also gated, by their format: 4-bit weights in the order of `nnfront_kernels.quantized`, values from 0; scales and zero points [K / group, N];
                   float8 weights as they are, with their scales [N, 1]

A region is rewritten only if the operands that are packed depend on weights alone, and are no weights that something else reads as they are: those would be
kept twice, or packed on each call. What the new function computes is said by the
old one over the order undone, so a target without a kernel for it is right as well, if slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from nnfront import ops
from nnfront.ir import (
    Atom,
    Binding,
    Formula,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Mutator,
    Names,
    Packing,
    Scalar,
    TensorType,
    Var,
    WeightLayout,
    tensor_type,
)
from nnfront.ops.constants import constant
from nnfront.passes.base import module_pass
from nnfront.passes.regions import OF_NORM
from nnfront.passes.weight_values import read_as_they_are, weight_values
from nnfront.quant_format import FORMATS, QuantFormat

INT4_GROUPS = (32, 64, 128)
# Byte i of four holds neighbour ORDER[i] (nnfront_kernels.quantized); swapping the middle two undoes itself.
ORDER = (0, 2, 1, 3)


@dataclass(frozen=True)
class _Packing:
    """The region that calls become, how its operands are packed, and how that is undone."""

    region: str
    pack: Mapping[str, Formula]
    unpack: Mapping[str, Formula]


Takes: TypeAlias = Callable[[IRModule, Function, Collection[str]], bool]
"""Whether a kernel runs calls of a fused function, the operands of these names being weights."""


@module_pass(sees_primitive=True)
def pack_weights(
    ir: IRModule, takes: Takes | None = None, layouts: Iterable[WeightLayout] | None = None
) -> IRModule:
    """Rewrite regions whose kernels want weights in an order of their own: in these layouts, or in all that there are.

    `takes` is asked about each region in its new form: one that no kernel runs then keeps its weights as they are, since the order would
    have to be undone on each call. None: all are rewritten.
    """
    names = Names(ir)
    packings: dict[str, _Packing] = {}
    known = tuple(LAYOUTS.values() if layouts is None else layouts)
    for function in ir.functions:
        packing = _packing(function, known) if function.kind == "fused" else None
        if packing is not None and (
            takes is None or takes(ir, _packed(function, packing, Names(ir), ir), packing.pack.keys())
        ):
            packings[function.name] = packing
    if not packings:
        return ir
    kept = read_as_they_are(ir, lambda binding: _packed_operands(binding, ir, packings).values())
    made: dict[str, Function] = {}
    functions: list[Function] = []
    for function in ir.functions:
        if function.kind not in ("public", "private"):
            functions.append(function)
            continue
        packer = _Packer(function, ir, packings, made, names, kept)
        before = len(made)
        new = packer.function(function)
        functions += [*list(made.values())[before:], new]
    return ir.with_functions(functions) if made else ir


def _packed_operands(binding: Binding, ir: IRModule, packings: Mapping[str, _Packing]) -> dict[str, Atom]:
    """The operands of a region that would be packed, by name."""
    call = binding.value
    if not isinstance(call, FunctionCall) or call.function not in packings:
        return {}
    names = [p.name for p in ir[call.function].params]
    wanted = packings[call.function].pack
    return {name: atom for name, atom in zip(names, call.args, strict=True) if name in wanted}


def _packing(function: Function, layouts: Iterable[WeightLayout]) -> _Packing | None:
    """How a fused function's weights are to be stored; None if as they are."""
    for layout in layouts:
        found = layout.packing(function) if layout.of == function.attrs.get("region") else None
        if found is not None:
            return _Packing(layout.region, *found)
    return None


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
        *_PRODUCTS,
        # The same with a norm of the rows before the product.
        *(WeightLayout(OF_NORM + each.of, OF_NORM + each.region, each.packing) for each in _PRODUCTS),
    )
}
"""By the region whose kernels want them. A product of float8 weights wants them as they are, a gated one in turn."""


class _Packer(Mutator):
    """Rewrites one function's calls of regions."""

    def __init__(
        self,
        function: Function,
        ir: IRModule,
        packings: Mapping[str, _Packing],
        made: dict[str, Function],
        names: Names,
        kept: set[str],
    ) -> None:
        self.packed: dict[tuple[Var, str], Var] = {}
        super().__init__(self.packed)
        self.ir = ir
        self.packings = packings
        self.made = made
        self.names = names
        self.local = Names.of(function)
        values = weight_values(function)
        self.movable = {v for v in values.all if values.names.get(v) not in kept}

    def binding(self, binding: Binding) -> list[Binding]:
        call, wanted = binding.value, _packed_operands(binding, self.ir, self.packings)
        if not wanted or not self.movable.issuperset(wanted.values()):
            return list(super().binding(binding))
        assert isinstance(call, FunctionCall)
        packing, callee = self.packings[call.function], self.ir[call.function]
        operands = dict(zip((p.name for p in callee.params), call.args, strict=True))
        if call.function not in self.made:
            self.made[call.function] = _packed(callee, packing, self.names, self.ir)
        bindings: list[Binding] = []
        args = []
        for name, arg in operands.items():
            args.append(
                self._stored(arg, name, packing, binding, bindings) if name in wanted else self.atom(arg)
            )
        new = FunctionCall(self.made[call.function].name, tuple(args))
        return [*bindings, binding.with_value(new)]

    def _stored(
        self, arg: Atom, name: str, packing: _Packing, binding: Binding, bindings: list[Binding]
    ) -> Atom:
        """The operand in its new order: made once in each block."""
        assert isinstance(arg, Var)
        key = (arg, f"{packing.region}.{name}")
        if key not in self.packed:
            builder = FunctionBuilder.of_bindings(self.local, binding.provenance)
            self.packed[key] = packing.pack[name](builder, arg)
            bindings += builder.finish(self.packed[key]).bindings
        return self.packed[key]


def _packed(callee: Function, packing: _Packing, names: Names, ir: IRModule) -> Function:
    """The function over operands in their new order: it undoes the order and calls the old one."""
    builder = FunctionBuilder(names.unique(packing.region), ir)
    args: list[Atom] = []
    stored = FunctionBuilder("")
    for param in callee.params:
        type = param.type
        if param.name in packing.pack:
            type = packing.pack[param.name](stored, stored.param(param.name, param.type, "weight")).type
        args.append(builder.param(param.name, type, param.role))
    for i, param in enumerate(callee.params):
        if param.name in packing.unpack:
            old = args[i]
            assert isinstance(old, Var)
            args[i] = packing.unpack[param.name](builder, old)
    result = builder.emit(FunctionCall(callee.name, tuple(args)), callee.name)
    attrs = {**callee.attrs, "region": packing.region}
    return builder.finish(result, "fused", attrs).with_(is_outlined=callee.is_outlined)
