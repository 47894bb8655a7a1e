# SPDX-License-Identifier: Apache-2.0
"""Rewrite functions, the blocks of an `if` included.

A `Mutator` returns the same object for what it leaves alone, down to the single expression, so `new is old` tells whether a
pass did anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnfront.ir.expr import (
    Atom,
    Binding,
    Block,
    Call,
    Expr,
    FunctionCall,
    If,
    MatchShape,
    Projection,
    Tuple,
    Var,
)
from nnfront.ir.walk import variables_of

if TYPE_CHECKING:
    from nnfront.ir.module import Function


def used_vars(expr: Expr) -> Iterator[Var]:
    """Yield the variables that an expression reads and does not bind itself, in order, each as often as it is read."""
    if not isinstance(expr, If):
        yield from variables_of(expr)
        return
    if isinstance(expr.condition, Var):
        yield expr.condition
    for block in (expr.then, expr.otherwise):
        bound: set[Var] = set()
        for binding in block.bindings:
            yield from (var for var in used_vars(binding.value) if var not in bound)
            bound.add(binding.var)
        if isinstance(block.result, Var) and block.result not in bound:
            yield block.result


def substitute_atoms(expr: Expr, mapping: Mapping[Var, Atom]) -> Expr:
    """Return `expr` with variables replaced, in the blocks of an `if` too; the same object if it reads none of them."""
    return _Substitution(mapping).expr(expr) if mapping else expr


class Mutator:
    """Rewrites a function: override `binding`, `expr` or `atom`; what comes back unchanged is the same object.

    `binding` returns any number of bindings. A binding that goes or gets another variable leaves its uses behind: put what
    stands for its variable into `self.replaced`, which `atom` looks into. What is put into one of the dicts `scoped` holds to the end of the block.
    """

    def __init__(self, *scoped: dict[Any, Any]) -> None:
        self.replaced: dict[Var, Atom] = {}
        self._scoped = scoped

    def function(self, function: Function) -> Function:
        """Rewrite a function."""
        body = function.body
        new = self.block(body)
        return function if new is body else replace(function, bindings=new.bindings, result=new.result)

    def block(self, block: Block) -> Block:
        """Rewrite the bindings in order, then the result."""
        outside = [dict(known) for known in self._scoped]
        bindings: list[Binding] = []
        for binding in block.bindings:
            bindings.extend(self.binding(binding))
        result = self.atom(block.result)
        for known, before in zip(self._scoped, outside, strict=True):
            known.clear()
            known.update(before)
        if result is block.result and are_same(bindings, block.bindings):
            return block
        return Block(tuple(bindings), result)

    def binding(self, binding: Binding) -> Sequence[Binding]:
        """Rewrite a binding; returns those that take its place."""
        value = self.expr(binding.value)
        return (binding.with_value(value),)

    def expr(self, expr: Expr) -> Expr:
        """Rewrite the operands of an expression and the blocks of an `if`."""
        return map_expr(expr, self.atom, self.block)

    def atom(self, atom: Atom) -> Atom:
        """Rewrite an operand."""
        return self.replaced.get(atom, atom) if isinstance(atom, Var) else atom


class _Substitution(Mutator):
    def __init__(self, mapping: Mapping[Var, Atom]) -> None:
        super().__init__()
        self.replaced.update(mapping)


def map_expr(expr: Expr, atom: Callable[[Atom], Atom], block: Callable[[Block], Block]) -> Expr:
    """Return `expr` with its operands and the blocks of an `if` mapped; the same object if all of them are."""
    match expr:
        case Call():
            args = tuple([None if a is None else atom(a) for a in expr.args])
            return expr if are_same(args, expr.args) else Call(expr.op, args, expr.attrs)
        case FunctionCall():
            values = tuple(map(atom, expr.args))
            return expr if are_same(values, expr.args) else FunctionCall(expr.function, values)
        case Tuple():
            values = tuple(map(atom, expr.fields))
            return expr if are_same(values, expr.fields) else Tuple(values, expr.names)
        case Projection():
            value = atom(expr.tuple)
            return expr if value is expr.tuple else Projection(value, expr.index)
        case MatchShape():
            value = atom(expr.value)
            return expr if value is expr.value else MatchShape(value, expr.type)
        case If():
            return expr.with_(atom(expr.condition), block(expr.then), block(expr.otherwise))
        case _:
            return atom(expr)


def no_block(block: Block) -> Block:
    """For `map_expr` of what is no `if`."""
    raise AssertionError("there are no branches here")


def are_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
