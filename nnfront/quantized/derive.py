# SPDX-License-Identifier: Apache-2.0
"""Put formulas over what a checkpoint holds in the place of a model's weights.

before:
    def main(x: input float32[n, 4], a.weight: weight float32[6, 4], b.weight: weight float32[2, 4]) {
        ab: float32[8, 4] = concat(a.weight, b.weight)
        y: float32[n, 8] = linear(x, ab)
after, where the checkpoint holds both as int8 with a scale for each output:
    def main(x: input float32[n, 4], a.weight: weight int8[6, 4], a.weight_scale: weight float32[6, 1], b.weight: ...) {
        ab.int8: int8[8, 4] = concat(a.weight, b.weight)
        ab.scales: float32[8, 1] = concat(a.weight_scale, b.weight_scale)
        dequantize: float32[8, 4] = dequantize(ab.int8, ab.scales, axis=1)
        y: float32[n, 8] = linear(x, dequantize)

A weight stays quantised if nothing but products read it, of experts too, joined to others of its format or not, or take rows of it, in the method or in a private function that
it is given to; and if a kernel takes the format. Ranks cut what is stored, between outputs, or between inputs where each has whole groups. All others are dequantised by the formula,
which lifting moves to load time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Mutator,
    Names,
    Param,
    TensorType,
    Var,
    canonical_call,
    substitute_atoms,
    walk_bindings,
)
from nnfront.ops.encoded import Encoded, cast
from nnfront.quant_format import QuantFormat
from nnfront.quantized.formula import Formula
from nnfront.quantized.report import StoredReport, report_of
from nnfront.quantized.uses import Takes, is_cut, is_transpose, joined, matrices, reasons_against, takes_rows


def derive_weights(
    ir: IRModule, formulas: Mapping[str, Formula], takes: Takes
) -> tuple[IRModule, StoredReport]:
    """Return the module with formulas, by the names of weights, in the place of these, and what became of each.

    `ir` is not lifted yet.
    """
    types = _types(ir, formulas)
    reasons = reasons_against(ir, formulas, types, takes)
    deriving = _Deriving(
        ir,
        formulas,
        {name for name, reason in reasons.items() if not reason and formulas[name].format is not None},
    )
    return deriving.module(), report_of(formulas, types, reasons)


def _types(ir: IRModule, formulas: Mapping[str, Formula]) -> dict[str, TensorType]:
    """The types that methods want of weights that have a formula."""
    found = {p.name: p.type for f in ir.methods for p in f.weights if p.name in formulas}
    return {name: type for name, type in found.items() if isinstance(type, TensorType)}


class _Deriving:
    """Rewrites a module; weights in `kept` stay quantised."""

    def __init__(self, ir: IRModule, formulas: Mapping[str, Formula], kept: set[str]) -> None:
        self.ir, self.formulas, self.kept = ir, formulas, kept
        self.names = Names(ir)
        self.made: dict[
            tuple[str, tuple[tuple[int, QuantFormat, bool, tuple[TensorType, ...]], ...]], Function
        ] = {}

    def module(self) -> IRModule:
        """The methods first: they say how private functions are called."""
        new = {f.name: self._method(f) for f in self.ir.methods}
        return self.ir.with_versions(new, ((name, function) for (name, _), function in self.made.items()))

    def _method(self, function: Function) -> Function:
        weights = {p: self.formulas[p.name] for p in function.weights if p.name in self.formulas}
        if not weights:
            return function
        body = _Body(function, self)
        sources: dict[str, Param] = {}
        for formula in weights.values():
            for name, type in formula.sources.items():
                sources.setdefault(name, Param(name, type, "weight"))
        first = function.params.index(next(iter(weights)))
        params = [*function.params[:first], *sources.values(), *function.params[first:]]
        params = [p for p in params if p not in weights]
        body.take_names(p.name for p in params)
        for weight, formula in weights.items():
            body.weight(
                weight, formula, [sources[name] for name in formula.sources], weight.name in self.kept
            )
        new = body.function(replace(function, params=tuple(params)))
        derived = (*function.attrs.get("derived", ()), *body.derived)
        return new.with_(
            bindings=(*body.head, *new.bindings),
            attrs={**function.attrs, "derived": tuple(dict.fromkeys(derived))},
        )

    def specialised(self, name: str, encoded: Mapping[int, Encoded]) -> str:
        """The name of a private function that takes some of its weights, by position, as they are encoded."""
        kinds = tuple(
            (i, e.format, e.is_transposed, tuple(p.type for p in e.parts if isinstance(p.type, TensorType)))
            for i, e in encoded.items()
        )
        if (name, kinds) not in self.made:
            function = self.ir[name]
            body = _Body(function, self)
            params: list[Param] = []
            for i, param in enumerate(function.params):
                if i not in encoded:
                    params.append(param)
                    continue
                own = [
                    Param(f"{param.name}.{suffix}", part.type, "weight")
                    for suffix, part in zip(encoded[i].format.parts, encoded[i].parts, strict=True)
                ]
                body.encoded[param] = encoded[i].with_parts(own)
                params += own
            body.take_names(p.name for p in params)
            new = body.function(replace(function, params=tuple(params)))
            self.made[name, kinds] = new.with_(name=self.names.unique(name))
        return self.made[name, kinds].name


def _var(atom: Atom | None) -> Var:
    assert isinstance(atom, Var)
    return atom


class _Body(Mutator):
    """Rewrites one function. `encoded` are quantised values, `head` is what comes before the function's own bindings."""

    def __init__(self, function: Function, deriving: _Deriving) -> None:
        self.known: dict[Var, Var] = {}
        super().__init__(self.known)
        self.deriving = deriving
        self.names = Names(b.var.name for b in walk_bindings(function.bindings))
        self.encoded: dict[Var, Encoded] = {}
        self.head: list[Binding] = []
        self.derived: list[str] = []

    def take_names(self, names: Iterable[str]) -> None:
        """Let no binding that is made have one of these names."""
        for name in names:
            self.names.unique(name)

    def weight(self, weight: Param, formula: Formula, sources: Sequence[Var], is_kept: bool) -> None:
        """Make a weight in front of everything else."""
        assert isinstance(weight.type, TensorType)
        builder = FunctionBuilder.of_bindings(self.names, None)
        made = formula.make(builder, sources)
        names: dict[Var, Atom] = {}
        if isinstance(made, Encoded) and is_kept:
            if made.scales is not None:
                scales = cast(builder, made.scales, formula.wanted_scales(weight.type.dtype))
                made = replace(made, scales=scales)
            for suffix, part in zip(made.format.parts, made.parts, strict=True):
                is_stored = isinstance(part, Param)  # and has its name
                names[part] = (
                    part if is_stored else Var(self.names.unique(f"{weight.name}.{suffix}"), part.type)
                )
            self.encoded[weight] = made.with_parts([_var(names[part]) for part in made.parts])
        else:
            dense = made.dense(builder, weight.type.dtype) if isinstance(made, Encoded) else made
            dense = cast(builder, dense, weight.type.dtype)
            if not isinstance(dense, Param):  # a name of its own, the same in all methods
                named = Var(self.names.unique(f"{weight.name}.dense"), dense.type)
                names[dense] = named
                self.derived.append(named.name)
                dense = named
            self.replaced[weight] = dense
        for b in builder.finish(sources[0]).bindings:
            self.head.append(
                Binding(_var(names.get(b.var, b.var)), substitute_atoms(b.value, names), b.provenance)
            )

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = binding.value
        if isinstance(value, FunctionCall):
            return self.call(binding, value)
        if not isinstance(value, Call) or self.encoded.keys().isdisjoint(value.args):
            return super().binding(binding)
        if parts := [self.encoded[v] for v in joined(value)]:
            return self.join(binding, value, parts)
        if takes_rows(value):
            return self.rows(binding, value)
        if is_cut(value):
            return self.cut(binding, value)
        if is_transpose(value):
            self.encoded[binding.var] = replace(self.encoded[_var(value.args[0])], is_transposed=False)
            return []
        return self.product(binding, value, [a for a in matrices(value) if a in self.encoded])

    def product(self, binding: Binding, call: Call, weights: Sequence[Var]) -> Sequence[Binding]:
        """Multiply with what is dequantised right there."""
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        for weight in weights:
            assert isinstance(weight.type, TensorType)
            if weight not in self.known:
                self.keep(self.encoded[weight])
                self.known[weight] = self.encoded[weight].dense(builder, weight.type.dtype)
        read = {weight: self.known[weight] for weight in weights}
        args = [
            read[a] if isinstance(a, Var) and a in read else a if a is None else self.atom(a)
            for a in call.args
        ]
        new = Binding(binding.var, Call(call.op, tuple(args), call.attrs), binding.provenance)
        return [*builder.finish(binding.var).bindings, new]

    def rows(self, binding: Binding, call: Call) -> Sequence[Binding]:
        """Take rows as they are stored, then dequantise these."""
        table, places = call.args
        assert isinstance(table, Var) and isinstance(table.type, TensorType) and places is not None
        self.keep(self.encoded[table])
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        found = self.encoded[table].rows(builder, self.atom(places)).dense(builder, table.type.dtype)
        *bindings, last = builder.finish(found).bindings
        return [*bindings, Binding(binding.var, last.value, binding.provenance)]

    def keep(self, encoded: Encoded) -> None:
        """Let lifting keep what is made of weights for it."""
        self.derived += [part.name for part in encoded.parts if not isinstance(part, Param)]

    def join(self, binding: Binding, call: Call, parts: Sequence[Encoded]) -> Sequence[Binding]:
        """Join elements, scales and zero points, each on their own."""
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        columns = zip(*(each.parts for each in parts), strict=True)
        op, attrs = call.op, call.op.full_attrs(call.attrs)
        made = [
            builder.emit(canonical_call(op, column, attrs), f"{binding.var.name}.{suffix}")
            for suffix, column in zip(parts[0].format.parts, columns, strict=True)
        ]
        self.encoded[binding.var] = parts[0].with_parts(made)
        return builder.finish(made[0]).bindings

    def cut(self, binding: Binding, call: Call) -> Sequence[Binding]:
        """Take a rank's part of elements, scales and zero points, each on their own; what all inputs share is not cut between them."""
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        whole = self.encoded[_var(call.args[0])]
        rank, attrs = self.atom(_var(call.args[1])), call.op.full_attrs(call.attrs)
        made: list[Var] = []
        for suffix, part in zip(whole.format.parts, whole.parts, strict=True):
            assert isinstance(part.type, TensorType)
            is_shared = attrs["axis"] == part.type.ndim - 1 and part.type.shape[-1] == 1
            new = canonical_call(call.op, (part, rank), attrs)
            made.append(part if is_shared else builder.emit(new, f"{binding.var.name}.{suffix}"))
        self.encoded[binding.var] = whole.with_parts(made)
        return builder.finish(made[0]).bindings

    def call(self, binding: Binding, call: FunctionCall) -> Sequence[Binding]:
        """Give a private function what is encoded, part by part."""
        encoded = {
            i: self.encoded[a] for i, a in enumerate(call.args) if isinstance(a, Var) and a in self.encoded
        }
        if not encoded:
            return super().binding(binding)
        args: list[Atom] = []
        for i, atom in enumerate(call.args):
            if i in encoded:
                self.keep(encoded[i])
            args += encoded[i].parts if i in encoded else [self.atom(atom)]
        name = self.deriving.specialised(call.function, encoded)
        return [Binding(binding.var, FunctionCall(name, tuple(args)), binding.provenance)]
