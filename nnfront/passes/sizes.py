# SPDX-License-Identifier: Apache-2.0
"""Replace the sizes in functions, attributes and literals; `ir.map_sizes` does types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, get_args

from nnfront.dims import Dim, Size
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Expr,
    Function,
    MatchShape,
    Mutator,
    Param,
    Scalar,
    Type,
    Var,
    map_sizes,
)

SizeMap: TypeAlias = Callable[[Size], Size]


def map_attr(value: Any, size: SizeMap) -> Any:
    """Return the value of an attribute with `size` applied to each dim in it."""
    if type(value) in (int, str, float, bool):
        return value
    if isinstance(value, Dim):
        return size(value)
    if isinstance(value, tuple | list):
        return tuple(map_attr(item, size) for item in value)
    if isinstance(value, Mapping):
        return {name: map_attr(item, size) for name, item in value.items()}
    return map_sizes(value, size) if isinstance(value, get_args(Type)) else value


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


def resize(function: Function, size: SizeMap) -> Function:
    """Return a function with `size` applied to every size in it; its variables are new ones."""
    resizer = Resizer(size)
    params = tuple(Param(p.name, map_sizes(p.type, size), p.role) for p in function.params)
    resizer.replaced.update(zip(function.params, params, strict=True))
    body = resizer.block(function.body)
    attrs = {name: map_attr(value, size) for name, value in function.attrs.items()}
    return replace(function, params=params, bindings=body.bindings, result=body.result, attrs=attrs)


class Resizer(Mutator):
    """Rewrites a body with `size` applied to every size in it, into new variables called as `rename` says."""

    def __init__(self, size: SizeMap, rename: Callable[[str], str] = str) -> None:
        super().__init__()
        self.size = size
        self.rename = rename

    def binding(self, binding: Binding) -> Sequence[Binding]:
        """Give the binding a new variable."""
        value = resize_expr(self.expr(binding.value), self.size)
        var = Var(self.rename(binding.var.name), map_sizes(binding.var.type, self.size))
        self.replaced[binding.var] = var
        return (Binding(var, value, binding.provenance),)

    def atom(self, atom: Atom) -> Atom:
        """Replace a variable, or the dim in a literal."""
        return self.replaced.get(atom, atom) if isinstance(atom, Var) else map_scalar(atom, self.size)
