# SPDX-License-Identifier: Apache-2.0
"""Functions that share a transform, in the same dims.

A named dim is the same in all of them. A fresh one belongs to its function: those of two functions are one if they stand in the
same place of the same weight. A transform may have one name for what its methods know by an expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations

from nnfront.dims import Dim, Size, Symbol, as_symbol, of_symbol, same, substitute
from nnfront.ir import Function, TupleType, Type, sizes_of
from nnfront.passes.sizes import resize

_MOST = 5  # fresh dims in one size of which every order is tried


def agreed(methods: Iterable[Function], functions: Mapping[str, Function]) -> list[Function]:
    """Return the methods with the fresh dims of each weight those of the first method that has it."""
    first: dict[str, Type] = {}
    result: list[Function] = []
    for method in methods:
        pairs = [(param.type, first.setdefault(param.name, param.type)) for param in method.weights]
        result.append(_resized(method, _renamed(pairs), functions))
    return result


def restated(transform: Function, methods: Iterable[Function], functions: Mapping[str, Function]) -> Function:
    """Return an existing transform in the dims of its methods."""
    type = transform.result_type
    results = (
        dict(zip(type.names, type.fields, strict=True)) if isinstance(type, TupleType) and type.names else {}
    )
    pairs = [
        (results[param.name], param.type)
        for method in methods
        if method.attrs.get("transform") == transform.name
        for param in method.params
        if param.role == "transformed" and param.name in results
    ]
    own: dict[Symbol, Size] = {}
    for here, there in _sizes(pairs):
        symbol = as_symbol(here)
        if symbol is not None and not same(here, there):
            own.setdefault(symbol, there)
    return _resized(transform, _renamed(pairs) | own, functions)


def _sizes(pairs: Iterable[tuple[Type, Type]]) -> list[tuple[Size, Size]]:
    """The sizes of each two types side by side, those that say most about a dim first."""
    sizes = [
        pair
        for here, there in pairs
        if here is not there
        for pair in zip(sizes_of(here), sizes_of(there), strict=False)
    ]
    return sorted(sizes, key=lambda pair: len(pair[0].symbols) if isinstance(pair[0], Dim) else 0)


def _renamed(pairs: Iterable[tuple[Type, Type]]) -> dict[Symbol, Size]:
    """The fresh dims of each first type as the second calls them, as far as one size is the other with its dims renamed."""
    found: dict[Symbol, Size] = {}
    for here, there in _sizes(pairs):
        if not isinstance(here, Dim) or not isinstance(there, Dim):
            continue
        mine = [s for s in here.symbols if s.uid and s not in found]
        its = [s for s in there.symbols if s.uid]
        for order in permutations(its, len(mine)) if len(its) <= _MOST else ():
            names = dict(zip(mine, map(of_symbol, order), strict=True))
            if same(substitute(here, found | names), there):
                found |= names
                break
    return {symbol: size for symbol, size in found.items() if not same(size, of_symbol(symbol))}


def _resized(function: Function, own: Mapping[Symbol, Size], functions: Mapping[str, Function]) -> Function:
    return resize(function, lambda size: substitute(size, own), functions) if own else function
