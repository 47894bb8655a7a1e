# SPDX-License-Identifier: Apache-2.0
"""The cases in a function's attributes, when its dims get other names or become numbers and its arguments go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnfront.cases.conditions import dim_bounds, from_plain, parts_of, to_plain
from nnfront.dims import Size, as_symbol, of_symbol
from nnfront.ir import Function

# From a name to what it is now: another size, a number, or None for an argument that went. Names that stay are left out.
Settled = Mapping[str, Any]


def resized_cases(function: Function, size: Callable[[Size], Size]) -> dict[str, Any]:
    """Return the attributes of a function with `size` applied to the dims that its cases name."""
    if not {"cases", "special_cases"} & function.attrs.keys():
        return dict(function.attrs)
    return settled_cases(function.attrs, {s.name: size(of_symbol(s)) for s in function.symbols})


def settled_cases(attrs: Mapping[str, Any], known: Settled) -> dict[str, Any]:
    """Return attributes without the conditions that are decided: a case that cannot hold any more goes.

    A declared case that always holds ends the list: nothing is left to specialise by it.
    """
    result = dict(attrs)
    if "cases" in attrs:
        cases = {text: _settled(conditions, known) for text, conditions in attrs["cases"].items()}
        result["cases"] = {text: conditions for text, conditions in cases.items() if conditions is not None}
    if "special_cases" in attrs:
        declared = []
        for conditions in attrs["special_cases"]:
            left = _settled(conditions, known)
            if left == {}:
                break
            if left is not None and all(name.isidentifier() for name in left):
                declared.append(left)
        result["special_cases"] = tuple(declared)
        if not declared:
            del result["special_cases"]
    return result


def _settled(conditions: Mapping[str, Any], known: Settled) -> dict[str, Any] | None:
    """The conditions that are still open, under the names of now; None if one cannot hold."""
    left: dict[str, Any] = {}
    for name, condition in from_plain(conditions).items():
        new = known.get(name, name)
        if isinstance(new, str):
            left[name] = condition
        elif isinstance(new, bool | int | float):
            if not all(_holds(part, new) for part in parts_of(condition)):
                return None
        elif new is None:
            return None
        else:
            symbol = as_symbol(new)
            left[str(new) if symbol is None else symbol.name] = condition
    return to_plain(left)


def _holds(condition: Any, number: bool | int | float) -> bool:
    bounds = dim_bounds(condition)
    if bounds is None or isinstance(number, bool):
        return type(condition) is type(number) and bool(condition == number)
    low, high, step = bounds
    if type(condition) is int:
        return condition == number
    return low <= number and (high is None or number <= high) and number % step == 0
