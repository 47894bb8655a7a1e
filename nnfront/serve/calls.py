# SPDX-License-Identifier: Apache-2.0
"""How a model writes calls of tools, worked out from its chat template.

A template that writes a call down shows the form in which the model was trained to write one: it is given a call, and what stands around the
name and the arguments is the form. Four kinds are known, by what is found there:

    an object       `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`, or a list of them, whatever the key of the name is
    a name          `<call>NAME<sep>{...}</call>`; where a call's number is its name, as in `functions.NAME:0`, too
    parameters      `<function=NAME><parameter=KEY>VALUE</parameter></function>`
    Python          `[NAME(KEY="VALUE")]`
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnfront.errors import RunError
from nnfront.files import parse_json
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.grammar import json_rule

_OF_NAMES = f"{string.ascii_letters}{string.digits}_.-"
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
    # Some demand numbers of nine letters, some write the number and not the name, which it then holds.
    return _form_by(template, "call00000") or _form_by(template, f"functions.{_NAME}:0")


def _form_by(template: ChatTemplate, number: str) -> CallForm | None:
    arguments = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": arguments}
    asked = {"role": "user", "content": "probe"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": number, "type": "function", "function": function}],
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
        prompt = template.render([asked], tools=tools, add_generation_prompt=True)
    except RunError:
        return None
    before, found, tail = plain.rpartition(_TEXT)
    heads = [head for each in (before, prompt) if written.startswith(head := each.rstrip())]
    if not found or not heads or _NAME not in written:
        return None
    middle = written[len(heads[0]) :].strip()
    # What ends an answer may begin with a mark of answers that are no calls.
    ends = [tail[m.start() :].strip() for m in re.finditer(r"\A|[<\[]", tail)]
    middle = middle.removesuffix(next(filter(middle.endswith, ends), "")).strip()
    return _object_form(middle) or _named_form(middle) or _python_form(middle) or _parameters_form(middle)


def _object_form(middle: str) -> CallForm | None:
    arguments = {_KEY: _VALUE}
    for match in re.finditer(r"[\[{]", middle):
        try:
            found, end = json.JSONDecoder().raw_decode(middle, match.start())
        except ValueError:
            continue
        call = found[0] if isinstance(found, list) and found else found
        if isinstance(call, dict) and _NAME in call.values() and {_KEY: _VALUE} in call.values():
            name, key = (next(k for k, v in call.items() if v == known) for known in (_NAME, arguments))
            begin, end_mark = middle[: match.start()].strip(), middle[end:].strip()
            return _objects(begin, end_mark, name, key, is_list=isinstance(found, list))
    return None


def _objects(begin: str, end: str, name_key: str, key: str, *, is_list: bool) -> CallForm:
    def read(text: str) -> list[Call] | None:
        calls, at = [], 0
        while at < len(text):
            try:
                found, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                return None
            for call in found if isinstance(found, list) else [found]:
                name = call.get(name_key, call.get("name")) if isinstance(call, dict) else None
                arguments = call.get(key, call.get("arguments", call.get("parameters"))) if name else None
                if not isinstance(name, str) or not isinstance(arguments, dict | str):
                    return None
                calls.append(Call(name, arguments if isinstance(arguments, str) else _compact(arguments)))
            at += len(text[at:]) - len(text[at:].lstrip(" \n\t,;"))
        return calls or None

    def write(name: str, arguments: str) -> str:
        head = f"{'[' if is_list else ''}{{{json.dumps(name_key)}: {json.dumps(name)}, {json.dumps(key)}: "
        return f"{json.dumps(head)} {arguments} {json.dumps('}]' if is_list else '}')}"

    return CallForm(begin, end, read, write)


def _named_form(middle: str) -> CallForm | None:
    written = json.dumps({_KEY: _VALUE})
    before, name, rest = middle.partition(_NAME)
    between, arguments, after = rest.partition(written)
    if not name or not arguments or not before:
        return None

    prefix = before[len(before.rstrip(_OF_NAMES)) :]
    # Where a call has a number, that stands behind its name.
    mark = re.compile(r"([\w.\-]+)\s*" + re.sub(r":0(?=\D|$)", r":\\d+", re.escape(between.strip())) + r"\s*")

    def read(text: str) -> list[Call] | None:
        calls, at = [], 0
        while (named := mark.search(text, at)) is not None:
            try:
                found, at = json.JSONDecoder().raw_decode(text, named.end())
            except ValueError:
                return None
            calls.append(Call(named[1].removeprefix(prefix), _compact(found)))
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
    if begin == function:  # one mark for both, which is not in what is read
        function = ""
    marks = {
        "function": function,
        "name_end": behind_name[: behind_name.rindex(_last_line(behind_name))].strip(),
        "parameter": _last_line(behind_name),
        "key_end": between,
        "value_end": behind_value.strip(),
    }
    value_end, key_end = re.escape(marks["value_end"]), re.escape(marks["key_end"].strip())
    one = re.compile(
        re.escape(marks["parameter"]) + r"(?P<key>[^\n]*?)" + key_end + r"\n?(?P<value>.*?)\n?" + value_end,
        re.DOTALL,
    )
    behind = re.escape(marks["name_end"]) or rf"(?=\s*(?:{re.escape(marks['parameter'])}|\Z))"
    named = re.compile((re.escape(function) or r"\A\s*") + r"(?P<name>[^\n<>{}]+?)" + behind)

    def read(text: str) -> list[Call] | None:
        found = list(named.finditer(text))
        calls = []
        for match, following in zip(found, [*found[1:], None], strict=True):
            body = text[match.end() : following.start() if following else len(text)]
            values = {m["key"].strip(): _value(m["value"]) for m in one.finditer(body)}
            calls.append(Call(match["name"].strip(), _compact(values)))
        return calls or None

    return CallForm(begin, end.strip().rpartition("\n")[2] or end.strip(), read, _no_json)


def _no_json(called: str, arguments: str) -> str:
    raise RunError("this model's calls are no JSON, so an answer cannot be made to be one")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _python_form(middle: str) -> CallForm | None:
    found = re.search(rf"\[{_NAME}\({_KEY}=['\"]{_VALUE}['\"]\)\]", middle)
    if found is None:
        return None

    def read(text: str) -> list[Call] | None:
        try:
            listed = ast.parse(text.strip(), mode="eval").body
            calls = listed.elts if isinstance(listed, ast.List) else []
            return [_python_call(call) for call in calls] or None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    return CallForm(middle[: found.start()].strip(), middle[found.end() :].strip(), read, _no_json)


def _python_call(call: ast.expr) -> Call:
    """A call that names all of its arguments, which are literals. Raises ValueError for any other."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    try:
        return Call(ast.unparse(call.func), _compact(values))
    except TypeError:  # what JSON has no word for
        raise ValueError from None


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
