# SPDX-License-Identifier: Apache-2.0
"""The dims of one function: which there are, in the order in which they occur, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nnfront.dims import Size, Symbol, names, of_symbol, substitute
from nnfront.ir.expr import Atom, Binding, Call, Constant, If, MatchShape, Scalar
from nnfront.ir.interfaces import FunctionData
from nnfront.ir.walk import atoms_of, dims_in


def symbols_in(function: FunctionData) -> tuple[Symbol, ...]:
    """Return every symbol that occurs in a function, those of its parameters first; of equal ones the first, with its facts."""
    items = [*(param.type for param in function.params), *function.attrs.values()]
    _add_items(function.bindings, function.result, items)
    found: dict[Symbol, None] = {}
    seen: set[int] = set()
    for item in items:
        for dim in () if id(item) in seen else dims_in(item):
            if id(dim) not in seen:
                found.update(dict.fromkeys(symbol for symbol in dim.symbols if symbol not in found))
            seen.add(id(dim))
        seen.add(id(item))
    return tuple(found)


def _add_items(bindings: Sequence[Binding], result: Atom, items: list[Any]) -> None:
    """Add the types, attributes and literals of a block, in order."""
    for binding in bindings:
        value = binding.value
        items.append(binding.var.type)
        if isinstance(value, If):
            items += _of_atoms((value.condition,))
            for block in (value.then, value.otherwise):
                _add_items(block.bindings, block.result, items)
            continue
        items += _of_atoms(atoms_of(value))
        if isinstance(value, Call):
            items += value.attrs.values()
        elif isinstance(value, MatchShape):
            items.append(value.type)
    items += _of_atoms((result,))


def _of_atoms(atoms: Iterable[Atom | None]) -> list[Any]:
    return [a.value if isinstance(a, Scalar) else a.type for a in atoms if isinstance(a, (Scalar, Constant))]


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
