# SPDX-License-Identifier: Apache-2.0
"""What a model's text consists of: an answer, the reasoning before it, calls of tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

from nnfront.errors import RunError
from nnfront.llm.tokenizer import overlap
from nnfront.serve.calls import Call, CallForm, Tools
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.lark import Lark

_TEXT, _THOUGHT = "probe text", "probe thought"
Kind: TypeAlias = Literal["content", "reasoning", "call"]


class Thoughts(NamedTuple):
    """What stands around reasoning, and what may come behind it, before an answer, and is no part of either."""

    begin: str
    end: str
    opening: str = ""


def thoughts_of(template: ChatTemplate) -> Thoughts | None:
    """Return how a template writes reasoning before an answer: what it writes around some that it is given, or, where it writes none of what is over,
    what it looks for. None if it knows of none."""
    asked = {"role": "user", "content": "probe"}
    answer = {"role": "assistant", "content": _TEXT}
    try:
        head = template.render([asked], add_generation_prompt=True).rstrip()
        plain, written = (
            template.render([asked, message], add_generation_prompt=False)
            for message in (answer, {**answer, "reasoning_content": _THOUGHT})
        )
    except RunError:
        head = plain = written = ""
    before, _, rest = written.partition(_THOUGHT)
    end, answered, _ = rest.partition(_TEXT)
    if answered:
        plain = plain.partition(_TEXT)[0]
        equal = "".join(
            a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, plain, strict=False))
        )
        starts = [head] if before.startswith(head) else []
        # Where the prompt for an answer begins with reasoning itself.
        starts.append(re.sub(r"<[^<>]*\Z", "", equal))
        begin = next(filter(None, (before[len(start) :].strip() for start in starts)), "")
        ends = re.fullmatch(r"(<[^<>]*>|[^<]+)(.*)", end.strip(), re.DOTALL)
        if begin and ends is not None:
            return Thoughts(begin, ends[1], ends[2])
    return Thoughts("<think>", "</think>") if "</think>" in template.source else None


def thoughts_grammar(thoughts: Thoughts, lark: Lark, *, is_thinking: bool) -> str:
    """A grammar of an answer behind reasoning, if there is some or it has been begun."""
    reasoning, blanks = f"{lark.until(thoughts.end)} /\\n{{0,2}}/", ""
    if not is_thinking:
        reasoning, blanks = f"({lark.literal(thoughts.begin)} {reasoning})?", "/\\n{0,2}/"
    opening = f"({lark.literal(thoughts.opening)})?" if thoughts.opening else ""
    return lark.text(f"{blanks} {reasoning} {opening} @answer")


class Sections:
    """A text that comes in pieces, as pieces of sections: what they are, and text, or a whole call.

    `thoughts`: what stands around reasoning, if it may begin with some; `is_thinking`: whether it begins within it, as the prompt has begun it.
    `tools`: those that may be called; with `is_one` calls behind the first are left out.
    """

    def __init__(
        self,
        form: CallForm | None,
        thoughts: Thoughts | None,
        *,
        is_thinking: bool,
        tools: Tools | None = None,
        is_one: bool = False,
    ) -> None:
        self._form = form
        self._tools: Tools = tools or {}
        self._most = 1 if is_one else None
        self._kind: Kind = "reasoning" if is_thinking else "content"
        self._thoughts = thoughts
        self._held = ""
        self._is_first = True
        self._skipped = "\n" if is_thinking else ""  # what does not count before the next text

    def push(self, piece: str, *, is_last: bool = False) -> Iterator[tuple[Kind, str | Call]]:
        """Yield what is sure with one more piece; with the last one, all."""
        self._held += piece
        while (step := self._step(is_last)) is not None:
            yield from step
        if is_last and self._held:
            text, self._held = self._held.lstrip(self._skipped), ""
            yield from self._called(text) if self._kind == "call" else self._text(text)

    def _step(self, is_last: bool) -> list[tuple[Kind, str | Call]] | None:
        """What comes before the next mark, and the mark's effect; None if more is to come first."""
        if self._kind == "call":
            assert self._form is not None
            text, mark, rest = self._held.partition(self._form.end) if self._form.end else ("", "", "")
            if not mark:
                return None
            self._held, self._kind = rest, "content"
            return self._called(text)
        if self._kind == "reasoning":
            assert self._thoughts is not None
            return self._until({self._thoughts.end: "content"})
        marks: dict[str, Kind] = {}
        if self._thoughts is not None and self._is_first:
            begin, start = self._thoughts.begin, self._held.lstrip()
            if start.startswith(begin) or not begin.startswith(start):
                marks[begin] = "reasoning"
            elif not is_last:
                return None  # it may be the beginning of the mark
        if self._thoughts is not None and self._thoughts.opening:
            marks[self._thoughts.opening] = "content"
        if self._form is not None and self._form.begin:
            marks[self._form.begin] = "call"
        elif self._form is not None and self._is_first:
            start = self._held.lstrip()
            if start.startswith(("{", "[")):
                self._kind = "call"
                return None
            if not start and not is_last:
                return None
        return self._until(marks)

    def _until(self, marks: Mapping[str, Kind]) -> list[tuple[Kind, str | Call]] | None:
        self._held = self._held.lstrip(self._skipped)
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            found = self._text(text.rstrip() if marks[mark] == "call" else text)
            self._kind, self._skipped = marks[mark], "\n"
            return found
        sure = len(self._held) - max((overlap(self._held, mark) for mark in marks), default=0)
        if "call" in marks.values():
            sure = len(self._held[:sure].rstrip())
        text, self._held = self._held[:sure], self._held[sure:]
        return self._text(text) if text else None

    def _text(self, text: str) -> list[tuple[Kind, str | Call]]:
        if not text:
            return []
        self._is_first, self._skipped = False, ""
        return [(self._kind, text)]

    def _called(self, text: str) -> list[tuple[Kind, str | Call]]:
        assert self._form is not None
        self._is_first = False
        calls = self._form.read(text.strip(), self._tools)
        if calls is None:  # no call after all
            return [("content", self._form.begin + text + self._form.end)]
        self._skipped = " \t\n"
        found: list[tuple[Kind, str | Call]] = [("call", call) for call in calls[: self._most]]
        if self._most is not None:
            self._most -= len(found)
        return found
