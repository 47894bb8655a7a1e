# SPDX-License-Identifier: Apache-2.0
"""The dims of one function: which there are, in the order in which they occur, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnfront.dims import Dim, Size, Symbol, names, of_symbol, substitute
from nnfront.ir.expr import Atom, Binding, Call, Constant, If, MatchShape, Scalar
from nnfront.ir.interfaces import FunctionLike
from nnfront.ir.types import Type, sizes_of
from nnfront.ir.walk import atoms_of, dims_in


class _Collector:
    def __init__(self) -> None:
        self.found: dict[Symbol, None] = {}
        self.seen: dict[int, Any] = {}  # what has been looked into, kept alive while its id is a key

    def type(self, type: Type) -> None:
        if id(type) not in self.seen:
            self.seen[id(type)] = type
            for size in sizes_of(type):
                if isinstance(size, Dim):
                    self.dim(size)

    def dim(self, dim: Dim) -> None:
        if id(dim) not in self.seen:
            self.seen[id(dim)] = dim
            self.found.update(dict.fromkeys(symbol for symbol in dim.symbols if symbol not in self.found))

    def attrs(self, attrs: Mapping[str, Any]) -> None:
        for value in attrs.values():
            if not isinstance(value, int | float | str):
                for dim in dims_in(value):
                    self.dim(dim)

    def atoms(self, atoms: Sequence[Atom | None]) -> None:
        for atom in atoms:
            if isinstance(atom, Scalar):
                if isinstance(atom.value, Dim):
                    self.dim(atom.value)
            elif isinstance(atom, Constant):
                self.type(atom.type)

    def bindings(self, bindings: Sequence[Binding]) -> None:
        for binding in bindings:
            value = binding.value
            self.type(binding.var.type)
            if isinstance(value, If):
                self.atoms((value.condition,))
                for block in (value.then, value.otherwise):
                    self.bindings(block.bindings)
                    self.atoms((block.result,))
                continue
            self.atoms(atoms_of(value))
            if isinstance(value, Call):
                self.attrs(value.attrs)
            elif isinstance(value, MatchShape):
                self.type(value.type)


def symbols_in(function: FunctionLike) -> tuple[Symbol, ...]:
    """Return every symbol that occurs in a function, those of its parameters first; of equal ones the first, with its facts."""
    collector = _Collector()
    for param in function.params:
        collector.type(param.type)
    collector.attrs(function.attrs)
    collector.bindings(function.bindings)
    collector.atoms((function.result,))
    return tuple(collector.found)


class DimTexts:
    """How the dims of one function are written: fresh dims of one name apart."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self.names: Mapping[Symbol, str] = names(symbols)
        # Renamed symbols are put in place before the text is made: the order of a sum depends on the names.
        self._renamed = {
            symbol: of_symbol(Symbol(name, 0, *symbol.facts))
            for symbol, name in self.names.items()
            if name != symbol.name
        }
        self.size: Callable[[Size], str] = self._size if self._renamed else str

    def _size(self, size: Size) -> str:
        return str(substitute(size, self._renamed))
