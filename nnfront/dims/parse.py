# SPDX-License-Identifier: Apache-2.0
"""Read a form from text.

    sum      product (("+" | "-") product)*
    product  unary (("*" | "//" | "%") unary)*
    unary    "-" unary | number | name | function "(" sum ("," sum)* ")" | "(" sum ")"
    function floordiv | ceildiv | mod (two arguments) | min | max (one or more)

Precedence and meaning are Python's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

from nnfront.dims.divide import ceildiv, floordiv, mod
from nnfront.dims.min_max import extreme
from nnfront.dims.polynomial import Form, add, constant, multiply, negate, of_atom, subtract
from nnfront.dims.symbol import FUNCTIONS, Symbol
from nnfront.errors import DimError

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<name>[^\W\d]\w*)|(?P<sign>//|[-+*%(),])|(?P<end>$))")
_OPERATORS: dict[str, Callable[[Form, Form], Form]] = {
    "floordiv": floordiv,
    "ceildiv": ceildiv,
    "mod": mod,
    "//": floordiv,
    "%": mod,
    "*": multiply,
}
_NESTING = 50
"""Parentheses and minus signs inside each other; more is surely not meant, and would exhaust Python's stack."""
_ARGUMENTS = 64
"""Of min and max; each is compared with each."""
_DIGITS = 30
"""Longest number that is read as one."""


@lru_cache(maxsize=4096)
def parse_form(text: str) -> Form:
    """The canonical form of a text; names carry no facts. Raises DimError, with a caret under the place."""
    reader = _Reader(text)
    form = reader.sum()
    if reader.tokens[reader.index][0] != "end":
        reader.fail("an operator or the end")
    return form


class _Reader:
    """A cursor over the tokens (kind, text, position) of one dim."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self.split()
        self.index = 0
        self.depth = 0

    def split(self) -> list[tuple[str, str, int]]:
        tokens = []
        end = 0
        while True:
            match = _TOKEN.match(self.text, end)
            if match is None:
                at = end + len(self.text[end:]) - len(self.text[end:].lstrip())
                self.fail("a number, a name or an operator", self.text[at], at)
            kind = str(match.lastgroup)
            tokens.append((kind, match[kind], match.start(kind)))
            if kind == "end":
                return tokens
            end = match.end()

    def fail(self, expected: str, token: str | None = None, at: int | None = None) -> NoReturn:
        if token is None or at is None:
            _, token, at = self.tokens[self.index]
        got = f"got {token!r}" if token else "the text ends"
        raise DimError(
            f"cannot read the dim {self.text!r}",
            details=[self.text, " " * at + "^", f"expected {expected}, but {got}"],
            help="a dim is made of ints, names, + - * // %, parentheses, min, max, floordiv, ceildiv and mod",
        )

    def take(self, *signs: str) -> str:
        """Step over the next token and return it if it is one of these; else return an empty text."""
        token = self.tokens[self.index][1]
        if token not in signs:
            return ""
        self.index += 1
        return token

    def expect(self, sign: str) -> None:
        if not self.take(sign):
            self.fail(repr(sign))

    def sum(self) -> Form:
        left = self.product()
        while sign := self.take("+", "-"):
            left = (add if sign == "+" else subtract)(left, self.product())
        return left

    def product(self) -> Form:
        left = self.unary()
        while sign := self.take("*", "//", "%"):
            left = _OPERATORS[sign](left, self.unary())
        return left

    def unary(self) -> Form:
        self.depth += 1
        if self.depth > _NESTING:
            self.fail(f"at most {_NESTING} levels of nesting")
        form = negate(self.unary()) if self.take("-") else self.operand()
        self.depth -= 1
        return form

    def operand(self) -> Form:
        kind, token, _ = self.tokens[self.index]
        if kind == "number":
            if len(token) > _DIGITS:
                self.fail(f"a number of at most {_DIGITS} digits")
            self.index += 1
            return constant(int(token))
        if kind == "name" and token not in FUNCTIONS:
            self.index += 1
            return of_atom(Symbol(token))
        if kind == "name":
            self.index += 1
            return self.call(token)
        if not self.take("("):
            self.fail("a number, a name or '('")
        form = self.sum()
        self.expect(")")
        return form

    def call(self, function: str) -> Form:
        self.expect("(")
        args = [self.sum()]
        while self.take(","):
            if len(args) == _ARGUMENTS:
                self.fail(f"at most {_ARGUMENTS} arguments")
            args.append(self.sum())
        if function in ("min", "max"):
            self.expect(")")
            return extreme("min" if function == "min" else "max", args)
        if len(args) != 2:
            self.fail(f"two arguments of {function}")
        self.expect(")")
        return _OPERATORS[function](*args)
