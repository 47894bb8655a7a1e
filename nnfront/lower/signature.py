# SPDX-License-Identifier: Apache-2.0
"""Who binds each dim of a method: the weights when they are loaded, or the arguments of each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nnfront.dims import Dim, Size, Symbol, determined, of_symbol
from nnfront.errors import LowerError
from nnfront.ir import Function, ScalarType, ShapeType, StateLayerType, StateType, TensorType, TupleType, Type
from nnfront.lower.program import Argument, DimBinding, Place
from nnfront.lower.slots import Frame


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
        case StateType():
            for layer in dict.fromkeys(type.layers):
                yield from places(layer, argument, is_weight=is_weight, path=path)
        case StateLayerType():
            yield Place(argument, path, "batch", is_weight), type.batch
            yield Place(argument, path, "max_seq", is_weight), type.max_seq
        case _:
            return


def bind_dims(
    method: str,
    arguments: Sequence[Argument],
    weights: Sequence[Argument],
    frame: Frame,
    elsewhere: Mapping[Symbol, Place],
) -> list[DimBinding]:
    """Return one binding for each dim that the parameters' types name, in the order in which they can be made.

    A place that says a dim by itself is preferred to one that says it through an expression. Weights go first: what they
    bind is the same for all calls. A call solves a weight's size, such as `m*n`, for what the arguments leave open. What nothing
    of the method's own says is said by `elsewhere`: the weights of the whole module.
    Raises LowerError for a dim that no place defines.
    """
    fixed = [item for w in weights for item in symbolic_places(w.type, w.name, is_weight=True)]
    given = [item for a in arguments for item in symbolic_places(a.type, a.name)]
    bound: dict[Symbol, DimBinding] = {}

    def bind(here: Sequence[tuple[Place, Dim]]) -> None:
        for symbol, index in determined([size for _, size in here], bound).items():
            place, size = here[index]
            bound[symbol] = DimBinding(symbol, frame.dim(symbol), place, size)

    bind(fixed)
    bind(given)
    bind([*given, *fixed])
    for _, size in (*fixed, *given):
        for symbol in size.symbols:
            if symbol not in bound and symbol in elsewhere:
                bound[symbol] = DimBinding(symbol, frame.dim(symbol), elsewhere[symbol], of_symbol(symbol))
    bind([*given, *fixed])
    for place, size in (*fixed, *given):
        for symbol in size.symbols:
            if symbol not in bound:
                raise LowerError(
                    f"{method}: nothing says what '{symbol}' is",
                    details=[f"it occurs in {place}, which is '{size}'"],
                    help=f"make '{symbol}' an axis of some argument, or an integer argument",
                )
    return list(bound.values())


def symbolic_places(
    type: Type, argument: str, *, is_weight: bool = False, function: str = ""
) -> list[tuple[Place, Dim]]:
    """Return the places of the sizes that are no numbers. `function`: whose weight it is, if not the method's own."""
    return [
        (replace(place, function=function), size)
        for place, size in places(type, argument, is_weight=is_weight)
        if isinstance(size, Dim)
    ]


def bound_by_weights(ir: Mapping[str, Function]) -> dict[Symbol, Place]:
    """Return the dims that the weights of all methods and transforms together determine, each with the place that says it."""
    found = [
        item
        for function in ir.values()
        if function.kind in ("public", "transform")
        for p in function.weights
        for item in symbolic_places(p.type, p.name, is_weight=True, function=function.name)
    ]
    return {symbol: found[index][0] for symbol, index in determined([size for _, size in found]).items()}


def bound_at_load(dims: Iterable[DimBinding]) -> set[Symbol]:
    """Return those dims that weights alone bind, once for all calls."""
    found: set[Symbol] = set()
    for binding in dims:
        if binding.place.is_weight and found.issuperset(
            s for s in binding.size.symbols if s != binding.symbol
        ):
            found.add(binding.symbol)
    return found
