# SPDX-License-Identifier: Apache-2.0
"""The cases in a function's attributes, when its dims get other names or become numbers and its arguments go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from nnfront.cases.conditions import Conditions, from_plain, joined, meets, parts_of, to_plain
from nnfront.dims import Size, Symbol, as_symbol, of_symbol, parse, substitute
from nnfront.ir import NO_ATTRS, Atom, Function
from nnfront.ops.constants import value_of

DECLARED = "special_cases"
"""The attribute of a function whose spec declares cases, in order."""
LISTED = "cases"
"""The attribute of a function that chooses among cases: each under its text, in the order in which they are asked."""


def settled(
    function: Function, size: Callable[[Size], Size], known: Mapping[str, Atom] = NO_ATTRS
) -> dict[str, Any]:
    """Return a function's attributes where `size` says what its dims are now, and `known` what stands for arguments.

    Conditions that are decided go, and a case that cannot hold any more. A declared case that always holds ends the list:
    nothing is left to specialise by it.
    """
    attrs = dict(function.attrs)
    if not {LISTED, DECLARED} & attrs.keys():
        return attrs
    dims = {Symbol(symbol.name): size(of_symbol(symbol)) for symbol in function.symbols}
    arguments = {p.name for p in function.inputs if Symbol(p.name) not in dims}
    if LISTED in attrs:
        cases = {
            text: _open(from_plain(case), dims, arguments, known) for text, case in attrs[LISTED].items()
        }
        attrs[LISTED] = {text: to_plain(left) for text, left in cases.items() if left is not None}
    declared = []
    for case in attrs.pop(DECLARED, ()):
        left = _open(from_plain(case), dims, arguments, known)
        if left == {}:
            break
        if left is not None and all(name.isidentifier() for name in left):
            declared.append(to_plain(left))
    return {**attrs, DECLARED: tuple(declared)} if declared else attrs


def _open(
    conditions: Conditions,
    dims: Mapping[Symbol, Size],
    arguments: Collection[str],
    known: Mapping[str, Atom],
) -> dict[str, Any] | None:
    """The conditions that are still open, under the names of now; None if one does not hold."""
    left: dict[str, Any] = {}
    for name, condition in conditions.items():
        value: Any = None
        if name not in arguments:
            value = substitute(parse(name), dims)
            symbol = as_symbol(value)
            name = str(value) if symbol is None else symbol.name
        elif name in known:
            value = value_of(known[name])
        if value is None or not isinstance(value, int | float | torch.Tensor):
            left = joined(left, {name: condition})
        elif not all(meets(value, part) for part in parts_of(condition)):
            return None
    return left
