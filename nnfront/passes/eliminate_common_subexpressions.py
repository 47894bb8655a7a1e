# SPDX-License-Identifier: Apache-2.0
"""Compute once what a function computes several times.

before:
    def main(x: input float32[4]) -> float32[4] {
        a: float32[4] = exp(x)
        b: float32[4] = exp(x)
        y: float32[4] = add(a, b)
        return y
    }
after:
    def main(x: input float32[4]) -> float32[4] {
        a: float32[4] = exp(x)
        y: float32[4] = add(a, a)
        return y
    }

Two bindings are the same if op, operands and attributes are, neither has an effect, and the first is in scope of the second: a
value of one branch of an `if` is not one of the other. The first keeps its name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from nnfront.ir import Binding, If, IRModule, Mutator, Var, atoms_of
from nnfront.ir.value_numbering import atom_key, expr_key
from nnfront.passes.base import module_pass
from nnfront.passes.effects import impure_functions, is_pure


@module_pass()
def eliminate_common_subexpressions(ir: IRModule) -> IRModule:
    """Share equal values within each function."""
    impure = impure_functions(ir)
    return ir.with_functions(_Sharing(impure).function(f) for f in ir.functions)


class _Sharing(Mutator):
    """Rewrites one function; `seen` are the values in scope, by key."""

    def __init__(self, impure: set[str]) -> None:
        self.seen: dict[Hashable, Var] = {}
        super().__init__(self.seen)
        self.impure = impure

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = self.expr(binding.value)
        if not isinstance(value, If) and is_pure(value, self.impure):
            key = expr_key(value, [a if isinstance(a, Var) else atom_key(a) for a in atoms_of(value)])
            first = None if key is None else self.seen.get(key)
            if first is not None and first.type == binding.var.type:
                self.replaced[binding.var] = first
                return ()
            if first is None and key is not None:
                self.seen[key] = binding.var
        return (binding.with_value(value),)
