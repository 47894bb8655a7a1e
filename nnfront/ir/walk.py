# SPDX-License-Identifier: Apache-2.0
"""Iterate over a function's bindings and dims, branches included; and over any graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from nnfront.dims import Dim, Size, Symbol, unify
from nnfront.ir.expr import (
    Atom,
    Binding,
    Call,
    Expr,
    FunctionCall,
    If,
    MatchShape,
    Projection,
    Scalar,
    Tuple,
    Var,
)
from nnfront.ir.interfaces import FunctionData
from nnfront.ir.types import FunctionName, Type, sizes_of, type_symbols

_TYPES = get_args(Type)

Node = TypeVar("Node")


def walk_bindings(bindings: Iterable[Binding]) -> Iterator[Binding]:
    """Yield every binding in order; those of an `if`'s branches come before the `if`."""
    for binding in bindings:
        if isinstance(binding.value, If):
            yield from walk_bindings(binding.value.then.bindings)
            yield from walk_bindings(binding.value.otherwise.bindings)
        yield binding


def walk_exprs(function: FunctionData) -> Iterator[Expr]:
    """Yield the expression of every binding in order."""
    return (binding.value for binding in walk_bindings(function.bindings))


def undefined_symbols(function: FunctionData) -> list[Symbol] | None:
    """Return the dims of the function that a call does not define; None if its body uses a variable that is not its own.

    A parameter of size `n` defines n, one of `2*n` too, but one of `n*m` neither.
    """
    own = {id(param) for param in function.params}
    sizes = [size for param in function.params for size in sizes_of(param.type)]
    solved: dict[Symbol, Size] = {}
    unify(sizes, sizes, solved)
    defined = set(solved)
    missing: dict[Symbol, None] = {s: None for s in function.symbols if s not in defined}
    for binding in walk_bindings(function.bindings):
        own.add(id(binding.var))
        if isinstance(binding.value, MatchShape):
            defined.update(type_symbols(binding.value.type))
        if any(id(atom) not in own for atom in variables_of(binding.value)):
            return None
        for size in (*sizes_of(binding.var.type), *sizes_read(binding.value)):
            if isinstance(size, Dim):
                missing.update((s, None) for s in size.symbols if s not in defined)
    return list(missing)


def reachable(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the nodes of a graph that some lead to, these included, each once: a node, then what follows it, in order."""
    found: dict[Node, None] = {}
    pending = [*start][::-1]
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            pending += [*following(node)][::-1]
    return list(found)


def functions_of(expr: Expr) -> Iterator[str]:
    """Yield the functions that an expression calls: a call of one, or an op that is given some."""
    if isinstance(expr, FunctionCall):
        yield expr.function
    elif isinstance(expr, Call) and expr.attrs:
        yield from (value.name for value in expr.attrs.values() if isinstance(value, FunctionName))


def atoms_of(expr: Expr) -> tuple[Atom | None, ...]:
    """Return the operands of an expression; of an `if`, its condition and its branches' results."""
    match expr:
        case Call() | FunctionCall():
            return expr.args
        case Tuple():
            return expr.fields
        case Projection():
            return (expr.tuple,)
        case If():
            return (expr.condition, expr.then.result, expr.otherwise.result)
        case MatchShape():
            return (expr.value,)
        case _:
            return (expr,)


def variables_of(expr: Expr) -> list[Var]:
    """Return the variables that an expression reads directly."""
    return [atom for atom in atoms_of(expr) if isinstance(atom, Var)]


def sizes_read(expr: Expr) -> Iterator[Dim]:
    """Yield the sizes in an expression's literals and attributes."""
    yield from sizes_in_atoms(atoms_of(expr))
    yield from sizes_in_attrs(expr)


def sizes_in_atoms(atoms: Iterable[object]) -> Iterator[Dim]:
    """Yield the dims that are used as numbers."""
    return (atom.value for atom in atoms if isinstance(atom, Scalar) and isinstance(atom.value, Dim))


def sizes_in_attrs(expr: Expr) -> Iterator[Dim]:
    """Yield the sizes in an expression's attributes, and in the type that a `match_shape` checks."""
    if isinstance(expr, Call):
        for attr in expr.attrs.values():
            if not isinstance(attr, (int, float, str)):  # as most are
                yield from dims_in(attr)
    elif isinstance(expr, MatchShape):
        yield from (size for size in sizes_of(expr.type) if isinstance(size, Dim))


def dims_in(attr: Any) -> Iterator[Dim]:
    """Yield the dims in an attribute value."""
    if isinstance(attr, Dim):
        yield attr
    elif isinstance(attr, _TYPES):
        yield from (size for size in sizes_of(attr) if isinstance(size, Dim))
    elif isinstance(attr, (tuple, list)):
        for item in attr:
            yield from dims_in(item)
    elif isinstance(attr, Mapping):
        for item in attr.values():
            yield from dims_in(item)
