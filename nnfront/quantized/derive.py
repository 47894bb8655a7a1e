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

A product with weights of several formats, or with others that are not quantised, one after another, is one for each run of a kind, and their results are joined:
    ab: float32[8, 4] = concat(a.weight, b.weight)
    y: float32[n, 8] = linear(x, ab, bias)
where b is stored as float32:
    dequantize: float32[6, 4] = dequantize(a.weight, a.weight_scale, axis=1)
    getitem: float32[6] = getitem(bias, index=((0, 6, 1),))
    linear: float32[n, 6] = linear(x, dequantize, getitem)
    getitem_1: float32[2] = getitem(bias, index=((6, 8, 1),))
    linear_1: float32[n, 2] = linear(x, b.weight, getitem_1)
    y: float32[n, 8] = concat(linear, linear_1, dim=1)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from nnfront import ops
from nnfront.dims import Size
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
    tensor_type,
    walk_bindings,
)
from nnfront.ops.encoded import Encoded, cast
from nnfront.quantized.formula import Formula
from nnfront.quantized.report import StoredReport, report_of
from nnfront.quantized.runs import Run, described, kind_of, named_parts, with_parts
from nnfront.quantized.uses import (
    Takes,
    is_cut,
    is_transpose,
    joined,
    matrices,
    reasons_against,
    takes_rows,
)


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
        self.made: dict[tuple[str, Hashable], Function] = {}

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

    def specialised(self, name: str, given: Mapping[int, Sequence[Run]]) -> str:
        """The name of a private function that takes some of its weights, by position, as they are encoded, or as several one after another."""
        kinds = tuple((i, *(described(run) for run in runs)) for i, runs in given.items())
        if (name, kinds) not in self.made:
            function = self.ir[name]
            body, names = _Body(function, self), Names(p.name for p in function.params)
            params: list[Param] = []
            for i, param in enumerate(function.params):
                if i not in given:
                    params.append(param)
                    continue
                own = [
                    [
                        Param(names.unique(f"{param.name}.{suffix}"), part.type, "weight")
                        for suffix, part in named_parts(run)
                    ]
                    for run in given[i]
                ]
                params += [part for parts in own for part in parts]
                body.hold(param, [with_parts(*pair) for pair in zip(given[i], own, strict=True)])
            body.take_names(p.name for p in params)
            new = body.function(replace(function, params=tuple(params)))
            self.made[name, kinds] = new.with_(name=self.names.unique(name))
        return self.made[name, kinds].name


def _var(atom: Atom | None) -> Var:
    assert isinstance(atom, Var)
    return atom


class _Body(Mutator):
    """Rewrites one function. `encoded` are quantised values, `mixed` those that are several runs one after another, `head` is what comes before the function's own bindings."""

    def __init__(self, function: Function, deriving: _Deriving) -> None:
        self.known: dict[Var, Var] = {}
        super().__init__(self.known)
        self.deriving = deriving
        self.names = Names(b.var.name for b in walk_bindings(function.bindings))
        self.encoded: dict[Var, Encoded] = {}
        self.mixed: dict[Var, Sequence[Run]] = {}
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
        if not isinstance(value, Call) or not any(map(self.runs, value.args)):
            return super().binding(binding)
        if joined(value):
            return self.join(binding, value)
        if not self.mixed.keys().isdisjoint(value.args):
            return self.apart(binding, value)
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
        read = {v: self.dense(builder, self.encoded[v], tensor_type(v).dtype) for v in weights}
        args = [
            read[a] if isinstance(a, Var) and a in read else a if a is None else self.atom(a)
            for a in call.args
        ]
        new = Binding(binding.var, Call(call.op, tuple(args), call.attrs), binding.provenance)
        return [*builder.finish(binding.var).bindings, new]

    def apart(self, binding: Binding, call: Call) -> Sequence[Binding]:
        """Multiply with each run by itself, and join the results along the features."""
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        x, weight, bias = (None if a is None else self.atom(a) for a in call.args)
        parts: list[Var] = []
        begin: Size = 0
        for run in self.mixed[_var(weight)]:
            matrix = self.dense(builder, run, tensor_type(weight).dtype)
            end = begin + tensor_type(matrix).shape[0]
            own = None if bias is None else builder.call(ops.getitem, bias, index=(slice(begin, end),))
            parts.append(builder.emit(Call(call.op, (x, matrix, own), call.attrs)))
            begin = end
        whole = canonical_call(ops.concat, parts, {"dim": tensor_type(binding.var).ndim - 1})
        return [*builder.finish(binding.var).bindings, binding.with_value(whole)]

    def dense(self, builder: FunctionBuilder, run: Run, dtype: str) -> Var:
        """Weights as a product reads them: what is dequantised is so once, for all that read it."""
        if isinstance(run, Var):
            return run
        if run.elements not in self.known:
            self.keep(run)
            self.known[run.elements] = run.dense(builder, dtype)
        return self.known[run.elements]

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

    def hold(self, value: Var, runs: Sequence[Run]) -> None:
        """Let runs one after another stand for a value."""
        first, *others = runs
        if others:
            self.mixed[value] = runs
        else:
            assert isinstance(first, Encoded)
            self.encoded[value] = first

    def join(self, binding: Binding, call: Call) -> Sequence[Binding]:
        """Join what follows one another of a kind."""
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        parts = [run for v in joined(call) for run in self.runs(v) or (_var(self.atom(v)),)]
        runs = [[*run] for _, run in groupby(parts, kind_of)]
        is_whole = len(runs) == 1  # which may be a stack of one
        made = [
            run[0] if len(run) == 1 and not is_whole else self.joined(builder, binding.var.name, call, run)
            for run in runs
        ]
        self.hold(binding.var, made)
        return builder.finish(binding.var).bindings

    def joined(self, builder: FunctionBuilder, name: str, call: Call, run: Sequence[Run]) -> Run:
        """Join elements, scales and zero points, each on their own, under names that begin with that of the whole; or what is dense, which lifting keeps as it keeps the whole."""
        columns = zip(*map(named_parts, run), strict=True)
        attrs = call.op.full_attrs(call.attrs)
        made = [
            builder.emit(
                canonical_call(call.op, [part for _, part in column], attrs), f"{name}.{column[0][0]}"
            )
            for column in columns
        ]
        if isinstance(run[0], Var):
            self.derived.append(made[0].name)
        return with_parts(run[0], made)

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
        given = {i: runs for i, a in enumerate(call.args) if (runs := self.runs(a))}
        if not given:
            return super().binding(binding)
        args: list[Atom] = []
        for i, atom in enumerate(call.args):
            for run in given.get(i, ()):
                if isinstance(run, Encoded):
                    self.keep(run)
                args += [part for _, part in named_parts(run)]
            if i not in given:
                args.append(self.atom(atom))
        name = self.deriving.specialised(call.function, given)
        return [Binding(binding.var, FunctionCall(name, tuple(args)), binding.provenance)]

    def runs(self, value: Atom | None) -> Sequence[Run]:
        """What stands for a value that is quantised, or is so in part; nothing for others."""
        if not isinstance(value, Var):
            return ()
        return (self.encoded[value],) if value in self.encoded else self.mixed.get(value, ())
