# SPDX-License-Identifier: Apache-2.0
"""What is known about dims inside a branch: where `within(dim(n), ranges=((16, 16, None),))` holds, n is 16.

*Facts* map a dim to what it is in a branch: a number, or itself with a narrower range or a greater divisor. Types are written with
the dims of the function everywhere; facts only help to see that they fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from nnfront.dims import Dim, Size, Symbol, as_symbol, of_symbol, solve, substitute
from nnfront.errors import DimError, InferError
from nnfront.ir.expr import Atom, Block, Call, Expr, FunctionCall, If, Scalar, Var
from nnfront.ir.infer import call_type, infer, map_sizes, substitute_type
from nnfront.ir.types import Type
from nnfront.ir.walk import walk_exprs

if TYPE_CHECKING:
    from nnfront.ir.module import Function

Facts: TypeAlias = Mapping[Symbol, Size]

NO_FACTS: Facts = {}


def known_where(condition: Atom, values: Mapping[Var, Expr]) -> dict[Symbol, Size]:
    """Return what holds where a condition does; `values` are the expressions of variables."""
    facts: dict[Symbol, Size] = {}
    for size, low, high, step in _said(condition, values):
        symbol = as_symbol(size)
        if symbol is None:
            if low is not None and low == high:
                facts |= _solved(size, low)
            continue
        known = facts.get(symbol, of_symbol(symbol))
        own = as_symbol(known)
        if own is not None:
            facts[symbol] = _narrowed(own, low, high, step)
    return facts


def is_true(condition: Atom, values: Mapping[Var, Expr]) -> bool | None:
    """Return whether a condition holds, where numbers alone decide that; None where it depends on the call."""
    if isinstance(condition, Scalar) and isinstance(condition.value, bool):
        return condition.value
    made = values.get(condition) if isinstance(condition, Var) else None
    if isinstance(made, If):
        first = is_true(made.condition, values)
        if first is None:
            return None
        return is_true((made.then if first else made.otherwise).result, values)
    said = list(_said(condition, values))
    answers = [_holds(size, low, high, step) for size, low, high, step in said]
    if False in answers:
        return False
    is_whole = isinstance(made, Call) and len(said) == len(made.args) and bool(said)
    return True if is_whole and None not in answers else None


def _holds(size: Size, low: int | None, high: int | None, step: int | None) -> bool | None:
    if not isinstance(size, int):
        return None
    return (low is None or size >= low) and (high is None or size <= high) and not (step and size % step)


def branch_facts(function: Function) -> dict[int, dict[Symbol, Size]]:
    """Return, by the id of each `if` of a function, what its condition says where it holds; those that say nothing are left out."""
    if not any(isinstance(expr, If) for expr in walk_exprs(function)):
        return {}
    values: dict[Var, Expr] = {}
    found: dict[int, dict[Symbol, Size]] = {}

    def visit(block: Block) -> None:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                facts = known_where(value.condition, values)
                if facts:
                    found[id(value)] = facts
                visit(value.then)
                visit(value.otherwise)
            values[binding.var] = value

    visit(function.body)
    return found


def infer_within(expr: Expr, functions: Mapping[str, Function], facts: Facts) -> Type:
    """Return the type of an expression where these facts hold, written with the function's own dims where they are no numbers.

    Raises InferError if operands do not fit even so.
    """
    if not facts:
        return infer(expr, functions)
    match expr:
        case Call():
            types = [None if a is None else substitute_type(a.type, facts) for a in expr.args]
            attrs = {
                name: map_attr(value, lambda s: substitute(s, facts)) for name, value in expr.attrs.items()
            }
            found = expr.op.result_type(types, attrs)
        case FunctionCall():
            found = call_type(functions[expr.function], [substitute_type(a.type, facts) for a in expr.args])
        case _:
            return infer(expr, functions)
    own = {s: of_symbol(s) for s in facts}
    return substitute_type(found, own)


def infer_known(expr: Expr, functions: Mapping[str, Function], facts: Facts) -> Type:
    """Return the type of an expression, with the help of facts only where it has none without."""
    try:
        return infer(expr, functions)
    except InferError:
        if not facts:
            raise
        return infer_within(expr, functions, facts)


def map_attr(value: Any, size: Any) -> Any:
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


def _said(
    condition: Atom, values: Mapping[Var, Expr]
) -> Iterator[tuple[Size, int | None, int | None, int | None]]:
    """Yield (size, least, greatest, divisor) for what a condition says about sizes."""
    made = values.get(condition) if isinstance(condition, Var) else None
    if isinstance(made, Call):
        yield from made.op.said_where_true([a.type if a else None for a in made.args], made.attrs)
    elif isinstance(made, Var):
        yield from _said(made, values)
    elif (
        isinstance(made, If)
        and isinstance(made.otherwise.result, Scalar)
        and made.otherwise.result.value is False
    ):
        inner = {**values, **{b.var: b.value for b in made.then.bindings}}
        yield from _said(made.condition, values)
        yield from _said(made.then.result, inner)


def _solved(size: Size, number: int) -> dict[Symbol, Size]:
    try:
        return dict(solve([(size, number)]))
    except DimError:  # it never holds: what is in the branch does not matter
        return {}


def _narrowed(symbol: Symbol, low: int | None, high: int | None, step: int | None) -> Size:
    """The dim with more facts; as it is if no number meets them."""
    least, most, divisor = symbol.facts
    least = least if low is None else max(least, low)
    most = most if high is None else high if most is None else min(most, high)
    divisor = divisor if step is None else math.lcm(divisor, step)
    first = -(-least // divisor) * divisor
    if most is not None and first > most:
        return of_symbol(symbol)
    if most is not None and first + divisor > most:
        return first
    return of_symbol(Symbol(symbol.name, symbol.uid, least, most, divisor))
