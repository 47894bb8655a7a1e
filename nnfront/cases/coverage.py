# SPDX-License-Identifier: Apache-2.0
"""What cases say about one another: which one leaves nothing to another, and which two an input may meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nnfront.cases.conditions import Case, exclude
from nnfront.dims import Symbol, join_facts
from nnfront.errors import PassError

MOST_POINTS = 1 << 12
"""How many combinations of sizes are tried to see whether several cases together leave nothing."""


def covers(wide: Case, narrow: Case) -> bool:
    """Whether every input that meets `narrow` meets `wide`, by looking at one condition after the other."""
    inside = {d.symbol: d.symbol for d in narrow.dims}
    for dim in wide.dims:
        low, high, step = dim.symbol.facts
        its = inside.get(dim.symbol, dim.own)
        if its.low < low or (high is not None and its.high > high):
            return False
        if its.multiple_of % step and not (its.low == its.high and its.low % step == 0):
            return False
    return _values_hold(wide, narrow)


def _values_hold(wide: Case, narrow: Case) -> bool:
    given = {(v.name, type(value), value) for v in narrow.values for value in v.values}
    return all((v.name, type(value), value) in given for v in wide.values for value in v.values)


def is_covered(case: Case, earlier: Sequence[Case]) -> bool:
    """Whether no input is left for a case behind these: one of them covers it, or all of them together do.

    Together is asked where the case leaves few sizes: each of them is tried.
    """
    if any(covers(other, case) for other in earlier):
        return True
    relevant = [other for other in earlier if other.dims and _values_hold(other, case)]
    if not relevant:
        return False
    symbols = {d.own: d.own for other in relevant for d in other.dims} | {
        d.symbol: d.symbol for d in case.dims
    }
    points: list[dict[Symbol, int]] = [{}]
    for symbol in symbols.values():
        if math.isinf(symbol.high):
            return False
        numbers = range(int(symbol.low), int(symbol.high) + 1, symbol.multiple_of)
        if len(points) * len(numbers) > MOST_POINTS:
            return False
        points = [{**point, symbol: number} for point in points for number in numbers]
    return all(
        any(all(admits(d.symbol, point[d.symbol]) for d in other.dims) for other in relevant)
        for point in points
    )


def admits(symbol: Symbol, number: int) -> bool:
    """Whether a number is inside the facts of a dim."""
    return symbol.low <= number <= symbol.high and number % symbol.multiple_of == 0


def overlap(a: Case, b: Case) -> bool:
    """Whether there may be an input that meets both cases."""
    mine = {d.symbol: d.symbol for d in a.dims}
    if any(join_facts(mine.get(d.symbol, d.symbol), d.symbol) is None for d in b.dims):
        return False
    given = {v.name: v.values for v in a.values}
    return not any(exclude(mine, its) for v in b.values for mine in given.get(v.name, ()) for its in v.values)


def refuse_unreachable(owner: str, cases: Sequence[Case]) -> None:
    """Raise PassError for the first case of the function `owner` that the ones before it leave nothing to."""
    for i, case in enumerate(cases):
        if is_covered(case, cases[:i]):
            one = next((j for j in range(i) if covers(cases[j], case)), None)
            taken = (
                "the cases before it together take"
                if one is None
                else f"case {one}, '{cases[one].text}', takes"
            )
            raise PassError(
                f"case {i} of {owner}, '{case.text}', is never reached",
                details=[f"{taken} all of its inputs"],
                help="put it first, or leave it out",
            )
