# SPDX-License-Identifier: Apache-2.0
"""What has an effect, and what is alive."""

from __future__ import annotations

from dataclasses import dataclass

from nnfront.ir import Binding, Call, Expr, Function, If, IRModule, Var, functions_of, walk_exprs


@dataclass(frozen=True, eq=False)
class Declaration(Function):
    """A primitive function without its body: what passes see of it. `callees` are the functions that its body calls."""

    callees: tuple[str, ...] = ()
    is_pure: bool = False


def impure_functions(ir: IRModule) -> set[str]:
    """Return the names of the functions whose calls have an effect, by an op of their own or by a function they call."""
    callers: dict[str, list[str]] = {}
    found: list[str] = []
    for function in ir.functions:
        for callee in function.callees:
            callers.setdefault(callee, []).append(function.name)
        if has_own_effect(function):
            found.append(function.name)
    impure: set[str] = set()
    while found:
        name = found.pop()
        if name not in impure:
            impure.add(name)
            found.extend(callers.get(name, ()))
    return impure


def has_own_effect(function: Function) -> bool:
    """Whether an op of the body has an effect."""
    if isinstance(function, Declaration):
        return not function.is_pure
    return any(isinstance(e, Call) and not e.op.is_pure_for(e.args) for e in walk_exprs(function))


def is_pure(value: Expr, impure: set[str]) -> bool:
    """Whether an expression has no effect, by its op or by a function that it calls; blocks of an `if` are not looked into."""
    if isinstance(value, Call) and not value.op.is_pure_for(value.args):
        return False
    return impure.isdisjoint(functions_of(value))


def is_alive(binding: Binding, needs: set[Var], impure: set[str]) -> bool:
    """Whether a binding's value is needed, or it has an effect."""
    if binding.var in needs:
        return True
    value = binding.value
    if not is_pure(value, impure):
        return True
    if isinstance(value, If):
        return any(
            is_alive(b, set(), impure) for branch in (value.then, value.otherwise) for b in branch.bindings
        )
    return False
