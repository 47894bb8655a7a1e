# SPDX-License-Identifier: Apache-2.0
"""`Extents`: numbers for the sizes of a method, from the dims that the caller gives and the ranges of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nnfront.dims import Dim, Size, Symbol, describe_facts, satisfies, substitute
from nnfront.errors import LowerError
from nnfront.lower.instructions import Match
from nnfront.lower.program import MethodProgram


class Extents:
    """Numbers for sizes. A size with a dim that is not given counts as the largest that it can be."""

    def __init__(self, method: MethodProgram, given: Mapping[str, int]) -> None:
        """`given` are numbers for dims by name; names that the method does not have are left alone.

        Raises LowerError for a number that a dim cannot be.
        """
        self.method = method.name
        self._given: dict[Symbol, Size] = {}
        self._known: dict[Dim, int] = {}
        for symbol in dict.fromkeys(symbols_of(method)):
            if symbol.name in given:
                number = given[symbol.name]
                if satisfies(number, symbol) is False:
                    raise LowerError(
                        f"{method.name}: dim '{symbol.name}' cannot be {number}",
                        details=[f"{symbol.name} is {describe_facts(*symbol.facts)}"],
                    )
                self._given[symbol] = number
        self.sizes = {name: number for name, number in given.items() if name in {s.name for s in self._given}}
        self.is_bound = any(symbol not in self._given for symbol in symbols_of(method))

    def number(self, size: Size) -> int:
        """Return the number for a size. Raises LowerError if nothing says how large it can be."""
        if not isinstance(size, Dim):
            return size
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._number(size)
        return found

    def value(self, value: Any) -> Any:
        """Return what an attribute holds, its sizes as numbers."""
        if isinstance(value, Dim):
            return self.number(value)
        return tuple(map(self.value, value)) if isinstance(value, (tuple, list)) else value

    def _number(self, size: Dim) -> int:
        left = substitute(size, {s: n for s, n in self._given.items() if s in size.symbols})
        most = left.max if isinstance(left, Dim) else left
        if most is None:
            names = [symbol.name for symbol in size.symbols if symbol not in self._given]
            unbounded = [
                symbol.name for symbol in size.symbols if symbol.name in names and symbol.max is None
            ]
            raise LowerError(
                f"{self.method}: nothing says how large '{(unbounded or names)[0]}' can be",
                help=f"give it a number: memory({(unbounded or names)[0]}=...), or a greatest value in the spec",
            )
        return max(most, 0)


def symbols_of(method: MethodProgram) -> Iterator[Symbol]:
    """Yield the dims of a method: those that weights and arguments bind, and those that it defines while it runs."""
    yield from (binding.symbol for binding in method.dims)
    for instruction in method.body.walk():
        if isinstance(instruction, Match):
            yield from (symbol for symbol, _ in instruction.defines)
