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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from nnfront.errors import RunError
from nnfront.serve.arguments import Parameter, literal_of, parameters_of, value_of
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.lark import Form, Lark

_OF_NAMES = f"{string.ascii_letters}{string.digits}_.-"
_NAME, _KEY, _VALUE, _TEXT = "probe_tool", "probe_key", "probe value", "probe text"
_SECOND, _ARGUMENTS = "probe_second", "probe arguments"
Tools: TypeAlias = Mapping[str, Any]
"""The schemas of the arguments of each tool by its name."""


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
    """How calls are written: between `begin` and `end`, which may be empty, something that `read` understands, given the tools."""

    begin: str
    end: str
    read: Callable[[str, Tools], list[Call] | None]
    written: str
    """One call, with probes for its name and its arguments."""
    write: Callable[[Lark, Any], str]
    """From the schema of a tool's arguments to a rule for them."""
    between: Between | None = None


@dataclass(frozen=True, slots=True)
class Between:
    """How a template writes several calls: what comes once before all, between two, and once behind them. A call has the rest of what is written of one."""

    head: str
    between: str
    tail: str


def call_form(template: ChatTemplate) -> CallForm | None:
    """Return how a template writes calls; None if it writes none, or in a way that is not known."""
    # Some demand numbers of nine letters, some write the number and not the name, which it then holds.
    return _form_by(template, "call00000") or _form_by(template, f"functions.{_NAME}:0")


def _form_by(template: ChatTemplate, number: str) -> CallForm | None:
    one = _middle(template, number, [_NAME])
    if one is None:
        return None
    form = _object_form(one) or _named_form(one) or _python_form(one) or _parameters_form(one)
    several = _middle(template, number, [_NAME, _SECOND])
    return form and replace(form, between=None if several is None else _between(one, several))


def _middle(template: ChatTemplate, number: str, names: Sequence[str]) -> str | None:
    """What stands for calls in a turn of the assistant's."""
    asked = {"role": "user", "content": "probe"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": number.replace(_NAME, name),
                "type": "function",
                "function": {"name": name, "arguments": {_KEY: _VALUE}},
            }
            for name in names
        ],
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
    if not found or not heads or not all(name in written for name in names):
        return None
    middle = written[len(heads[0]) :].strip()
    # What ends an answer may begin with a mark of answers that are no calls.
    ends = [tail[m.start() :].strip() for m in re.finditer(r"\A|[<\[]", tail)]
    return middle.removesuffix(next(filter(middle.endswith, ends), "")).strip()


def _between(one: str, two: str) -> Between | None:
    """What is written besides two calls. None where the second one is not written as the first is."""
    second = one.replace(_NAME, _SECOND)
    first = _equal(one, two)
    rest = two[first:]
    shared = _equal(second[::-1], rest[::-1])
    found = Between(second[: len(second) - shared], rest[: len(rest) - shared], one[first:])
    is_one_whole = _NAME not in found.tail and _KEY not in found.tail
    return found if is_one_whole and _SECOND not in found.head + found.between else None


def _equal(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _object_form(middle: str) -> CallForm | None:
    arguments = {_KEY: _VALUE}
    for match in re.finditer(r"[\[{]", middle):
        try:
            found, end = json.JSONDecoder().raw_decode(middle, match.start())
        except ValueError:
            continue
        call = found[0] if isinstance(found, list) and found else found
        if isinstance(call, dict) and _NAME in call.values() and arguments in call.values():
            name, key = (next(k for k, v in call.items() if v == known) for known in (_NAME, arguments))
            begin, end_mark = middle[: match.start()].strip(), middle[end:].strip()
            return CallForm(begin, end_mark, _objects(name, key), _without_arguments(middle), Lark.json)
    return None


def _without_arguments(middle: str) -> str:
    """A call with a probe for its arguments, which are JSON."""
    at, end = next(_objects_in(middle))
    return middle[:at] + _ARGUMENTS + middle[end:]


def _objects_in(middle: str) -> Iterator[tuple[int, int]]:
    """Where the arguments stand as JSON."""
    for match in re.finditer("{", middle):
        try:
            found, end = json.JSONDecoder().raw_decode(middle, match.start())
        except ValueError:
            continue
        if found == {_KEY: _VALUE}:
            yield match.start(), end


def _objects(name_key: str, key: str) -> Callable[[str, Tools], list[Call] | None]:
    def read(text: str, _: Tools) -> list[Call] | None:
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

    return read


def _named_form(middle: str) -> CallForm | None:
    before, name, rest = middle.partition(_NAME)
    found = next(_objects_in(rest), None)
    if not name or found is None or not before:
        return None
    between, after = rest[: found[0]], rest[found[1] :]
    prefix = before[len(before.rstrip(_OF_NAMES)) :]
    # Where a call has a number, that stands behind its name.
    mark = re.compile(r"([\w.\-]+)\s*" + re.sub(r":0(?=\D|$)", r":\\d+", re.escape(between.strip())) + r"\s*")

    def read(text: str, _: Tools) -> list[Call] | None:
        calls, at = [], 0
        while (named := mark.search(text, at)) is not None:
            try:
                found, at = json.JSONDecoder().raw_decode(text, named.end())
            except ValueError:
                return None
            calls.append(Call(named[1].removeprefix(prefix), _compact(found)))
        return calls or None

    return CallForm(before.strip(), after.strip(), read, _without_arguments(middle), Lark.json)


def _parameters_form(middle: str) -> CallForm | None:
    before, name, rest = middle.partition(_NAME)
    behind_name, key, rest = rest.partition(_KEY)
    between, value, rest = rest.partition(_VALUE)
    if not (name and key and value and before and between and rest.strip()):
        return None
    # What ends a value ends at a line's end where there are lines; the rest ends the call.
    behind_value, line, end = rest.lstrip("\n").partition("\n") if "\n" in rest.strip() else (rest, "", "")
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

    def read(text: str, tools: Tools) -> list[Call] | None:
        found = list(named.finditer(text))
        calls = []
        ends = [*(following.start() for following in found[1:]), len(text)]
        for match, end in zip(found, ends, strict=False):
            called, body = match["name"].strip(), text[match.end() : end]
            declared = parameters_of(tools.get(called))
            texts = {m["key"].strip(): m["value"] for m in one.finditer(body)}
            calls.append(Call(called, _compact({k: value_of(v, declared.get(k)) for k, v in texts.items()})))
        return calls or None

    last = end.strip().rpartition("\n")[2] or end.strip()
    lines = rest[: len(rest) - len(rest.lstrip("\n"))]
    closed = (lines, marks["value_end"], behind_value[len(behind_value.rstrip()) :] + line)

    def write(lark: Lark, schema: Any) -> str:
        rules = []
        for key, parameter in parameters_of(schema).items():
            opened = lark.literal(marks["parameter"] + key + between)
            if "string" not in parameter.types:
                rule = f"{lark.json(parameter.schema)} {lark.literal(''.join(closed))}"
            elif parameter.texts is not None:
                rule = f"({lark.one_of(parameter.texts)}) {lark.literal(''.join(closed))}"
            else:
                rule = f"{lark.until(marks['value_end'], without=(function, last))} {lark.literal(closed[2])}"
            rules.append(f"({opened} {rule}){'' if parameter.is_required else '?'}")
        return " ".join(rules)

    written = middle.replace("".join((marks["parameter"], _KEY, between, _VALUE, *closed)), _ARGUMENTS)
    return CallForm(begin, last, read, written, write)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _python_form(middle: str) -> CallForm | None:
    found = re.search(rf"\[{_NAME}\((?P<arguments>{_KEY}=['\"]{_VALUE}['\"])\)\]", middle)
    if found is None:
        return None

    def read(text: str, _: Tools) -> list[Call] | None:
        try:
            listed = ast.parse(text.strip(), mode="eval").body
            calls = listed.elts if isinstance(listed, ast.List) else []
            return [_python_call(call) for call in calls] or None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    begin, end = middle[: found.start()].strip(), middle[found.end() :].strip()
    return CallForm(begin, end, read, middle.replace(found["arguments"], _ARGUMENTS), _keywords)


def _keywords(lark: Lark, schema: Any) -> str:
    """A rule for arguments as Python has them by their names."""
    declared = parameters_of(schema)
    written = [f"{lark.literal(f'{key}=')} ({_literal(lark, each)})" for key, each in declared.items()]
    # With a comma before each but the first, whichever that is.
    first = later = '""'
    for rule, each in zip(reversed(written), reversed(declared.values()), strict=True):
        optional = "" if each.is_required else "?"
        first, later = (
            lark.rule(f"{rule} {later}" + ("" if each.is_required else f" | {first}")),
            lark.rule(f'(", " {rule}){optional} {later}'),
        )
    return first


def _literal(lark: Lark, parameter: Parameter) -> str:
    if parameter.types == {"boolean"}:
        return '"True" | "False"'
    return lark.json(parameter.schema)


def _python_call(call: ast.expr) -> Call:
    """A call that names all of its arguments, which are literals. Raises ValueError for any other."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    values = {str(keyword.arg): literal_of(keyword.value) for keyword in call.keywords}
    try:
        return Call(ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False))
    except TypeError:  # what JSON has no word for
        raise ValueError from None


def _split_mark(before: str) -> tuple[str, str]:
    """What begins all calls, and what begins one, if they stand on lines of their own."""
    first, line, last = before.strip().rpartition("\n")
    return (first.strip(), last) if line else (last, last)


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


def call_grammar(form: CallForm, tools: Tools, lark: Lark, *, is_one: bool) -> Form:
    """A call of one of some tools, or several calls, where the template writes several."""
    several, one = form.between, form.written
    if several is not None:
        one = one.removeprefix(several.head).removesuffix(several.tail)
    calls = []
    for name, schema in tools.items():
        known = {_NAME: lark.literal(name), _ARGUMENTS: f"({form.write(lark, schema)})"}
        parts = re.split(f"({_NAME}|{_ARGUMENTS})", one)
        calls.append(" ".join(known.get(part) or lark.literal(part) for part in parts if part))
    rule = call = lark.rule(" | ".join(calls))
    if several is not None:
        more = "" if is_one else f"({lark.literal(several.between)} {call})*"
        rule = f"{lark.literal(several.head)} {call} {more} {lark.literal(several.tail)}"
    return Form("the schema of a tool", {"lark_grammar": lark.text(rule)})
