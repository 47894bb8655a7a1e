# SPDX-License-Identifier: Apache-2.0
"""Quantise the weights of linear products: that is one more formula, which lifting moves to load time.

example: quantize_weights(ir, "int4:2")
before:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] {
        y: float32[n, 6] = linear(x, w)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] attrs(derived=("w.int4", "w.scales")) {
        quantize: (int8[6, 4], float32[6, 2]) = quantize(w, bits=4, group_size=2, axis=1, fit=True)
        quantize_1: int8[6, 4] = quantize[0]
        w.scales: float32[6, 2] = quantize[1]
        w.int4: uint8[6, 2] = pack_int4(quantize_1, axis=1)
        unpack_int4: int8[6, 4] = unpack_int4(w.int4, axis=1)
        dequantize: float32[6, 4] = dequantize(unpack_int4, w.scales, group_size=2, axis=1)
        y: float32[n, 6] = linear(x, dequantize)
        return y
    }

Run it before lifting, which keeps the stored values as it keeps tensors that a module derives. Taken are weights of products, of experts (`moe_mlp`), and tables
whose rows are taken: rows are gathered as they are stored, and then dequantised, so an embedding that is the head's weight too is stored once. `nnfront.passes.quantizing` decides
which, and in which format. `matmul` with a matrix of weights becomes `linear` with its transpose.

A function that several layers share becomes several where their weights differ in format.

leaves:  routers, whose products choose experts; vectors; weights that other ops read, or in two orders; what is dequantised already, so twice is once.
With the moments of inputs that weights are multiplied with (`input_moments`), `quantize_calibrated` takes the place of `quantize`; they are weights of the method, called
`calibration.` and the weight's name.

raises:  PassError for a format that does not exist, for groups that it does not come in, and for a pattern that fits no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nnfront import ops
from nnfront.ir import (
    Binding,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Mutator,
    Names,
    Param,
    Projection,
    TensorType,
    Var,
    canonical_call,
    tensor_type,
    walk_bindings,
)
from nnfront.ops.encoded import Encoded
from nnfront.passes.base import module_pass
from nnfront.passes.inline import inline
from nnfront.passes.quantizing.choose import NO_MOMENTS, Wanted, choose
from nnfront.passes.quantizing.reads import taken
from nnfront.passes.quantizing.report import QuantizeReport
from nnfront.passes.quantizing.scheme import QuantScheme, scheme_of
from nnfront.passes.quantizing.shared_scales import with_shared_scales
from nnfront.passes.transpose_weights import transposed
from nnfront.quant_format import FORMATS, QuantFormat

Formats = tuple[Wanted | None, ...]
"""For each of the operands `taken` in a function and in those that it calls, in order: what it is stored in, None if it stays."""

MOMENTS = "calibration."
"""What the names of moments begin with, in front of the name of the weight."""


@module_pass()
def quantize_weights(
    ir: IRModule, scheme: str | QuantScheme, moments: Mapping[str, TensorType] = NO_MOMENTS
) -> IRModule:
    """Quantise weights as a scheme says, or to one format; `quantize_weights.report(ir, scheme)` says beforehand what becomes of each.

    moments: types of the moments of inputs, [blocks, size, size] float32, by the names of the weights that are multiplied with them.
    """
    chosen = choose(ir, scheme_of(scheme), moments).in_order
    if not any(map(any, chosen.values())):
        return ir
    if moments:  # which are of one weight each, where a function of several layers has one for all
        ir = inline.rewrite(ir, [f.name for f in ir.functions if f.kind == "private"])
    variants = _Variants(ir, moments)
    methods = {method.name: variants.function(method, chosen[method.name]) for method in ir.methods}
    private = ((name, f) for (name, _), f in variants.made.items() if name not in methods)
    return ir.with_versions(methods, private)


@quantize_weights.reports
def _report(
    ir: IRModule, scheme: str | QuantScheme, moments: Mapping[str, TensorType] = NO_MOMENTS
) -> QuantizeReport:
    """Say what becomes of each weight that stays in memory, and its bytes. Printable."""
    scheme = scheme_of(scheme)
    return QuantizeReport(scheme, choose(ir, scheme, moments).weights)


class _Variants:
    """The functions of a module, each once for each choice of formats among its callers."""

    def __init__(self, ir: IRModule, moments: Mapping[str, TensorType]) -> None:
        self.ir, self.moments = ir, moments
        self.names = Names(ir)
        self.counts: dict[str, int] = {}
        self.made: dict[tuple[str, Formats], Function] = {}

    def function(self, function: Function, formats: Formats) -> Function:
        """Return a function with its weights in these formats."""
        key = function.name, formats
        if key not in self.made:
            is_first = all(name != function.name for name, _ in self.made)
            new = _Quantizing(function, iter(formats), self).function(function) if any(formats) else function
            self.made[key] = new if is_first else new.with_(name=self.names.unique(function.name))
        return self.made[key]

    def called(self, name: str, formats: Iterator[Wanted | None]) -> str:
        """Return the name of a private function with its weights in the next of these formats."""
        callee = self.ir[name]
        if callee.kind != "private":
            return name
        return self.function(callee, tuple(next(formats) for _ in range(self.count(callee)))).name

    def count(self, function: Function) -> int:
        """Return how many operands are `taken` in a function and in those that it calls."""
        if function.name not in self.counts:
            values = [binding.value for binding in walk_bindings(function.bindings)]
            calls = [self.ir[v.function] for v in values if isinstance(v, FunctionCall)]
            inside = sum(self.count(callee) for callee in calls if callee.kind == "private")
            self.counts[function.name] = sum(len(taken(value)) for value in values) + inside
        return self.counts[function.name]


def _group(format: QuantFormat, weight: Var) -> int | None:
    """The size of groups, one for each output being said as one of all inputs where None would be the size of the format."""
    depth = tensor_type(weight).shape[-1]
    assert isinstance(depth, int)
    return format.group_size or (depth if FORMATS[format.name].group_size else None)


class _Quantizing(Mutator):
    """Rewrites one function."""

    def __init__(self, function: Function, formats: Iterator[Wanted | None], variants: _Variants) -> None:
        self.stored: dict[Var, Encoded] = {}
        self.read: dict[Var, Var] = {}
        self.transposed: dict[Var, Var] = {}
        super().__init__(self.stored, self.read, self.transposed)
        self.formats, self.variants = formats, variants
        self.names = Names.of(function)
        self.made = {b.var: b for b in walk_bindings(function.bindings)}
        self.derived: list[str] = []
        self.moments: dict[str, Param] = {}

    def function(self, function: Function) -> Function:
        new = super().function(function)
        if not self.derived:
            return new
        derived = (*function.attrs.get("derived", ()), *sorted(self.derived))
        params = (*new.params, *self.moments.values())
        return new.with_(params=params, attrs={**function.attrs, "derived": derived})

    def binding(self, binding: Binding) -> Sequence[Binding]:
        call = binding.value
        if isinstance(call, FunctionCall):
            name = self.variants.called(call.function, self.formats)
            called = call if name == call.function else FunctionCall(name, call.args)
            return super().binding(binding.with_value(called))
        wanted = [(operand, next(self.formats)) for operand in taken(call)]
        if not any(each for _, each in wanted):
            return super().binding(binding)
        assert isinstance(call, Call)
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        if call.op is ops.take:
            ((table, each),) = wanted
            places = call.args[1]
            assert isinstance(table, Var) and each is not None and places is not None
            rows = self._stored(builder, table, each).rows(builder, places)
            found = rows.dense(builder, tensor_type(table).dtype)
            *bindings, last = builder.finish(found).bindings
            return [*bindings, binding.with_value(last.value)]
        read: dict[Var, Var] = {}
        for weight, each in wanted:
            if each is not None:
                assert isinstance(weight, Var)
                read[weight] = self._dequantized(builder, self._matrix(builder, weight, call), each)
        args = tuple([read.get(arg, arg) if isinstance(arg, Var) else arg for arg in call.args])
        is_matmul = call.op is ops.matmul
        new = Call(ops.linear, (*args, None), call.attrs) if is_matmul else Call(call.op, args, call.attrs)
        return [*builder.finish(binding.var).bindings, binding.with_value(new)]

    def _matrix(self, builder: FunctionBuilder, weight: Var, call: Call) -> Var:
        """The weight in the order [outputs, inputs]."""
        if call.op is not ops.matmul:
            return weight
        if weight not in self.transposed:
            self.transposed[weight] = transposed(builder, weight, self.made)
        return self.transposed[weight]

    def _dequantized(self, builder: FunctionBuilder, weight: Var, wanted: Wanted) -> Var:
        """The weight after it has been stored and read back."""
        if weight not in self.read:
            stored = self._stored(builder, weight, wanted)
            self.read[weight] = stored.dense(builder, tensor_type(weight).dtype)
        return self.read[weight]

    def _stored(self, builder: FunctionBuilder, weight: Var, wanted: Wanted) -> Encoded:
        """The weight as it is stored, under names that begin with its own."""
        if weight in self.stored:
            return self.stored[weight]
        format = wanted.format
        names = [f"{weight.name}.{part}" for part in format.parts]
        if format.shared_outputs != 1:
            moments = None if wanted.moments is None else self._moments(wanted.moments)
            parts = with_shared_scales(builder, weight, format, names, moments)
        elif format.block is not None:
            parts = [self._rounded(builder, weight, wanted, names[0])]
        else:
            found = self._rounded(builder, weight, wanted)
            hints = ["quantize", *names[1:]] if format.packing is not None else names
            parts = [builder.emit(Projection(found, i), hint) for i, hint in enumerate(hints)]
            if format.packing is not None:
                packed = canonical_call(ops.pack_int4, parts[:1], {"axis": tensor_type(weight).ndim - 1})
                parts[0] = builder.emit(packed, names[0])
        self.derived += [part.name for part in parts]
        stored = replace(format, group_size=_group(format, weight))
        self.stored[weight] = Encoded(stored, parts[0]).with_parts(parts)
        return self.stored[weight]

    def _rounded(self, builder: FunctionBuilder, weight: Var, wanted: Wanted, name: str = "") -> Var:
        """The weight in its format: blocks under the name, or all of its parts."""
        format = wanted.format
        args: list[Var | Param | None] = [weight]
        attrs: dict[str, Any] = {"format": format.name}
        if format.block is None:
            attrs["group_size"] = _group(format, weight)
        op = ops.quantize if format.block is None else ops.quantize_blocks
        if wanted.moments is not None:
            op = ops.quantize_calibrated
            args += [self._moments(wanted.moments), None]
        elif format.block is None:
            attrs |= {"axis": tensor_type(weight).ndim - 1, "fit": format.fit}
        return builder.emit(canonical_call(op, args, attrs), name)

    def _moments(self, name: str) -> Param:
        """The moments of the inputs of the weight of a name, a parameter of the function."""
        if name not in self.moments:
            self.moments[name] = Param(
                self.names.unique(MOMENTS + name), self.variants.moments[name], "weight"
            )
        return self.moments[name]
