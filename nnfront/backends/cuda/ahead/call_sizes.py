# SPDX-License-Identifier: Apache-2.0
"""The sizes of calls that kernels tell apart: powers of two (`tiles.bucket`), and some odd ones for what depends on divisibility."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nnfront.dims import Dim, Symbol, describe_facts, evaluate, satisfies
from nnfront.errors import LowerError
from nnfront.lower import MethodProgram, Program, StateType, places

LARGEST, LONGEST = 8192, 1 << 17
"""From these sizes on all are alike: the last bucket of `tiles`, and the length of which blocks of attention share no smaller part."""
ODD = (3, 37, 1003)
"""Sizes that 16 does not divide."""
EARLIER, PAGE, BITS = "earlier", "page_size", "kv_bits"
"""Among the sizes, those of caches: how many tokens one holds before a call; how many a page of it holds, 0 for one without pages; in
how many bits keys and values are stored, 8 for codes, 0 as the model computes them."""
PAGES = "pages"
PAGED_TOKENS = 1 << 16  # in a paged cache: more of them only take longer to count

Sizes: TypeAlias = Mapping[str, Sequence[int]]


def check_sizes(program: Program, known: Mapping[Symbol, int], sizes: Sizes) -> None:
    """Raise LowerError for a dim that no call binds, and for a size that it cannot have."""
    symbols = {
        s.name: s
        for method in program.methods.values()
        for _, size in _places(method)
        for s in _symbols(size)
        if s not in known
    }
    for name, numbers in sizes.items():
        if name not in symbols and name not in (EARLIER, PAGE, BITS):
            raise LowerError(
                f"no method has a dim {name!r} that calls bind",
                help=f"dims are {', '.join(map(repr, symbols)) or 'none'}",
            )
        if not numbers:
            raise LowerError(f"no size is given for {name!r}")
        if name == BITS and not set(numbers) <= {0, 8}:
            raise LowerError(f"{name!r} can be 0 or 8, got {', '.join(map(str, numbers))}")
        for number in numbers:
            if name in symbols and satisfies(number, symbols[name]) is False:
                raise LowerError(
                    f"'{name}' cannot be {number}, expected {describe_facts(*symbols[name].facts)}"
                )


def grid(method: MethodProgram, known: Mapping[Symbol, int], sizes: Sizes) -> Iterator[dict[str, int]]:
    """Yield the sizes to call a method with: a number for each dim by name, and how full its cache is.

    Dims that `sizes` does not give grow together no further than kernels can tell, and caches are filled step by step only where one
    of them is least.
    """
    given = {symbol.name: number for symbol, number in known.items()}
    axes: dict[Symbol, set[Any]] = {}
    for place, size in _places(method):
        for symbol in _symbols(size):
            axes.setdefault(symbol, set()).add(place.axis)
    free = {symbol: found for symbol, found in axes.items() if symbol.name not in given}
    # A dim that only a cache has is its room: as much as there can be.
    rows = [symbol.name for symbol, found in free.items() if found != {"max_seq"}]
    tokens = [symbol.name for symbol, found in free.items() if not found & {"batch", "max_seq"}]
    choices = {s.name: list(sizes.get(s.name, _spread(s) if s.name in rows else [_largest(s)])) for s in free}
    is_given = sizes.keys() >= set(rows)
    caches = [a.type for a in method.arguments if isinstance(a.type, StateType)]
    for numbers in itertools.product(*choices.values()):
        point = {**given, **dict(zip(choices, numbers, strict=True))}
        if len(rows) > 1 and not is_given and math.prod(point[name] for name in rows) > 2 * LARGEST:
            continue
        if not caches:
            yield point
            continue
        is_least = len(rows) < 2 or any(point[name] == choices[name][0] for name in rows)
        fills = sizes.get(EARLIER, [0, *_powers(LONGEST)] if is_least else [0, 1])
        yield from _caches(caches, point, max([1, *(point[name] for name in tokens)]), fills, sizes)


def _caches(
    caches: Sequence[StateType], point: Mapping[str, int], appended: int, fills: Sequence[int], sizes: Sizes
) -> Iterator[dict[str, int]]:
    """Yield a point with caches that hold so many tokens already, as many as leave room in each for those to be appended."""
    batch = evaluate(caches[0].layers[0].batch, point)
    room = min(evaluate(cache.layers[0].max_seq, point) for cache in caches) - appended
    for page, bits in itertools.product(sizes.get(PAGE, [0]), sizes.get(BITS, [0])):
        for earlier in dict.fromkeys(min(fill, room) for fill in fills):
            pages = batch * -(-(earlier + appended) // page) if page else 0
            if earlier >= 0 and pages * page <= PAGED_TOKENS:
                yield {**point, EARLIER: earlier, PAGE: page, PAGES: pages, BITS: bits}


def _powers(high: int) -> Iterator[int]:
    number = 1
    while number <= high:
        yield number
        number *= 2


def _spread(symbol: Symbol) -> list[int]:
    """Numbers that a dim may have: powers of two, some odd ones, and its ends."""
    high = LARGEST if symbol.max is None else min(symbol.max, LARGEST)
    found = {*_powers(high), *ODD, max(symbol.min, 1), high}
    step = symbol.multiple_of
    return sorted(n for n in {-(-n // step) * step for n in found} if satisfies(n, symbol) is not False)


def _largest(symbol: Symbol) -> int:
    high = LONGEST if symbol.max is None else min(symbol.max, max(LONGEST, symbol.min))
    return high // symbol.multiple_of * symbol.multiple_of


def _symbols(size: Any) -> tuple[Symbol, ...]:
    return size.symbols if isinstance(size, Dim) else ()


def _places(method: MethodProgram) -> Iterator[tuple[Any, Any]]:
    for argument in method.arguments:
        yield from places(argument.type, argument.name)
