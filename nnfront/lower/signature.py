# SPDX-License-Identifier: Apache-2.0
"""Who binds each dim of a method: the weights when they are loaded, or the arguments of each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nnfront.dims import Dim, Size, Symbol
from nnfront.errors import LowerError
from nnfront.ir import CacheLayerType, CacheType, ScalarType, ShapeType, TensorType, TupleType, Type
from nnfront.lower.program import Argument, DimBinding, Place
from nnfront.lower.slots import Frame, bare_symbol


def places(
    type: Type, argument: str, *, is_weight: bool = False, path: tuple[int, ...] = ()
) -> Iterator[tuple[Place, Size]]:
    """Yield every size in the type of an argument, and where a call finds its value."""
    match type:
        case TensorType(shape=sizes) | ShapeType(sizes=sizes):
            for axis, size in enumerate(sizes):
                yield Place(argument, path, axis, is_weight), size
        case ScalarType():
            if type.value is not None:
                yield Place(argument, path, "value", is_weight), type.value
        case TupleType():
            for i, part in enumerate(type.fields):
                yield from places(part, argument, is_weight=is_weight, path=(*path, i))
        case CacheType():
            for layer in dict.fromkeys(type.layers):
                yield from places(layer, argument, is_weight=is_weight, path=path)
        case CacheLayerType():
            yield Place(argument, path, "batch", is_weight), type.batch
            yield Place(argument, path, "max_seq", is_weight), type.max_seq
        case _:
            return


def bind_dims(
    method: str, arguments: Sequence[Argument], weights: Sequence[Argument], frame: Frame
) -> list[DimBinding]:
    """Return one binding for each dim that the parameters' types name, in the order in which they can be made.

    A place that says a dim by itself is preferred to one that says it through an expression. Weights go first: what they
    bind is the same for all calls.
    Raises LowerError for a dim that no place defines.
    """
    found = [item for weight in weights for item in places(weight.type, weight.name, is_weight=True)]
    found += [item for argument in arguments for item in places(argument.type, argument.name)]
    symbolic = [(place, size) for place, size in found if isinstance(size, Dim)]
    bound: dict[Symbol, DimBinding] = {}
    for is_weight in (True, False):
        here = [(place, size) for place, size in symbolic if place.is_weight == is_weight]
        for place, size in here:
            symbol = bare_symbol(size)
            if symbol is not None and symbol not in bound:
                bound[symbol] = DimBinding(symbol, frame.dim(symbol), place, size)
        while (solved := _next_solved(here, bound)) is not None:
            symbol, place, size = solved
            bound[symbol] = DimBinding(symbol, frame.dim(symbol), place, size)
    for place, size in symbolic:
        for symbol in size.symbols:
            if symbol not in bound:
                raise LowerError(
                    f"{method}: nothing says what '{symbol}' is",
                    details=[f"it occurs in {place}, which is '{size}'"],
                    help=f"make '{symbol}' an axis of some argument, or an integer argument",
                )
    return list(bound.values())


def _next_solved(
    places: Iterable[tuple[Place, Dim]], bound: dict[Symbol, DimBinding]
) -> tuple[Symbol, Place, Dim] | None:
    """The first size with exactly one unknown dim."""
    for place, size in places:
        unknown = [symbol for symbol in size.symbols if symbol not in bound]
        if len(unknown) == 1:
            return unknown[0], place, size
    return None
