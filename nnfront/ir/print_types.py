# SPDX-License-Identifier: Apache-2.0
"""Dims, types and the values of attributes as text: the part of the printer that is the same everywhere in a function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nnfront.dims import Dim, Size, Symbol
from nnfront.ir.function_dims import DimTexts
from nnfront.ir.literals import KEYWORDS, name_text, number_text, quote
from nnfront.ir.types import (
    FunctionName,
    FunctionType,
    ObjectType,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
)

INDENT = "    "
WIDTH = 120  # longer lists are written one item a line
_PERIOD = 8  # longest pattern of cache layers that is looked for


def type_text(type: Type) -> str:
    """Return the text form of a type, for messages: dims by their own names."""
    return TypePrinter(()).type(type)


class TypePrinter:
    """Writes types over the dims of one function."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self.dims = DimTexts(symbols)
        self.types: dict[int, tuple[str, Type]] = {}  # by id; the type stays alive with its text

    # Attributes.

    def attrs(self, attrs: Mapping[str, Any]) -> str:
        """Return attributes in parentheses, one a line if they are long."""
        items = self.attr_list(attrs)
        text = f"({', '.join(items)})"
        return text if len(text) <= WIDTH else lines("(", items, ")", "")

    def attr_list(self, attrs: Mapping[str, Any]) -> list[str]:
        """Return the attributes as `name=value`."""
        return [f"{name_text(name)}={self.item(value)}" for name, value in attrs.items()]

    def item(self, value: Any) -> str:
        """Return the value of an attribute."""
        match value:
            case None:
                return "None"
            case bool() | int() | float():
                return number_text(value)
            case str():
                return quote(value)
            case Dim():
                text = self.dims.size(value)
                return f"dim({text})" if text in KEYWORDS else text
            case FunctionName():
                return f"@{name_text(value.name)}"
            case tuple() | list():
                return bracketed(*tuple_parts([self.item(item) for item in value], None))
            case Mapping():
                return bracketed(*tuple_parts([self.item(item) for item in value.values()], tuple(value)))
            case _:
                assert isinstance(value, Type), f"an attribute cannot be a {type(value).__name__}"
                return f"type({self.type(value)})"

    # Types.

    def type(self, type: Type) -> str:
        """Return a type on one line."""
        known = self.types.get(id(type))
        if known is None:
            known = self.types[id(type)] = self._type(type), type
        return known[0]

    def _type(self, type: Type) -> str:
        match type:
            case TensorType():
                return f"{name_text(type.dtype)}[{self._sizes(type.shape)}]"
            case ShapeType():
                return f"shape[{self._sizes(type.sizes)}]"
            case ScalarType():
                return name_text(type.dtype) + (
                    "" if type.value is None else f"({self.dims.size(type.value)})"
                )
            case TupleType():
                return bracketed(*tuple_parts([self.type(field) for field in type.fields], type.names))
            case StateLayerType():
                return f"layer({', '.join(self._layer(type))})"
            case StateType():
                return f"cache({', '.join(repeats([self.type(layer) for layer in type.layers]))})"
            case ObjectType():
                return f"object({quote(type.name)})"
            case FunctionType():
                return f"fn({', '.join(map(self.type, type.params))}) -> {self.type(type.result)}"

    def _layer(self, type: StateLayerType) -> Iterator[str]:
        yield f"batch={self.dims.size(type.batch)}"
        yield f"max_seq={self.dims.size(type.max_seq)}"
        for name, buffers in (("per_token", type.per_token), ("per_sequence", type.per_sequence)):
            if buffers:
                texts = [f"{name_text(buffer.dtype)}[{self._sizes(buffer.shape)}]" for buffer in buffers]
                yield f"{name}={bracketed(*tuple_parts(texts, [buffer.name for buffer in buffers]))}"
        if type.window is not None:
            yield f"window={type.window}"

    def _sizes(self, sizes: Sequence[Size]) -> str:
        return ", ".join(map(self.dims.size, sizes))

    def broken_type(self, type: Type, indent: str, used: int) -> str:
        """Return a type with one field a line if it is a long tuple."""
        text = self.type(type)
        if not isinstance(type, TupleType) or len(text) + used <= WIDTH:
            return text
        return lines(*tuple_parts([self.type(field) for field in type.fields], type.names), indent)


def repeats(texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts with runs and periods counted: `2 * a`, `3 * (a, b)`."""
    start = 0
    while start < len(texts):
        covered, period = 1, 1
        for length in range(1, min(_PERIOD, (len(texts) - start) // 2) + 1):
            count = 1
            unit = texts[start : start + length]
            while texts[start + count * length : start + (count + 1) * length] == unit:
                count += 1
            if count > 1 and count * length > covered:
                covered, period = count * length, length
        unit = texts[start : start + period]
        text = unit[0] if period == 1 else f"({', '.join(repeats(unit))})"
        yield text if covered == period else f"{covered // period} * {text}"
        start += covered


def dim_text(symbol: Symbol, name: str) -> str:
    """Return a dim of the header, with its facts."""
    low, high, step = symbol.facts
    span = "" if (low, high) == (0, None) else f"{low}..{'' if high is None else high}"
    facts = " ".join([*([span] if span else []), *([f"% {step}"] if step > 1 else [])])
    return f"{'fresh ' if symbol.uid else ''}{name}{f': {facts}' if facts else ''}"


def tuple_parts(texts: list[str], names: Sequence[str] | None) -> tuple[str, list[str], str]:
    """Return the opening bracket, the fields and the closing bracket of a tuple."""
    if names is not None:
        return "{", [f"{name_text(name)}: {text}" for name, text in zip(names, texts, strict=True)], "}"
    return "(", texts, ",)" if len(texts) == 1 else ")"


def bracketed(opening: str, texts: Sequence[str], closing: str) -> str:
    """Return a list on one line."""
    return f"{opening}{', '.join(texts)}{closing}"


def lines(opening: str, texts: Iterable[str], closing: str, indent: str) -> str:
    """Return a list with one item a line, each with a comma behind it."""
    items = "".join(f"{indent}{INDENT}{text},\n" for text in texts)
    return f"{opening}\n{items}{indent}{closing.removeprefix(',')}"
