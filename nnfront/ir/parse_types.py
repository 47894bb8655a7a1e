# SPDX-License-Identifier: Apache-2.0
"""Text to types, lists, numbers and the values of attributes: the part of the parser that is the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from nnfront import dtypes
from nnfront.dims import Size
from nnfront.ir.budget import MAX_BUFFERS, MAX_LAYERS
from nnfront.ir.parse_dims import OPERATORS, DimParser
from nnfront.ir.tokens import Tokens
from nnfront.ir.types import (
    Buffer,
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

T = TypeVar("T")


class TypeParser(DimParser):
    """Reads types and the values of attributes over the dims of one function."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._types: dict[str, Type] = {}

    # Types.

    def type(self) -> Type:
        """Read a type. The same text gives the same object."""
        tokens = self.tokens
        first = tokens.index
        bracket = first if tokens.next in ("(", "{") else first + 1
        end = tokens.closing.get(bracket)
        if end is None or tokens.next == "fn":
            return self._type()
        text = tokens.text[tokens.offsets[first] : tokens.offsets[end] + 1]
        type = self._types.get(text)
        if type is not None:
            tokens.index = end + 1
            return type
        type = self._type()
        if tokens.index == end + 1:
            self._types[text] = type
        return type

    def _type(self) -> Type:
        tokens = self.tokens
        tokens.enter()
        start = tokens.index
        try:
            if tokens.next in ("(", "{"):
                fields, names = self.fields(self.type)
                return TupleType(fields, names)
            word = tokens.name("a type")
            if word in _WORDS and tokens.next in ("(", "["):
                return _WORDS[word](self)
            if word not in dtypes.DTYPES:
                tokens.unknown(f"there is no dtype {word!r}", word, (*dtypes.DTYPES, *_WORDS), at=start)
            if tokens.take("["):
                return TensorType(self._size_list("]"), word)
            if not tokens.take("("):
                return ScalarType(word)
            value = self.size()
            tokens.expect(")")
            return ScalarType(word, value)
        finally:
            tokens.leave()

    def _size_list(self, closing: str) -> tuple[Size, ...]:
        return tuple(self.items(closing, self.size))

    def _shape(self) -> Type:
        self.tokens.expect("[")
        return ShapeType(self._size_list("]"))

    def _object(self) -> Type:
        self.tokens.expect("(")
        name = self.tokens.string()
        self.tokens.expect(")")
        return ObjectType(name)

    def _function(self) -> Type:
        self.tokens.expect("(")
        params = tuple(self.items(")", self.type))
        self.tokens.expect("->")
        return FunctionType(params, self.type())

    def _layer(self) -> StateLayerType:
        tokens = self.tokens
        tokens.expect("(")
        older = self._keys_and_values() if tokens.next == "kv_heads" else None
        batch = self._field("batch", self.size)
        max_seq = self._field("max_seq", self.size)
        per_token = self._buffers("per_token") if older is None else older
        per_sequence = self._buffers("per_sequence") if older is None else ()
        window = self._field("window", self._integer) if tokens.next == "window" else None
        tokens.take(",")
        tokens.expect(")")
        return StateLayerType(per_token, per_sequence, batch, max_seq, window)

    def _keys_and_values(self) -> tuple[Buffer, ...]:
        """Read how layers of keys and values were written before there were others."""
        shape = self._field("kv_heads", self._integer), self._field("head_size", self._integer)
        dtype = self._field("dtype", self._dtype)
        return tuple(Buffer(name, shape, dtype) for name in ("keys", "values"))

    def _buffers(self, group: str) -> tuple[Buffer, ...]:
        tokens = self.tokens
        if tokens.next != group:
            return ()
        start = tokens.index + 2
        (types, names) = self._field(group, lambda: self.fields(self._buffer))
        if names is None:
            tokens.error("buffers have names, as in {keys: float32[2, 64]}", at=start)
        if len(names) > MAX_BUFFERS:
            tokens.error(f"a layer has at most {MAX_BUFFERS} buffers of a kind", at=start)
        return tuple(Buffer(name, *type) for name, type in zip(names, types, strict=True))

    def _buffer(self) -> tuple[tuple[int, ...], str]:
        dtype = self._dtype()
        self.tokens.expect("[")
        return tuple(self.items("]", self._integer)), dtype

    def _field(self, name: str, read: Callable[[], T]) -> T:
        tokens = self.tokens
        tokens.expect(name)
        tokens.expect("=")
        value = read()
        if tokens.next != ")":
            tokens.expect(",")
        return value

    def _integer(self) -> int:
        return self.tokens.integer("a number")

    def _dtype(self) -> str:
        start = self.tokens.index
        name = self.tokens.name("a dtype")
        if name not in dtypes.DTYPES:
            self.tokens.unknown(f"there is no dtype {name!r}", name, dtypes.DTYPES, at=start)
        return name

    def _cache(self) -> Type:
        self.tokens.expect("(")
        return StateType(self._layers())

    def _layers(self) -> tuple[StateLayerType, ...]:
        """Read layers, and repetitions of them, up to the closing parenthesis."""
        tokens = self.tokens
        layers: list[StateLayerType] = []
        for start in tokens.each(")"):
            count = 1
            if tokens.kind == "int":
                count = self._integer()
                tokens.expect("*")
            layers_here = self._layer_group()
            if count * len(layers_here) + len(layers) > MAX_LAYERS:
                tokens.error(f"a cache has at most {MAX_LAYERS} layers", at=start)
            layers += layers_here * count
        return tuple(layers)

    def _layer_group(self) -> tuple[StateLayerType, ...]:
        tokens = self.tokens
        tokens.enter()
        if tokens.take("("):
            group = self._layers()
        elif tokens.next == "layer":
            layer = self.type()
            assert isinstance(layer, StateLayerType)
            group = (layer,)
        else:
            tokens.fail("a layer")
        tokens.leave()
        return group

    # Lists.

    def items(self, closing: str, read: Callable[[], T]) -> list[T]:
        """Read a list up to its closing bracket; the opening one has been read."""
        return [read() for _ in self.tokens.each(closing)]

    def fields(self, read: Callable[[], T]) -> tuple[tuple[T, ...], tuple[str, ...] | None]:
        """Read a tuple, `(a, b)` or with names `{x: a, y: b}`, and return its fields and names."""
        tokens = self.tokens
        if tokens.take("{"):
            named: dict[str, T] = {}
            for start in tokens.each("}"):
                name = tokens.name("the name of a field")
                if name in named:
                    tokens.error(f"there is a field {name!r} already", at=start)
                tokens.expect(":")
                named[name] = read()
            return tuple(named.values()), tuple(named)
        tokens.expect("(")
        fields = self.items(")", read)
        if len(fields) == 1 and tokens.texts[tokens.index - 2] != ",":
            tokens.index -= 1
            tokens.fail("',': a tuple of one field is written with a comma, as (x,)")
        return tuple(fields), None

    # Numbers and attributes.

    def number(self) -> bool | int | float | None:
        """Read a literal; None if the next tokens are none."""
        tokens = self.tokens
        start = tokens.index
        is_negative = tokens.take("-")
        kind, token = tokens.kind, tokens.next
        value: bool | int | float
        if kind == "int":
            value = tokens.integer("a number")
        elif kind == "float" or (kind == "name" and token in ("inf", "nan")):
            tokens.index += 1
            value = float(token)
        elif kind == "name" and token in ("True", "False") and not is_negative:
            tokens.index += 1
            return token == "True"
        else:
            tokens.index = start
            return None
        if not is_negative:
            return value
        return -value if value == value else math.copysign(value, -1.0)

    def attrs(self, closing: str) -> dict[str, Any]:
        """Read attributes up to the closing bracket; the opening one has been read."""
        attrs: dict[str, Any] = {}
        for _ in self.tokens.each(closing):
            self.attr(attrs)
        return attrs

    def attr(self, attrs: dict[str, Any]) -> None:
        """Read one attribute."""
        tokens = self.tokens
        start = tokens.index
        name = tokens.name("an attribute")
        if name in attrs:
            tokens.error(f"there is an attribute {name!r} already", at=start)
        tokens.expect("=")
        attrs[name] = self.item()

    def item(self) -> Any:
        """Read the value of an attribute."""
        tokens = self.tokens
        kind, token, after = tokens.kind, tokens.next, tokens.after()
        if kind == "string":
            return tokens.string()
        if token == "@" and kind == "sign":
            tokens.index += 1
            return FunctionName(tokens.name("the name of a function"))
        if token == "{" or (token == "(" and self._is_tuple()):
            tokens.enter()
            fields, names = self.fields(self.item)
            tokens.leave()
            return fields if names is None else dict(zip(names, fields, strict=True))
        if kind == "name":
            if token == "None":
                tokens.index += 1
                return None
            if after == "(" and token in ("dim", "type"):
                tokens.index += 2
                value = self.size() if token == "dim" else self.type()
                tokens.expect(")")
                return value
        start = tokens.index
        number = self.number()
        if number is not None and tokens.next not in OPERATORS:
            return number
        tokens.index = start
        return self.size()

    def _is_tuple(self) -> bool:
        """Whether the parenthesis here opens a tuple, not an expression over dims."""
        tokens = self.tokens
        end = tokens.closing.get(tokens.index)
        if end is None:
            tokens.error("this bracket is never closed")
        index = tokens.index + 1
        while index < end:
            if tokens.texts[index] == ",":
                return True
            index = tokens.closing.get(index, index) + 1
        return end == tokens.index + 1


_WORDS: dict[str, Callable[[TypeParser], Type]] = {
    "shape": TypeParser._shape,
    "object": TypeParser._object,
    "fn": TypeParser._function,
    "layer": TypeParser._layer,
    "cache": TypeParser._cache,
}
