# SPDX-License-Identifier: Apache-2.0
"""Replace the sizes in functions, attributes and literals; `ir.map_sizes` does types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from nnfront.cases.attributes import settled
from nnfront.dims import Dim, Size
from nnfront.ir import (
    NO_ATTRS,
    Atom,
    Binding,
    Call,
    Expr,
    Facts,
    Function,
    If,
    MatchShape,
    Mutator,
    Param,
    Provenance,
    Scalar,
    Var,
    branch_knows,
    canonical_call,
    infer_known,
    is_true,
    map_attr,
    map_sizes,
)

SizeMap: TypeAlias = Callable[[Size], Size]


def map_scalar(atom: Atom, size: SizeMap) -> Atom:
    """Return a literal with `size` applied if it is a dim, any other atom as it is."""
    return Scalar(size(atom.value)) if isinstance(atom, Scalar) and isinstance(atom.value, Dim) else atom


def resize_expr(expr: Expr, size: SizeMap) -> Expr:
    """Return an expression with the sizes in its attributes replaced; its operands are left alone, and the blocks of an `if`."""
    if isinstance(expr, Call) and expr.attrs:
        return replace(expr, attrs={name: map_attr(value, size) for name, value in expr.attrs.items()})
    if isinstance(expr, MatchShape):
        return replace(expr, type=map_sizes(expr.type, size))
    return expr


def resize(
    function: Function,
    size: SizeMap,
    functions: Mapping[str, Function],
    known: Mapping[str, Atom] = NO_ATTRS,
) -> Function:
    """Return a function with `size` applied to every size in it; its variables are new ones.

    `known` stands for the parameters of these names, which go. Raises InferError if an op is not defined for what its
    operands become.
    """
    resizer = Resizer(size, functions)
    params = [Param(p.name, map_sizes(p.type, size), p.role) for p in function.params]
    resizer.replaced.update(zip(function.params, (known.get(p.name, p) for p in params), strict=True))
    params = [p for p in params if p.name not in known]
    body = resizer.block(function.body)
    attrs = {name: map_attr(value, size) for name, value in settled(function, size, known).items()}
    return replace(function, params=tuple(params), bindings=body.bindings, result=body.result, attrs=attrs)


class Knowing(Mutator):
    """Rewrites a body and knows in each branch of an `if` what its condition says; `values` are the expressions of new variables."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Var, Expr] = {}
        self.facts: Facts = {}  # what the branch that is being rewritten knows

    def expr(self, expr: Expr) -> Expr:
        """Rewrite an expression."""
        if not isinstance(expr, If):
            return super().expr(expr)
        condition, outer = self.atom(expr.condition), self.facts
        self.facts = branch_knows(condition, self.values, outer)
        then = self.block(expr.then)
        self.facts = outer
        return expr.with_(condition, then, self.block(expr.otherwise))


class Resizer(Knowing):
    """Rewrites a body into new variables with `size` applied to every size in it, types inferred again; None: sizes stay.

    `rename` gives the new variables their names, `place` the bindings their provenance.
    """

    def __init__(
        self,
        size: SizeMap | None,
        functions: Mapping[str, Function],
        rename: Callable[[str], str] = str,
        place: Callable[[Provenance | None], Provenance | None] = lambda provenance: provenance,
    ) -> None:
        super().__init__()
        self.size = size
        self.functions = functions
        self.rename = rename
        self.place = place

    def binding(self, binding: Binding) -> Sequence[Binding]:
        """Give the binding a new variable. An `if` that the sizes decide is its branch."""
        value, type = binding.value, binding.var.type
        if isinstance(value, If) and self.size is not None:
            taken = is_true(self.atom(value.condition), self.values, self.facts)
            if taken is not None:
                block = self.block(value.then if taken else value.otherwise)
                self.replaced[binding.var] = block.result
                return block.bindings
        value = self.expr(value)
        if self.size is not None:
            value = resize_expr(value, self.size)
            if isinstance(value, Call) and value.attrs:  # whose form may depend on the sizes of operands
                value = canonical_call(value.op, value.args, value.attrs)
            type = (
                map_sizes(type, self.size)
                if isinstance(value, If)
                else infer_known(value, self.functions, self.facts)
            )
        var = Var(self.rename(binding.var.name), type)
        self.values[var] = value
        self.replaced[binding.var] = var
        return (Binding(var, value, self.place(binding.provenance)),)

    def atom(self, atom: Atom) -> Atom:
        """Replace a variable, or the dim in a literal."""
        if isinstance(atom, Var):
            return self.replaced.get(atom, atom)
        return atom if self.size is None else map_scalar(atom, self.size)
