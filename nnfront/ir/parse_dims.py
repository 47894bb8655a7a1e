# SPDX-License-Identifier: Apache-2.0
"""Text to dims: the header of a function declares them, sizes are ints and expressions over them."""

from __future__ import annotations

from nnfront import dims
from nnfront.dims import Dim, Size, Symbol, of_symbol, substitute
from nnfront.errors import DimError
from nnfront.ir.budget import MAX_SIZE_CHARACTERS
from nnfront.ir.tokens import Tokens

OPERATORS = frozenset({"+", "-", "*", "//", "%"})


class DimParser:
    """Reads sizes over the dims of one function. `dims` is None outside of functions, where a name needs no declaration."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.dims: dict[str, Dim] | None = None
        self._declared: dict[Symbol, Size] = {}
        self._sizes: dict[str, Size] = {}

    def declare_dims(self) -> None:
        """Read the dims in the header of a function."""
        tokens = self.tokens
        self.dims = {}
        if not tokens.take("["):
            return
        for start in tokens.each("]"):
            is_fresh = tokens.next == "fresh" and tokens.kinds[tokens.index + 1] == "name"
            tokens.index += is_fresh
            name = tokens.name("the name of a dim")
            low, high, step = self._facts() if tokens.take(":") else (0, None, 1)
            if name in self.dims:
                tokens.error(f"there is a dim {name!r} already", at=start)
            try:
                plain = Symbol(name)
                symbol = Symbol.fresh(name, low, high, step) if is_fresh else Symbol(name, 0, low, high, step)
            except DimError as error:
                tokens.error(error.what, at=start, help=error.help)
            self.dims[name] = of_symbol(symbol)
            if symbol.uid or symbol.facts != plain.facts:
                self._declared[plain] = self.dims[name]

    def _facts(self) -> tuple[int, int | None, int]:
        tokens = self.tokens
        low, high, step = 0, None, 1
        if tokens.kind == "int":
            low = tokens.integer("a number")
            if tokens.next != "..":
                tokens.fail("'..' after the least value of a dim")
        if tokens.take("..") and tokens.kind == "int":
            high = tokens.integer("a number")
        if tokens.take("%"):
            step = tokens.integer("the number that divides the dim")
        return low, high, step

    def size(self) -> Size:
        """Read an int or an expression over dims."""
        tokens = self.tokens
        start = tokens.index
        if tokens.after() in (",", "]", ")"):
            if tokens.kind == "int":
                return tokens.integer("a size")
            known = self.dims.get(tokens.next) if self.dims is not None else None
            if known is not None and tokens.kind == "name":
                tokens.index += 1
                return known
        end = self._size_end()
        if end == start + 2 and tokens.next == "-" and tokens.kinds[start + 1] == "int":
            tokens.index += 1
            return -tokens.integer("a size")
        if end == start:
            tokens.fail("a size")
        text = tokens.text[tokens.offsets[start] : tokens.offsets[end - 1] + len(tokens.texts[end - 1])]
        tokens.index = end
        size = self._sizes.get(text)
        if size is None:
            size = self._sizes[text] = self._parse_size(text, start)
        return size

    def _size_end(self) -> int:
        """Index of the first token behind the size that starts here."""
        tokens = self.tokens
        index = tokens.index
        while True:
            kind, token = tokens.kinds[index], tokens.texts[index]
            if token == "(":
                if index not in tokens.closing:
                    tokens.error("this bracket is never closed", at=index)
                index = tokens.closing[index]
            elif kind not in ("name", "int") and token not in OPERATORS:
                return index
            index += 1

    def _parse_size(self, text: str, start: int) -> Size:
        tokens = self.tokens
        if len(text) > MAX_SIZE_CHARACTERS:
            tokens.error("this size is too long", at=start)
        try:
            size = dims.parse(text)
            unknown = self._unknown_symbol(size)
            if unknown is not None:
                assert self.dims is not None
                tokens.unknown(
                    f"the header declares no dim {unknown.name!r}",
                    unknown.name,
                    self.dims,
                    at=start,
                    help="list it in brackets behind the name of the function",
                )
            return substitute(size, self._declared)
        except DimError as error:
            tokens.error(
                error.what, at=start, help=error.details[-1] if len(error.details) == 3 else error.help
            )

    def _unknown_symbol(self, size: Size) -> Symbol | None:
        if self.dims is None or not isinstance(size, Dim):
            return None
        return next((symbol for symbol in size.symbols if symbol.name not in self.dims), None)
