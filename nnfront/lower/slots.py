# SPDX-License-Identifier: Apache-2.0
"""`Frame`: the slots of a method while it is being lowered, equal constants and sizes only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nnfront.dims import Dim, Symbol, as_symbol, of_symbol
from nnfront.ir import Constant, Names, ScalarType, ShapeType, TupleType, Type
from nnfront.lower.instructions import Slot, SlotKind, Structure


class Frame:
    """Collects slots. Methods return the index of a slot."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._names = Names()
        self._known: dict[Any, int] = {}
        self.dims: dict[Symbol, int] = {}
        """The dims that were asked for, and their slots."""

    def add(self, name: str, kind: SlotKind, type: Type | None = None, value: Any = None) -> int:
        """Add a slot."""
        self.slots.append(Slot(name, kind, type, value))
        return len(self.slots) - 1

    def structure(self, name: str, kind: SlotKind, type: Type) -> Structure:
        """Add the slots that make up a value of `type`: one, or one for each leaf of a tuple."""
        if kind == "value":
            name = self._names.unique(name)
        return self._structure(name, kind, type)

    def _structure(self, name: str, kind: SlotKind, type: Type) -> Structure:
        if not isinstance(type, TupleType):
            return Structure(self.add(name, kind, type))
        fields = tuple(self._structure(f"{name}[{i}]", kind, field) for i, field in enumerate(type.fields))
        return Structure(fields=fields, names=type.names)

    def constant(self, value: bool | int | float | Constant | None) -> int:
        """Add a literal or a constant tensor."""
        if isinstance(value, Constant):
            return self._once(("tensor", id(value)), "constant", "constant", value.type, value)
        kind = (
            None if value is None else ScalarType({bool: "bool", int: "int64", float: "float64"}[type(value)])
        )
        return self._once((type(value), repr(value)), repr(value), "constant", kind, value)

    def dim(self, symbol: Symbol) -> int:
        """Add the slot that holds a dim."""
        if symbol not in self.dims:
            size = of_symbol(symbol)
            self.dims[symbol] = self.add(symbol.name, "dim", ScalarType("int64", size), size)
        return self.dims[symbol]

    def size(self, value: Any) -> int:
        """Add a size: an expression over dims, or a nested tuple of them. A number or a bare dim needs no slot of its own."""
        if isinstance(value, int):
            return self.constant(value)
        if (symbol := as_symbol(value)) is not None:
            return self.dim(symbol)
        type = ScalarType("int64", value) if isinstance(value, Dim) else ShapeType(())
        return self._once(("size", value), f"size{len(self.slots)}", "size", type, value)

    def _once(self, key: Any, name: str, kind: SlotKind, type: Type | None, value: Any) -> int:
        if key not in self._known:
            self._known[key] = self.add(name, kind, type, value)
        return self._known[key]


def dims_in(value: Any) -> Iterator[Dim]:
    """Yield the dims in an attribute."""
    if isinstance(value, Dim):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from dims_in(part)
