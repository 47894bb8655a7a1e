# SPDX-License-Identifier: Apache-2.0
"""What a model's text consists of: an answer, the reasoning before it, calls of tools. How it writes them is worked out from its chat template.

A template that writes a call down shows the form in which the model was trained to write one: it is given a call, and what stands around the
name and the arguments is the form. Three kinds are known, by what is found there:

    an object       `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`, or a list of them
    a name          `<call>NAME<sep>{...}</call>`
    parameters      `<function=NAME><parameter=KEY>VALUE</parameter></function>`
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from nnfront.errors import RunError
from nnfront.files import parse_json
from nnfront.llm.tokenizer import overlap
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.grammar import json_rule

THINK, THOUGHT = "<think>", "</think>"
_NAME, _KEY, _VALUE, _TEXT = "probe_tool", "probe_key", "probe value", "probe text"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: str

    def entry(self, index: int | None = None) -> dict[str, Any]:
        """As replies have it; a chunk of a stream says which of several it is."""
        call = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written: between `begin` and `end`, which may be empty, something that `read` understands."""

    begin: str
    end: str
    read: Callable[[str], list[Call] | None]
    write: Callable[[str, str], str]
    """From a name, and the name of a grammar's rule for its arguments, to a rule for the call; in Lark's form."""


def call_form(template: ChatTemplate) -> CallForm | None:
    """Return how a template writes calls; None if it writes none, or in a way that is not known."""
    arguments = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": arguments}
    asked = {"role": "user", "content": "probe"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": "other",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    try:
        written, plain = (
            template.render([asked, message], tools=tools, add_generation_prompt=False)
            for message in (called, {"role": "assistant", "content": _TEXT})
        )
    except RunError:
        return None
    at = plain.rfind(_TEXT)
    if at < 0 or written[: len(plain[:at].rstrip())] != plain[:at].rstrip() or _NAME not in written:
        return None
    head = len(plain[:at].rstrip())
    tail = plain[at + len(_TEXT) :].strip()
    middle = written[head:].strip()
    middle = middle.removesuffix(tail).strip() if tail else middle
    return _object_form(middle) or _named_form(middle) or _parameters_form(middle)


def _object_form(middle: str) -> CallForm | None:
    for match in re.finditer(r"[\[{]", middle):
        try:
            found, end = json.JSONDecoder().raw_decode(middle, match.start())
        except ValueError:
            continue
        call = found[0] if isinstance(found, list) and found else found
        if isinstance(call, dict) and call.get("name") == _NAME and {_KEY: _VALUE} in call.values():
            key = next(k for k, v in call.items() if v == {_KEY: _VALUE})
            begin, end_mark = middle[: match.start()].strip(), middle[end:].strip()
            return _objects(begin, end_mark, key, is_list=isinstance(found, list))
    return None


def _objects(begin: str, end: str, key: str, *, is_list: bool) -> CallForm:
    def read(text: str) -> list[Call] | None:
        calls, at = [], 0
        while at < len(text):
            try:
                found, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                return None
            for call in found if isinstance(found, list) else [found]:
                name = call.get("name") if isinstance(call, dict) else None
                arguments = call.get(key, call.get("arguments", call.get("parameters"))) if name else None
                if not isinstance(name, str) or not isinstance(arguments, dict | str):
                    return None
                calls.append(Call(name, arguments if isinstance(arguments, str) else _compact(arguments)))
            at += len(text[at:]) - len(text[at:].lstrip(" \n\t,;"))
        return calls or None

    def write(name: str, arguments: str) -> str:
        head = f'{"[" if is_list else ""}{{"name": {json.dumps(name)}, {json.dumps(key)}: '
        return f"{json.dumps(head)} {arguments} {json.dumps('}]' if is_list else '}')}"

    return CallForm(begin, end, read, write)


def _named_form(middle: str) -> CallForm | None:
    written = json.dumps({_KEY: _VALUE})
    before, name, rest = middle.partition(_NAME)
    between, arguments, after = rest.partition(written)
    if not name or not arguments or not before:
        return None

    def read(text: str) -> list[Call] | None:
        calls = []
        for part in filter(None, text.split(before.strip())):
            called, _, values = part.partition(between)
            values = values.rpartition(after.strip())[0] or values if after.strip() else values
            try:
                found, _ = json.JSONDecoder().raw_decode(values.strip())
            except ValueError:
                return None
            calls.append(Call(called.strip(), _compact(found)))
        return calls or None

    def write(called: str, arguments_rule: str) -> str:
        return f"{json.dumps(called + between)} {arguments_rule}"

    return CallForm(before.strip(), after.strip(), read, write)


def _parameters_form(middle: str) -> CallForm | None:
    before, name, rest = middle.partition(_NAME)
    behind_name, key, rest = rest.partition(_KEY)
    between, value, rest = rest.partition(_VALUE)
    if not (name and key and value and before and between):
        return None
    # What ends a value ends at a line's end where there are lines; the rest ends the call.
    behind_value, _, end = rest.lstrip("\n").partition("\n") if "\n" in rest.strip() else (rest, "", "")
    begin, function = _split_mark(before)
    marks = {
        "function": function,
        "name_end": behind_name.strip().partition("\n")[0] or behind_name,
        "parameter": behind_name.strip().rpartition("\n")[2],
        "key_end": between,
        "value_end": behind_value.strip(),
    }
    value_end, key_end = re.escape(marks["value_end"]), re.escape(marks["key_end"].strip())
    one = re.compile(
        re.escape(marks["parameter"]) + r"(?P<key>[^\n]*?)" + key_end + r"\n?(?P<value>.*?)\n?" + value_end,
        re.DOTALL,
    )
    named = re.compile(re.escape(function) + r"(?P<name>[^\n]*?)" + re.escape(marks["name_end"].strip()))

    def read(text: str) -> list[Call] | None:
        found = list(named.finditer(text))
        calls = []
        for match, following in zip(found, [*found[1:], None], strict=True):
            body = text[match.end() : following.start() if following else len(text)]
            values = {m["key"].strip(): _value(m["value"]) for m in one.finditer(body)}
            calls.append(Call(match["name"].strip(), _compact(values)))
        return calls or None

    def write(called: str, arguments: str) -> str:
        raise RunError("this model's calls are no JSON, so an answer cannot be made to be one")

    return CallForm(begin, end.strip().rpartition("\n")[2] or end.strip(), read, write)


def _split_mark(before: str) -> tuple[str, str]:
    """What begins all calls, and what begins one, if they stand on lines of their own."""
    first, line, last = before.strip().rpartition("\n")
    return (first.strip(), last) if line else (last, last)


def _value(text: str) -> Any:
    try:
        return parse_json(text.encode("utf-8", "replace"))
    except ValueError:
        return text


def _compact(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


Kind: TypeAlias = Literal["content", "reasoning", "call"]


class Sections:
    """A text that comes in pieces, as pieces of sections: what they are, and text, or a whole call.

    `thinks`: whether it may begin with reasoning; `is_thinking`: whether it begins within it, as the prompt has begun it.
    """

    def __init__(self, form: CallForm | None, *, thinks: bool, is_thinking: bool) -> None:
        self._form = form
        self._kind: Kind = "reasoning" if is_thinking else "content"
        self._thinks = thinks and not is_thinking
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
            return self._until({THOUGHT: "content"})
        marks: dict[str, Kind] = {}
        if self._thinks and self._is_first:
            if self._held.lstrip().startswith(THINK) or not THINK.startswith(self._held.lstrip() or "<"):
                marks[THINK] = "reasoning"
            elif not is_last:
                return None  # it may be the beginning of the mark
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
        calls = self._form.read(text.strip())
        if calls is None:  # no call after all
            return [("content", self._form.begin + text + self._form.end)]
        self._skipped = " \t\n"
        return [("call", call) for call in calls]


def tools_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schemas of the arguments of each tool by its name. Raises RunError for one that is no function with a name."""
    found = {}
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RunError("a tool is no function with a name")
        found[name] = function.get("parameters") or {"type": "object"}
    return found


def call_grammar(form: CallForm, tools: Mapping[str, Any]) -> str:
    """A grammar, in Lark's form, of one call of one of some tools."""
    begin, end = (json.dumps(mark) for mark in (form.begin + "\n", "\n" + form.end))
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    lines = [f"start: {begin if form.begin else ''} ({calls}) {end if form.end else ''}"]
    for i, (name, schema) in enumerate(tools.items()):
        lines += [
            f"call{i}: {form.write(name, f'arguments{i}')}",
            f"arguments{i}: {json_rule(schema)}",
        ]
    return "\n".join(lines)
