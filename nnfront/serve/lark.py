# SPDX-License-Identifier: Apache-2.0
"""Grammars in llguidance's form of Lark, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nnfront.errors import RunError

MAX_CHARACTERS = 1 << 16
"""Of a schema, an expression or a grammar."""
BLANKS = r"(\n[ ]{0,40})|[ ]?"
"""Between the parts of JSON: a blank, or a new line and its indent. Some models would never end a run of blanks."""
_MEANT = re.compile(r"[^\w\s<>=:\"']")
"""What means something in a regular expression, or ends one."""


class Form(NamedTuple):
    """What an answer may be, as llguidance has it; `what` names it in errors."""

    what: str
    grammar: dict[str, Any]


class Lark:
    """Rules over texts and special tokens, which are one token each and never the letters of their names."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self.rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        self.rules.append(f"rule{len(self.rules)}{options}: {body}")
        return f"rule{len(self.rules) - 1}"

    def text(self, start: str) -> str:
        """The grammar whose texts are those of this rule. Raises RunError if it is too long."""
        return short("\n".join([f"start: {start}", *self.rules]))

    def literal(self, text: str) -> str:
        """This text."""
        return " ".join(self._parts(text)) or '""'

    def one_of(self, texts: Iterable[str]) -> str:
        """One of some texts."""
        return " | ".join(map(self.literal, texts))

    def json(self, schema: Any) -> str:
        """A JSON value that a schema allows."""
        guided = (
            {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}
            if isinstance(schema, Mapping)
            else schema
        )
        return f"%json {json.dumps(guided)}"

    def until(self, mark: str, *, without: Sequence[str] = ()) -> str:
        """Any text that ends with a mark which is not in it before, nor are some others."""
        first, *rest = self._parts(mark)
        text = self._terminal([each for each in without if each])
        if first.startswith("<"):
            return " ".join((text, first, *rest))
        return " ".join((self.rule(text, f"[suffix={first}]"), *rest))

    def _terminal(self, without: Sequence[str]) -> str:
        marks = [_MEANT.sub(r"\\\g<0>", each) for each in without]
        none = "".join(f" & ~/(?s:.*{mark}.*)/" for mark in marks)
        self.rules.append(f"TEXT{len(self.rules)}: /(?s:.*)/{none}")
        return f"TEXT{len(self.rules) - 1}"

    def _parts(self, text: str) -> list[str]:
        found, at = list[str](), 0
        for mark in self._marks.finditer(text):
            found += [json.dumps(text[at : mark.start()])] * (mark.start() > at)
            found.append(f"<[{self._special[mark[0]]}]>")
            at = mark.end()
        return [*found, json.dumps(text[at:])] if at < len(text) else found


def short(text: str) -> str:
    """Return a text. Raises RunError if it is too long for a grammar."""
    if len(text) > MAX_CHARACTERS:
        raise RunError(
            f"a grammar has {len(text)} characters, {MAX_CHARACTERS} are the most",
            help="ask for less, or check the answer afterwards",
        )
    return text
