# SPDX-License-Identifier: Apache-2.0
"""IR text as tokens, and errors that show the place."""

from __future__ import annotations

import difflib
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import NoReturn

from nnfront.errors import ParseError
from nnfront.files import shown_text
from nnfront.ir.budget import MAX_CHARACTERS, MAX_NESTING, MAX_TOKENS
from nnfront.ir.expr import Provenance
from nnfront.ir.literals import NAME, unquote

_TOKEN = re.compile(
    rf"""(?P<skip>[ \t\r\n]+ | \#[^\n]*)
       | (?P<name>{NAME})
       | (?P<float>[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+)
       | (?P<int>[0-9]+)
       | (?P<string>"(?:[^"\\\n]++|\\.)*+")
       | (?P<sign>-> | \.\. | // | [-+*%@(){{}}\[\],:=])
       | (?P<bad>.)""",
    re.VERBOSE,
)
_PROVENANCE = re.compile(r"# at (?P<module>[^\s()]*) ?(?:\((?P<file>[^\n]*):(?P<line>[0-9]{1,9})\))?\s*")
_BARE_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]{1,9})")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SHOWN = 100  # columns of a long line that a message shows


class Tokens:
    """A cursor over the tokens of a text: parallel sequences of kinds, texts and offsets, the last one the end.

    `closing` maps the index of an opening bracket to that of its partner. `comments` maps the index of a token to the
    provenance in the comment behind it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.offsets = array("Q")
        self.closing: dict[int, int] = {}
        self.comments: dict[int, Provenance] = {}
        self.index = 0
        self.depth = 0
        self._split()

    def _split(self) -> None:
        kinds, texts, offsets = self.kinds, self.texts, self.offsets
        opened: list[int] = []
        if len(self.text) > MAX_CHARACTERS:
            raise ParseError(f"a text has at most {MAX_CHARACTERS} characters, this has {len(self.text)}")
        for match in _TOKEN.finditer(self.text):
            kind, token = match.lastgroup, match[0]
            assert kind is not None
            if kind == "skip":
                if (
                    token.startswith("# at ")
                    and texts
                    and self.text.find("\n", offsets[-1], match.start()) < 0
                ):
                    self._comment(token)
                continue
            if kind == "bad":
                self._fail_at(match.start(), f"{token!r} does not belong into IR text")
            if kind == "sign":
                if token in _CLOSING:
                    opened.append(len(texts))
                elif opened and token == _CLOSING[texts[opened[-1]]]:
                    self.closing[opened.pop()] = len(texts)
            if len(texts) == MAX_TOKENS:
                self._fail_at(match.start(), f"a text has at most {MAX_TOKENS} words, numbers and signs")
            kinds.append(kind)
            texts.append(token)
            offsets.append(match.start())
        kinds.append("end")
        texts.append("")
        offsets.append(len(self.text))

    def _comment(self, comment: str) -> None:
        match = _PROVENANCE.fullmatch(comment)
        if match is None:
            return
        module, file, line = match["module"], match["file"] or "", match["line"] or "0"
        bare = _BARE_PLACE.fullmatch(module)
        if bare and not file:
            module, file, line = "", bare["file"], bare["line"]
        self.comments[len(self.texts) - 1] = Provenance(module, file, int(line))

    # Reading.

    @property
    def next(self) -> str:
        """The next token's text; empty at the end."""
        return self.texts[self.index]

    @property
    def kind(self) -> str:
        """The next token's kind: name, int, float, string, sign, end."""
        return self.kinds[self.index]

    def after(self) -> str:
        """Return the text of the token after the next one."""
        return self.texts[self.index + 1] if self.kinds[self.index] != "end" else ""

    def take(self, token: str) -> bool:
        """Step over the next token if it is `token`."""
        if self.texts[self.index] != token:
            return False
        self.index += 1
        return True

    def expect(self, token: str) -> None:
        """Step over the next token, which must be `token`."""
        if self.texts[self.index] != token:
            self.fail(repr(token))
        self.index += 1

    def each(self, closing: str) -> Iterator[int]:
        """Yield the index at which each item of a list begins, up to its closing bracket; the opening one has been read."""
        while not self.take(closing):
            yield self.index
            if self.next != closing and not self.take(","):
                self.fail(f"',' or {closing!r}")

    def name(self, what: str) -> str:
        """Step over a word or a quoted name and return the name; `what` says whose name is expected."""
        kind, token = self.kinds[self.index], self.texts[self.index]
        if kind == "name":
            self.index += 1
            return token
        if kind == "string":
            return self.string()
        return self.fail(what)

    def string(self) -> str:
        """Step over a string and return its value."""
        if self.kind != "string":
            self.fail("a string")
        try:
            value = unquote(self.next)
        except ValueError:
            self.error(
                "this string has a bad escape", help='escapes are those of JSON: \\n, \\", \\\\, \\u00e9'
            )
        self.index += 1
        return value

    def integer(self, what: str) -> int:
        """Step over an unsigned integer and return it."""
        if self.kind != "int":
            self.fail(what)
        try:
            value = int(self.next)
        except ValueError:  # beyond the digits that Python reads
            self.error("this number is too long")
        self.index += 1
        return value

    def enter(self) -> None:
        """Go one level down; `leave` comes back."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.error(f"this is nested more than {MAX_NESTING} levels deep")

    def leave(self) -> None:
        """Come back from one level down."""
        self.depth -= 1

    # Errors.

    def fail(self, expected: str) -> NoReturn:
        """Raise ParseError: the next token is not what is expected."""
        got = f"got {shown_text(self.next, 40)!r}" if self.kind != "end" else "the text ends"
        self.error(f"expected {expected}, but {got}")

    def error(self, what: str, *, at: int | None = None, help: str = "") -> NoReturn:
        """Raise ParseError at the next token, or at the token with index `at`."""
        self._fail_at(self.offsets[self.index if at is None else at], what, help)

    def unknown(self, what: str, name: str, known: Iterable[str], *, at: int, help: str = "") -> NoReturn:
        """Raise ParseError for a name that stands for nothing, with the nearest names that do."""
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.75)
        self.error(what, at=at, help=f"did you mean {' or '.join(map(repr, near))}?" if near else help)

    def line_of(self, index: int) -> int:
        """Return the line, from 1, of the token with this index."""
        return self.text.count("\n", 0, self.offsets[index]) + 1

    def _fail_at(self, offset: int, what: str, help: str = "") -> NoReturn:
        start = self.text.rfind("\n", 0, offset) + 1
        end = self.text.find("\n", offset)
        line = self.text[start : end if end >= 0 else len(self.text)]
        column = offset - start
        cut = max(0, column - _SHOWN // 2)
        shown = line[cut : cut + _SHOWN].replace("\t", " ").rstrip()
        raise ParseError(
            f"line {self.text.count(chr(10), 0, offset) + 1}, column {column + 1}: {what}",
            details=[shown, " " * (column - cut) + "^"],
            help=help,
        )
