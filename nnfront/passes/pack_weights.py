# SPDX-License-Identifier: Apache-2.0
"""Store weights the way kernels read them: the order becomes one more formula, for lifting to move into the transform.

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

Which orders there are is in `weight_layouts`.

A region is rewritten only if the operands that are packed depend on weights alone, and are no weights that something else reads as they are: those would be
kept twice, or packed on each call; and of a layout that follows others only if one of these packs the same weights. What the new function computes is said by the
old one over the order undone, so a target without a kernel for it is right as well, if slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

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
    Var,
    WeightLayout,
)
from nnfront.passes.base import Step, module_pass, step_name
from nnfront.passes.weight_layouts import LAYOUTS
from nnfront.passes.weight_values import read_as_they_are, weight_values, weights_read


@dataclass(frozen=True)
class _Packing:
    """The region that calls become, how its operands are packed, and how that is undone."""

    region: str
    pack: Mapping[str, Formula]
    unpack: Mapping[str, Formula]
    follows: bool


Takes: TypeAlias = Callable[[IRModule, Function, Collection[str]], bool]
"""Whether a kernel runs calls of a fused function, the operands of these names being weights."""


@module_pass(sees_primitive=True)
def pack_weights(
    ir: IRModule,
    takes: Takes | None = None,
    layouts: Iterable[WeightLayout] | None = None,
    only_lifted: bool = False,
) -> IRModule:
    """Rewrite regions whose kernels want weights in an order of their own: in these layouts, or in all that there are.

    `takes` is asked about each region in its new form: one that no kernel runs then keeps its weights as they are, since the order would
    have to be undone on each call. None: all are rewritten. `only_lifted`: only where all methods with weights have a transform, to which the order can move.
    """
    if only_lifted and any("transform" not in f.attrs for f in ir.methods if f.weights):
        return ir
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
    leading = {name: packing for name, packing in packings.items() if not packing.follows}
    led = weights_read(ir, lambda binding: _packed_operands(binding, ir, leading).values())
    made: dict[str, Function] = {}
    functions: list[Function] = []
    for function in ir.functions:
        if function.kind not in ("public", "private"):
            functions.append(function)
            continue
        packer = _Packer(function, ir, packings, made, names, kept, led)
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
            return _Packing(layout.region, *found, layout.follows)
    return None


def with_layouts(steps: Iterable[Step], layouts: Iterable[WeightLayout | None], takes: Takes) -> list[Step]:
    """The steps of a pipeline, where weights are packed in these layouts alone, and only for calls that a kernel takes then."""
    pack = partial(pack_weights, takes=takes, layouts=[layout for layout in layouts if layout is not None])
    return [
        partial(pack, **getattr(step, "keywords", {})) if step_name(step) == pack_weights.name else step
        for step in steps
    ]


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
        led: set[str],
    ) -> None:
        self.packed: dict[tuple[Var, Formula], Var] = {}
        super().__init__(self.packed)
        self.ir = ir
        self.packings = packings
        self.made = made
        self.names = names
        self.local = Names.of(function)
        values = weight_values(function)
        self.movable = {v for v in values.all if values.names.get(v) not in kept}
        self.led = {v for v, name in values.names.items() if name in led}

    def binding(self, binding: Binding) -> list[Binding]:
        call, wanted = binding.value, _packed_operands(binding, self.ir, self.packings)
        if not wanted or not self.movable.issuperset(wanted.values()):
            return list(super().binding(binding))
        assert isinstance(call, FunctionCall)
        packing, callee = self.packings[call.function], self.ir[call.function]
        if packing.follows and not self.led.issuperset(wanted.values()):
            return list(super().binding(binding))
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
        key = (arg, packing.pack[name])
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
