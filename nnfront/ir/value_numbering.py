# SPDX-License-Identifier: Apache-2.0
"""Hashable keys: two expressions with equal keys have the same value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from nnfront.dims import Dim
from nnfront.ir.expr import Atom, Call, Constant, Expr, FunctionCall, MatchShape, Projection, Scalar, Tuple


def atom_key(atom: Atom | None) -> Hashable:
    """Return the key of a literal, a constant or an absent operand; variables are the caller's to identify."""
    if isinstance(atom, Scalar):
        return attr_key(atom.value)
    if isinstance(atom, Constant):
        return (atom.type, atom.data)
    return atom


def expr_key(expr: Expr, operands: Sequence[Hashable]) -> Hashable | None:
    """Return the key of an expression, given those of its operands in the order of `ir.atoms_of`; None for an `if`."""
    match expr:
        case Call():
            return (expr.op, *operands, attr_key(expr.attrs)) if expr.attrs else (expr.op, *operands)
        case Projection():
            return ("field", expr.index, *operands)
        case Tuple():
            return ("tuple", expr.names, *operands)
        case FunctionCall():
            return ("call", expr.function, *operands)
        case MatchShape():
            return ("match", expr.type, *operands)
        case Constant() | Scalar():
            return atom_key(expr)
        case _:
            return None


def attr_key(value: Any) -> Hashable:
    """Return the key of an attribute value. 1, 1.0 and True are three values, 0.0 and -0.0 two, and nan is nan."""
    if type(value) is int or isinstance(value, str | Dim) or value is None:
        return value
    if isinstance(value, bool | float):
        return (type(value), repr(value))
    if isinstance(value, tuple | list):
        return tuple(map(attr_key, value))
    if isinstance(value, Mapping):
        return frozenset([(name, attr_key(item)) for name, item in value.items()])
    key: Hashable = value
    return key
