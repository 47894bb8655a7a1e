# SPDX-License-Identifier: Apache-2.0
"""Functions that share a transform, in the same dims.

A named dim is the same in all of them. A fresh one belongs to its function: those of two functions are one if they stand in the
same place of the same weight, and only then. A transform may have one name for what its methods know by an expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import permutations
from typing import TypeAlias

from nnfront.dims import Dim, Size, Symbol, as_symbol, of_symbol, same, substitute
from nnfront.ir import Function, TupleType, Type, sizes_of, substitute_type, symbols_in, type_symbols
from nnfront.passes.lifting.dims import dims_of
from nnfront.passes.sizes import resize

Renaming: TypeAlias = dict[Symbol, Size]

_MOST = 5  # fresh dims in one size of which every order is tried


def agreed(
    methods: Sequence[Function], transforms: Sequence[Function], functions: Mapping[str, Function]
) -> tuple[list[Function], list[Function]]:
    """Return methods and the transforms that they have in the same dims."""
    shared = [param.type for method in methods for param in method.params if param.role != "input"]
    shared += [param.type for transform in transforms for param in transform.params]
    if not any(symbol.uid for dim in dims_of(shared) for symbol in dim.symbols):
        return [*methods], [*transforms]  # a dim with a name is the same wherever it stands
    made = {transform.name: transform for transform in transforms}
    methods = _linked(methods, made, functions)
    stated = [_resized(transform, _restating(transform, methods), functions) for transform in transforms]
    settled = {symbol for method in methods for symbol in symbols_in(method)}
    linked = _linked([*methods, *stated], {}, functions, settled)
    return linked[: len(methods)], linked[len(methods) :]


def _linked(
    users: Sequence[Function],
    transforms: Mapping[str, Function],
    functions: Mapping[str, Function],
    settled: Set[Symbol] = frozenset(),
) -> list[Function]:
    """Return the functions with one name for the fresh dims that a weight says are one, all others but those settled apart."""
    taken: set[Symbol] = set()
    apart: list[Renaming] = []
    first: dict[tuple[str, str], Type] = {}
    pairs: list[tuple[Type, Type]] = []
    for function in users:
        types = _weight_types(function, transforms)
        fresh = [s for s in symbols_in(function) if s.uid]
        names: Renaming = {s: of_symbol(Symbol.fresh(s.name, *s.facts) if s in taken else s) for s in fresh}
        taken.update(set(fresh) - settled)
        apart.append(names)
        for place, type in types.items():
            type = substitute_type(type, names)
            pairs.append((type, first.setdefault(place, type)))
    joined = _renaming(pairs)
    return [
        _resized(function, {s: substitute(size, joined) for s, size in names.items()}, functions)
        for function, names in zip(users, apart, strict=True)
    ]


def _weight_types(function: Function, transforms: Mapping[str, Function]) -> dict[tuple[str, str], Type]:
    """The types of a function's weights by transform and name, and of what these are made of if that is said in its own dims."""
    made_by = function.attrs.get("transform", "")
    types = {("" if p.role == "weight" else made_by, p.name): p.type for p in function.weights}
    if made_by in transforms:
        transform = transforms[made_by]
        own = _restating(transform, [function])
        known = {s for s in symbols_in(function) if s.uid}
        made_of = {("", p.name): substitute_type(p.type, own) for p in transform.params}
        types |= {
            place: type
            for place, type in made_of.items()
            if known.issuperset(s for s in type_symbols(type) if s.uid)
        }
    return types


def _restating(transform: Function, methods: Iterable[Function]) -> Renaming:
    """What its methods call the dims of a transform."""
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
    own: Renaming = {}
    for here, there in _sizes(pairs):
        symbol = as_symbol(here)
        if symbol is not None and not same(here, there):
            own.setdefault(symbol, there)
    return _renaming(pairs) | own


def _sizes(pairs: Iterable[tuple[Type, Type]]) -> list[tuple[Size, Size]]:
    """The sizes of each two types side by side, those that say most about a dim first."""
    sizes = [pair for here, there in pairs for pair in zip(sizes_of(here), sizes_of(there), strict=False)]
    return sorted(sizes, key=lambda pair: len(pair[0].symbols) if isinstance(pair[0], Dim) else 0)


def _renaming(pairs: Iterable[tuple[Type, Type]]) -> Renaming:
    """What to call fresh dims so that each two types are one, as far as one size is the other with its dims renamed."""
    found: Renaming = {}
    for here, there in _sizes(pairs):
        here, there = substitute(here, found), substitute(there, found)
        if same(here, there) or not isinstance(here, Dim) or not isinstance(there, Dim):
            continue
        mine = [s for s in here.symbols if s.uid and s not in there.symbols]
        its = [s for s in there.symbols if s.uid and s not in here.symbols]
        for order in permutations(its, len(mine)) if len(its) <= _MOST else ():
            names: Renaming = dict(zip(mine, map(of_symbol, order), strict=True))
            if same(substitute(here, names), there):
                found = {symbol: substitute(size, names) for symbol, size in found.items()} | names
                break
    return found


def _resized(function: Function, own: Renaming, functions: Mapping[str, Function]) -> Function:
    if all(same(size, of_symbol(symbol)) for symbol, size in own.items()):
        return function
    return resize(function, lambda size: substitute(size, own), functions)
