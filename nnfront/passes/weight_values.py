# SPDX-License-Identifier: Apache-2.0
"""What passes that give weights another form need to know: which values depend on weights alone, and who reads weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Expr,
    Function,
    FunctionCall,
    IRModule,
    Param,
    Var,
    callees_first,
    used_vars,
    walk_bindings,
)


@dataclass(frozen=True)
class WeightValues:
    """Values of a function that depend on weights alone; those that are a weight, or a view of one, with a name that tells weights apart.

    Public functions know one weight by one name; what a private one calls its weights is its own affair.
    """

    all: frozenset[Var]
    names: dict[Var, str]


def weight_values(function: Function) -> WeightValues:
    """Find the values that depend on weights alone; what depends on nothing is none."""
    names: dict[Var, str] = {
        p: _name(function, p) for p in function.params if p.role in ("weight", "transformed")
    }
    found: set[Var] = set(names)
    for binding in walk_bindings(function.bindings):
        reads, value = set(used_vars(binding.value)), binding.value
        if reads and found.issuperset(reads):
            found.add(binding.var)
            (source, *more) = reads
            if isinstance(value, Call) and value.op.is_view and not more and source in names:
                names[binding.var] = names[source]
    return WeightValues(frozenset(found), names)


def _name(function: Function, param: Param) -> str:
    return f"{function.name}:{param.name}" if function.kind == "private" else param.name


def weights_read(ir: IRModule, by: Callable[[Binding], Collection[Atom | None]]) -> set[str]:
    """Names (of `weight_values`) of weights among the operands of bindings that `by` gives, views included."""
    read: set[str] = set()
    for function in ir.functions:
        if function.kind in ("public", "private"):
            names = weight_values(function).names
            operands = (atom for binding in walk_bindings(function.bindings) for atom in by(binding))
            read.update(names[atom] for atom in operands if isinstance(atom, Var) and atom in names)
    return read


def read_as_they_are(ir: IRModule, rewritten: Callable[[Binding], Collection[Atom | None]]) -> set[str]:
    """Names (of `weight_values`) of weights that some function reads in the order that they are stored in, views included: another order would be a second copy.

    `rewritten` says which operands of a binding are about to be read in another order. A private function reads its caller's weights as it reads its own.
    """
    kept: set[str] = set()
    for function in callees_first(ir):
        if function.kind not in ("public", "private"):
            continue
        values = weight_values(function)
        read = {function.result} if isinstance(function.result, Var) else set()
        for binding in walk_bindings(function.bindings):
            if binding.var not in values.all:
                moved = {*rewritten(binding), *_rewritten_by_callee(ir, binding.value, kept)}
                read.update(var for var in used_vars(binding.value) if var not in moved)
        kept.update(values.names[var] for var in read if var in values.names)
    return kept


def _rewritten_by_callee(ir: IRModule, value: Expr, kept: Collection[str]) -> Iterator[Atom]:
    """The operands of a call that are weights of a private function, which reads them in another order, if at all."""
    callee = ir[value.function] if isinstance(value, FunctionCall) else None
    if isinstance(value, FunctionCall) and callee is not None and callee.kind == "private":
        for param, arg in zip(callee.params, value.args, strict=True):
            if param.role in ("weight", "transformed") and _name(callee, param) not in kept:
                yield arg
