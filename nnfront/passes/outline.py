# SPDX-License-Identifier: Apache-2.0
"""Make primitive functions of the regions that one kernel can compute. `inline` undoes it.

before:
    def main[n](x: input float32[n, 4], w: weight float32[8, 4], r: input float32[n, 8]) -> float32[n, 8] {
        h: float32[n, 8] = linear(x, w, None)
        a: float32[n, 8] = silu(h)
        y: float32[n, 8] = add(r, a)
        z: float32[n, 8] = exp(y)
        return z
    }
after:
    fused def product[n](x: input float32[n, 4], weight: input float32[8, 4], residual: input float32[n, 8])
            -> float32[n, 8] attrs(activation="silu", kind="linear", operands=("x", "weight", "bias", "scale", "residual"), region="product") {
        linear: float32[n, 8] = linear(x, weight, None)
        silu: float32[n, 8] = silu(linear)
        add: float32[n, 8] = add(residual, silu)
        return add
    }
    def main[n](x: input float32[n, 4], w: weight float32[8, 4], r: input float32[n, 8]) -> float32[n, 8] {
        y: float32[n, 8] = @product(x, w, r)
        z: float32[n, 8] = exp(y)
        return z
    }

A region is a tree of ops (`nnfront.passes.patterns`) in one block. Its parameters have the pattern's names for them, its attributes say
which pattern it was (`region`), all operands that the pattern knows (`operands`, also those that are absent here), and what the
pattern keeps of its calls. Equal regions share one function. Transforms and primitive functions are left alone.

A value inside a region is read by the region only, so nothing is computed twice, or the region returns it as well. What has an effect
stays where it was: it can only be the end of a region.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnfront.dims import of_symbol
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Names,
    Projection,
    Provenance,
    Scalar,
    ScalarType,
    Tuple,
    TupleType,
    Var,
    are_same,
    atoms_of,
    map_expr,
    no_block,
    undefined_symbols,
    used_vars,
    variables_of,
    walk_exprs,
)
from nnfront.ir.value_numbering import atom_key, attr_key, expr_key
from nnfront.passes.base import module_pass
from nnfront.passes.patterns import Match, Pattern, matches
from nnfront.passes.regions import PATTERNS


@module_pass()
def outline(ir: IRModule, patterns: Sequence[Pattern] = PATTERNS) -> IRModule:
    """Outline what fits a pattern, the first that does."""
    made = _Made(Names(ir))
    functions: list[Function] = []
    for old in ir.functions:
        if old.kind not in ("public", "private"):
            functions.append(old)
            continue
        before = len(made.functions)
        new = _Outlining(old, patterns, made).function(old)
        functions += [*made.functions[before:], new]
    return ir.with_functions(functions) if made.calls else ir


@dataclass(frozen=True)
class _Region:
    """Bindings that become a function: in order, its results first to last, and what its pattern knows of it."""

    pattern: Pattern
    match: Match
    bindings: tuple[Binding, ...]
    results: tuple[Var, ...]

    @property
    def attrs(self) -> dict[str, Any]:
        return {**self.match.attrs, "region": self.pattern.name, "operands": self.pattern.operands}

    @property
    def written(self) -> Atom | None:
        """The handle that the region writes: only its end may."""
        call = self.bindings[-1].value
        if not isinstance(call, Call) or not call.op.writes:
            return None
        names = [operand.name for operand in call.op.operands]
        return call.args[names.index(call.op.writes)]

    @property
    def place(self) -> Provenance | None:
        """Where the region is: the module that all of it is in, and the line of its end."""
        own = [b.provenance for b in self.bindings if b.provenance is not None]
        if not own:
            return None
        paths = [p.module.split(".") if p.module else [] for p in own]
        common = [
            names[0]
            for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        ]
        return Provenance(".".join(common), own[-1].file, own[-1].line)

    def inside(self, provenance: Provenance | None) -> Provenance | None:
        """The provenance of a call, its module relative to that of the region."""
        if provenance is None or self.place is None:
            return provenance
        module = provenance.module.removeprefix(self.place.module).removeprefix(".")
        return Provenance(module, provenance.file, provenance.line)


class _Made:
    """The functions that were made, each once."""

    def __init__(self, names: Names) -> None:
        self.functions: list[Function] = []
        self.calls = 0
        self._names = names
        self._known: dict[Hashable, int] = {}

    def call(self, region: _Region) -> FunctionCall:
        """Return the call that computes a region's results: the value of its end, or a tuple of all that it returns."""
        builder = FunctionBuilder(region.pattern.name)
        inside: dict[Var, Var] = {}
        args: list[Atom] = []

        def param(outside: Var, name: str) -> Var:
            if outside not in inside:
                inside[outside] = builder.param(
                    name, outside.type, "state" if outside is region.written else "input"
                )
                args.append(outside)
            return inside[outside]

        for name in region.pattern.operands:
            operand = region.match.operands.get(name)
            if isinstance(operand, Var) and operand in inside:
                # A kernel finds operands by name: what has two names is passed twice.
                builder.param(name, operand.type, "input")
                args.append(operand)
            elif isinstance(operand, Var):
                param(operand, name)
        for binding in region.bindings:
            value = map_expr(
                binding.value, lambda a: param(a, f"arg_{len(args)}") if isinstance(a, Var) else a, no_block
            )
            inside[binding.var] = builder.emit(
                value, type=binding.var.type, provenance=region.inside(binding.provenance)
            )
        results = [inside[var] for var in region.results]
        result: Atom = results[0] if len(results) == 1 else builder.emit(Tuple(tuple(results)), "results")
        for symbol in undefined_symbols(builder.finish(result)) or ():
            builder.param(symbol.name, ScalarType("int64", of_symbol(symbol)), "input")
            args.append(Scalar(of_symbol(symbol)))
        function = builder.finish(result, "fused", region.attrs).with_(is_outlined=True)
        self.calls += 1
        return FunctionCall(self._once(function), tuple(args))

    def _once(self, function: Function) -> str:
        """Add a function unless there is one like it; return its name."""
        key = _function_key(function)
        place = self._known.get(key)
        if place is None:
            self._known[key] = len(self.functions)
            self.functions.append(function.with_(name=self._names.unique(function.name)))
            return self.functions[-1].name
        known = self.functions[place]
        if [b.provenance for b in known.bindings] != [b.provenance for b in function.bindings]:
            # The call alone says where it is.
            self.functions[place] = known.with_(
                bindings=tuple(Binding(b.var, b.value) for b in known.bindings)
            )
        return known.name


def _function_key(function: Function) -> Hashable:
    """Equal for functions that differ in nothing but their name, the names of their values, and provenance."""
    numbers: dict[Atom | None, Hashable] = {p: i for i, p in enumerate(function.params)}
    bindings: list[Hashable] = []
    for binding in function.bindings:
        operands = [numbers[a] if a in numbers else ("atom", atom_key(a)) for a in atoms_of(binding.value)]
        numbers[binding.var] = len(numbers)
        bindings.append((binding.var.type, expr_key(binding.value, operands)))
    return (
        tuple((p.name, p.role, p.type) for p in function.params),
        tuple((symbol, symbol.facts) for symbol in function.symbols),
        tuple(bindings),
        numbers[function.result],
        attr_key(function.attrs),
    )


class _Outlining:
    """Rewrites one function."""

    def __init__(self, function: Function, patterns: Sequence[Pattern], made: _Made) -> None:
        self.patterns = patterns
        self.made = made
        self.names = Names.of(function)
        read = (var for expr in walk_exprs(function) for var in variables_of(expr))
        self.uses: Counter[Atom] = Counter([*read, function.result])

    def function(self, function: Function) -> Function:
        """Return the function with calls in the place of regions."""
        body = function.body
        new = self._block(body)
        return function if new is body else function.with_(bindings=new.bindings)

    def _block(self, block: Block) -> Block:
        made = {b.var: b for b in block.bindings}
        place = {b.var: i for i, b in enumerate(block.bindings)}
        regions: dict[Var, _Region] = {}
        gone: set[Var] = set()
        for binding in reversed(block.bindings):  # the largest region is found from its end
            if binding.var in gone:
                continue
            region = self._region(binding, made, place, block)
            if region is not None and gone.isdisjoint(b.var for b in region.bindings):
                regions[binding.var] = region
                gone.update(b.var for b in region.bindings)
        bindings: list[Binding] = []
        for binding in block.bindings:
            if binding.var in regions:
                bindings += self._call(binding, regions[binding.var])
            elif binding.var not in gone:
                bindings.append(self._inner(binding))
        return block if are_same(bindings, block.bindings) else Block(tuple(bindings), block.result)

    def _region(
        self, root: Binding, made: Mapping[Var, Binding], place: Mapping[Var, int], block: Block
    ) -> _Region | None:
        """The region that ends in a binding, by the first pattern that fits."""
        for pattern in self.patterns:
            for match in matches(pattern, root, made):
                bindings = tuple(sorted(set(match.bindings.values()), key=lambda b: place[b.var]))
                shared = self._shared(
                    match, bindings, block.bindings[place[bindings[0].var] : place[root.var]]
                )
                if shared is not None:
                    return _Region(pattern, match, bindings, (root.var, *shared))
        return None

    def _shared(
        self, match: Match, bindings: Sequence[Binding], span: Sequence[Binding]
    ) -> tuple[Var, ...] | None:
        """The inner values that others read too; None if one of them may not be, or is read in the `span` before the region ends."""
        inside: Counter[Var] = Counter()
        for binding in bindings:
            inside.update(used_vars(binding.value))
        shared = tuple(b.var for b in bindings[:-1] if self.uses[b.var] > inside[b.var])
        if not shared:
            return ()
        if not match.shared.issuperset(shared):
            return None
        own = {b.var for b in bindings}
        is_early = any(b.var not in own and not set(shared).isdisjoint(used_vars(b.value)) for b in span)
        return None if is_early else shared

    def _call(self, root: Binding, region: _Region) -> list[Binding]:
        call = self.made.call(region)
        if len(region.results) == 1:
            return [Binding(root.var, call, region.place)]
        places = {b.var: b.provenance for b in region.bindings}
        results = Var(
            self.names.unique(region.pattern.name), TupleType(tuple(v.type for v in region.results))
        )
        return [
            Binding(results, call, region.place),
            *(Binding(var, Projection(results, i), places[var]) for i, var in enumerate(region.results)),
        ]

    def _inner(self, binding: Binding) -> Binding:
        value = binding.value
        if isinstance(value, If):
            return binding.with_value(map_expr(value, lambda atom: atom, self._block))
        return binding
