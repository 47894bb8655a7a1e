# SPDX-License-Identifier: Apache-2.0
"""Which dims are known once weights are loaded.

A weight `[n]` defines n, `[m*n]` defines n where m is known. A size such as `m*n` of which neither is known is still known as a
whole: the transform calls it by a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nnfront.dims import Dim, Size, Symbol, determined, of_symbol
from nnfront.ir import (
    Function,
    MatchShape,
    Type,
    sizes_of,
    type_symbols,
    walk_exprs,
)


def dims_of(types: Iterable[Type]) -> Iterator[Dim]:
    """Yield every size of the types that is not an int."""
    for type in {id(type): type for type in types}.values():
        for size in sizes_of(type):
            if isinstance(size, Dim):
                yield size


def definable(types: Iterable[Type]) -> set[Symbol]:
    """Return the symbols that values of these types determine."""
    return set(determined(list(dict.fromkeys(dims_of(types)))))


def matched(function: Function) -> Iterator[Symbol]:
    """Yield the symbols in the types that a function's `match_shape`s check."""
    for expr in walk_exprs(function):
        if isinstance(expr, MatchShape):
            yield from type_symbols(expr.type)


class KnownDims:
    """The dims that values of some types determine. `whole` are sizes known only as a whole, and their names in the transform."""

    def __init__(self, types: Iterable[Type]) -> None:
        sizes = list(dict.fromkeys(dims_of(types)))
        self.symbols = set(determined(sizes))
        # Of this transform alone: in another, a size of the same name would be another size.
        self.whole: dict[Dim, Dim] = {
            size: of_symbol(Symbol.fresh("size"))
            for size in sizes
            if not self.symbols.issuperset(size.symbols)
        }

    def is_of_weights(self, symbol: Symbol) -> bool:
        """Whether a dim is one of those that the values determine, by itself or in a size."""
        return symbol in self.symbols or any(symbol in size.symbols for size in self.whole)

    def first_unknown(self, sizes: Iterable[Size]) -> Dim | None:
        """Return a size that is not known, None if all are."""
        for size in sizes:
            if isinstance(size, Dim) and not self.symbols.issuperset(size.symbols) and size not in self.whole:
                return size
        return None

    def rename(self, size: Size) -> Size:
        """Return a size as the transform calls it."""
        return self.whole.get(size, size) if isinstance(size, Dim) else size
