# SPDX-License-Identifier: Apache-2.0
"""What is known about dims inside a branch: where `within(dim(n), ranges=((16, 16, None),))` holds, n is 16.

*Facts* map a dim to what it is in a branch: a number, or itself with a narrower range or a greater divisor. Types are written with
the dims of the function everywhere; facts only help to see that they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from nnfront.dims import (
    Dim,
    Size,
    Symbol,
    divides,
    less_equal,
    narrowed,
    of_symbol,
    solve,
    substitute,
    within,
)
from nnfront.errors import DimError, InferError
from nnfront.ir.expr import Atom, Block, Call, Expr, FunctionCall, If, Scalar, Var
from nnfront.ir.infer import call_type, infer, map_sizes, substitute_type
from nnfront.ir.types import Type
from nnfront.ir.walk import walk_exprs

if TYPE_CHECKING:
    from nnfront.ir.module import Function

Facts: TypeAlias = Mapping[Symbol, Size]

NO_FACTS: Facts = {}


def facts_where(condition: Atom, values: Mapping[Var, Expr], outer: Facts = NO_FACTS) -> Facts | None:
    """Return what is known where a condition holds, together with what is known around it; None if both never hold.

    `values` are the expressions of variables.
    """
    facts = dict(outer)
    implied = list(_implied(condition, values))
    for _ in implied:  # what becomes a number may decide what is said of another
        for size, *bounds in implied:
            if not _learn(facts, substitute(size, facts), *bounds):
                return None
    return facts


def branch_knows(condition: Atom, values: Mapping[Var, Expr], outer: Facts) -> Facts:
    """Return what is known in a branch. In one that never runs, what its condition says comes before what contradicts it."""
    known = facts_where(condition, values, outer)
    if known is not None:
        return known
    facts = dict(outer)
    for size, *bounds in _implied(condition, values):
        if not _learn(facts, substitute(size, facts), *bounds):
            _learn(facts, size, *bounds)
    return facts


def is_true(condition: Atom, values: Mapping[Var, Expr], facts: Facts = NO_FACTS) -> bool | None:
    """Return whether a condition holds where these facts do; None where it depends on the call."""
    if isinstance(condition, Scalar) and isinstance(condition.value, bool):
        return condition.value
    made = values.get(condition) if isinstance(condition, Var) else None
    if isinstance(made, Var):
        return is_true(made, values, facts)
    if isinstance(made, If):
        first = is_true(made.condition, values, facts)
        if first is not None:
            taken = made.then if first else made.otherwise
            return is_true(taken.result, _inside(taken, values), facts)
    if facts_where(condition, values, facts) is None:
        return False
    implied = list(_implied(condition, values))
    is_whole = isinstance(made, Call) and len(implied) == len(made.args) > 0
    return True if is_whole and all(_meets(substitute(size, facts), *b) for size, *b in implied) else None


def branch_facts(function: Function) -> dict[int, Facts]:
    """Return, by the id of each `if` of a function, what is known where its condition holds; ifs of which nothing is are left out."""
    if not any(isinstance(expr, If) for expr in walk_exprs(function)):
        return {}
    values: dict[Var, Expr] = {}
    found: dict[int, Facts] = {}

    def visit(block: Block, outer: Facts) -> None:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                known = branch_knows(value.condition, values, outer)
                if known:
                    found[id(value)] = known
                visit(value.then, known)
                visit(value.otherwise, outer)
            values[binding.var] = value

    visit(function.body, NO_FACTS)
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


def _implied(
    condition: Atom, values: Mapping[Var, Expr]
) -> Iterator[tuple[Size, int | None, int | None, int | None]]:
    """Yield (size, least, greatest, divisor) for what a condition says about sizes."""
    made = values.get(condition) if isinstance(condition, Var) else None
    if isinstance(made, Call):
        yield from made.op.implied_facts([a.type if a else None for a in made.args], made.attrs)
    elif isinstance(made, Var):
        yield from _implied(made, values)
    elif (
        isinstance(made, If)
        and isinstance(made.otherwise.result, Scalar)
        and made.otherwise.result.value is False
    ):
        yield from _implied(made.condition, values)
        yield from _implied(made.then.result, _inside(made.then, values))


def _inside(block: Block, values: Mapping[Var, Expr]) -> dict[Var, Expr]:
    """The expressions of variables that are known at the end of a block."""
    return {**values, **{b.var: b.value for b in block.bindings}}


def _learn(
    facts: dict[Symbol, Size], size: Size, low: int | None, high: int | None, step: int | None
) -> bool:
    """Note what it means for the facts that a size is in a range. Return whether any number can be that."""
    if _meets(size, low, high, step) is False:
        return False
    linear = within(size, low, high, step)
    if linear is not None:
        symbol, *bounds = linear
        known = narrowed(symbol, *bounds)
        if known is None:
            return False
        facts[symbol] = of_symbol(known) if known.only is None else known.only
    elif isinstance(size, Dim) and low is not None and low == high:
        try:
            found = solve([(size, low)])
        except DimError:
            return False
        facts.update(found)
    return True


def _meets(size: Size, low: int | None, high: int | None, step: int | None) -> bool | None:
    """Whether a size is in a range for every number that it can be, for none (False), or for some (None)."""
    answers = [
        True if low is None else less_equal(low, size),
        True if high is None else less_equal(size, high),
        True if step is None else divides(step, size),
    ]
    return False if False in answers else None if None in answers else True
