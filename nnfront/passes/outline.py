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
    fused def product_activation_residual[n](arg_0: input float32[n, 4], arg_1: input float32[8, 4], arg_2: input float32[n, 8])
            -> float32[n, 8] {
        linear: float32[n, 8] = linear(arg_0, arg_1, None)
        silu: float32[n, 8] = silu(linear)
        add: float32[n, 8] = add(arg_2, silu)
        return add
    }
    def main[n](x: input float32[n, 4], w: weight float32[8, 4], r: input float32[n, 8]) -> float32[n, 8] {
        y: float32[n, 8] = @product_activation_residual(x, w, r)
        z: float32[n, 8] = exp(y)
        return z
    }

A region is a tree of ops (`nnfront.passes.patterns`) whose inner values nobody else reads, in one block. Equal regions share one
function. Transforms and primitive functions are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nnfront.dims import of_symbol
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Names,
    Scalar,
    ScalarType,
    Var,
    map_expr,
    undefined_symbols,
    used_vars,
)
from nnfront.passes.base import module_pass
from nnfront.passes.patterns import PATTERNS, Pattern, find


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


class _Made:
    """The functions that were made, each once."""

    def __init__(self, names: Names) -> None:
        self.functions: list[Function] = []
        self.calls = 0
        self._names = names
        self._known: dict[str, str] = {}

    def call(self, name: str, region: Sequence[Binding]) -> FunctionCall:
        """Return the call that computes a region's last value."""
        builder = FunctionBuilder(name)
        inside: dict[Var, Var] = {}
        args: list[Atom] = []

        def atom(outside: Atom) -> Atom:
            if not isinstance(outside, Var):
                return outside
            if outside not in inside:
                inside[outside] = builder.param(f"arg_{len(args)}", outside.type, "input")
                args.append(outside)
            return inside[outside]

        for binding in region:
            value = map_expr(binding.value, atom, _no_block)
            inside[binding.var] = builder.emit(value, type=binding.var.type)
        result = inside[region[-1].var]
        for symbol in undefined_symbols(builder.finish(result)) or ():
            builder.param(symbol.name, ScalarType("int64", of_symbol(symbol)), "input")
            args.append(Scalar(of_symbol(symbol)))
        function = builder.finish(result, "fused")
        text = str(function)
        if text not in self._known:
            self._known[text] = self._names.unique(name)
            self.functions.append(function.with_(name=self._known[text]))
        self.calls += 1
        return FunctionCall(self._known[text], tuple(args))


def _no_block(block: Block) -> Block:
    raise AssertionError("a region has no branches")


class _Outlining:
    """Rewrites one function."""

    def __init__(self, function: Function, patterns: Sequence[Pattern], made: _Made) -> None:
        self.patterns = patterns
        self.made = made
        self.uses: Counter[Var] = Counter()
        self._count(function.body)

    def _count(self, block: Block) -> None:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                self._count(value.then)
                self._count(value.otherwise)
                if isinstance(value.condition, Var):
                    self.uses[value.condition] += 1
            else:
                self.uses.update(used_vars(value))
        if isinstance(block.result, Var):
            self.uses[block.result] += 1

    def function(self, function: Function) -> Function:
        """Return the function with calls in the place of regions."""
        body = function.body
        new = self._block(body)
        return function if new is body else function.with_(bindings=new.bindings)

    def _block(self, block: Block) -> Block:
        inner = {b.var: b for b in block.bindings if self.uses[b.var] == 1}
        regions: dict[Var, tuple[str, list[Binding]]] = {}
        gone: set[Var] = set()
        for binding in reversed(block.bindings):  # the largest region is found from its end
            if binding.var not in gone:
                for pattern in self.patterns:
                    region = find(pattern.tree, binding, inner)
                    if region is not None and gone.isdisjoint(b.var for b in region):
                        regions[binding.var] = (pattern.name, region)
                        gone.update(b.var for b in region)
                        break
        bindings = [
            self._binding(b, regions) for b in block.bindings if b.var in regions or b.var not in gone
        ]
        if len(bindings) == len(block.bindings) and all(
            new is old for new, old in zip(bindings, block.bindings, strict=True)
        ):
            return block
        return Block(tuple(bindings), block.result)

    def _binding(self, binding: Binding, regions: dict[Var, tuple[str, list[Binding]]]) -> Binding:
        if binding.var in regions:
            return Binding(binding.var, self.made.call(*regions[binding.var]), binding.provenance)
        value = binding.value
        if isinstance(value, If):
            then, otherwise = self._block(value.then), self._block(value.otherwise)
            if then is not value.then or otherwise is not value.otherwise:
                return Binding(binding.var, If(value.condition, then, otherwise), binding.provenance)
        return binding
