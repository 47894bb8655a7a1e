# SPDX-License-Identifier: Apache-2.0
"""What has an effect, and what is alive."""

from __future__ import annotations

from dataclasses import dataclass

from nnfront.ir import (
    Binding,
    Call,
    Expr,
    Function,
    If,
    IRModule,
    Var,
    callees_first,
    functions_of,
    walk_exprs,
)


@dataclass(frozen=True, eq=False)
class Declaration(Function):
    """A primitive function without its body: what passes see of it. `callees` are the functions that its body calls."""

    callees: tuple[str, ...] = ()
    is_pure: bool = False


def impure_functions(ir: IRModule) -> set[str]:
    """Return the names of the functions whose calls have an effect, by an op of their own or by a function they call."""
    impure: set[str] = set()
    for function in callees_first(ir):
        if isinstance(function, Declaration):
            has_effect = not function.is_pure
        else:
            has_effect = not all(is_pure(value, impure) for value in walk_exprs(function))
        if has_effect:
            impure.add(function.name)
    return impure


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
