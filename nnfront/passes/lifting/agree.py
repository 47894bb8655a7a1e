# SPDX-License-Identifier: Apache-2.0
"""Functions that share a transform, in the same dims.

A named dim is the same in all of them. A fresh one belongs to its function: those of two functions are one if they stand in the
same place of the same weight. A transform may have one name for what its methods know by an expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nnfront.dims import Size, Symbol, as_symbol, of_symbol, same, substitute
from nnfront.ir import Function, TupleType, Type, sizes_of
from nnfront.passes.sizes import resize


def agreed(methods: Iterable[Function], functions: Mapping[str, Function]) -> list[Function]:
    """Return the methods with the fresh dims of each weight those of the first method that has it."""
    first: dict[str, Type] = {}
    result: list[Function] = []
    for method in methods:
        own: dict[Symbol, Size] = {}
        for param in method.weights:
            known = first.setdefault(param.name, param.type)
            for here, there in (
                () if known is param.type else zip(sizes_of(param.type), sizes_of(known), strict=False)
            ):
                mine, its = as_symbol(here), as_symbol(there)
                if mine is not None and its is not None and mine.uid and its.uid and mine != its:
                    own[mine] = of_symbol(its)
        result.append(_resized(method, own, functions))
    return result


def restated(transform: Function, methods: Iterable[Function], functions: Mapping[str, Function]) -> Function:
    """Return an existing transform in the dims of its methods."""
    type = transform.result_type
    results = (
        dict(zip(type.names, type.fields, strict=True)) if isinstance(type, TupleType) and type.names else {}
    )
    own: dict[Symbol, Size] = {}
    for param in [p for m in methods if m.attrs.get("transform") == transform.name for p in m.params]:
        if param.role == "transformed" and param.name in results:
            for here, there in zip(sizes_of(results[param.name]), sizes_of(param.type), strict=True):
                symbol = as_symbol(here)
                if symbol is not None and not same(here, there):
                    own[symbol] = there
    return _resized(transform, own, functions)


def _resized(function: Function, own: Mapping[Symbol, Size], functions: Mapping[str, Function]) -> Function:
    return resize(function, lambda size: substitute(size, own), functions) if own else function
