# SPDX-License-Identifier: Apache-2.0
"""Chat templates: from messages to the text that a model was trained to answer.

A template is a program that came with a model, so it runs in jinja2's sandbox, and sees plain JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nnfront.errors import LoadError, RunError
from nnfront.files import Folder, parse_json, shown_text
from nnfront.llm.folder_files import read_json

CONFIG = "tokenizer_config.json"
FILES = ("chat_template.jinja", "chat_template.json")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "\N{SYMBOL FOR START OF TEXT}nnfront continues here\N{SYMBOL FOR END OF TEXT}"
_PROBE = "nnfront probe"


class ChatTemplate:
    """A template and the special tokens that it may name. Raises LoadError for a template that is none."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special = dict(special or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise LoadError("the chat template is none", details=[shown_text(str(error))]) from None
        self._takes_parts: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **more: Any,
    ) -> str:
        """Return the prompt for messages as OpenAI's API has them; `more` are further variables of the template.

        With `continue_final_message` it ends where the text of the last message does. Raises RunError for messages that the template refuses.
        """
        plain = [self._plain(message) for message in messages]
        if not continue_final_message:
            return self._rendered(plain, tools, add_generation_prompt, more)
        if add_generation_prompt:
            raise RunError(
                "a final message cannot be continued and be followed by a new one",
                help="set add_generation_prompt to false with continue_final_message",
            )
        if not plain or not isinstance(plain[-1].get("content"), str):
            raise RunError("there is no final message with a text to continue")
        text = plain[-1]["content"]
        plain[-1]["content"] = text + _MARK
        rendered = self._rendered(plain, tools, False, more)
        head, mark, _ = rendered.rpartition(_MARK)
        if not mark or text.strip() not in head:
            raise RunError("the chat template changes the final message, so it cannot be continued")
        return head

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        more: Mapping[str, Any],
    ) -> str:
        try:
            return self._template.render(
                **{
                    **self._special,
                    "documents": None,
                    **more,
                    "messages": messages,
                    "tools": list(tools) if tools is not None else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RunError(
                "the chat template refuses these messages", details=[shown_text(str(error))]
            ) from None

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates expect it: arguments of tool calls as objects, and a content of text parts as they take it."""
        found = dict(message)
        if isinstance(found.get("content"), list) and not self.takes_parts:
            found["content"] = "\n".join(text_of(part) for part in found["content"])
        if isinstance(calls := found.get("tool_calls"), list):
            found["tool_calls"] = [_with_arguments(call) for call in calls]
        reasoning = next((found[name] for name in REASONING if found.get(name) is not None), None)
        if reasoning is not None:
            found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
        return found

    @property
    def takes_parts(self) -> bool:
        """Whether it goes through a content that is a list of parts, instead of writing the list down."""
        if self._takes_parts is None:
            probe = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
            try:
                shown = self._rendered(probe, None, True, {})
            except RunError:
                shown = ""
            self._takes_parts = _PROBE in shown and f"'{_PROBE}'" not in shown and f'"{_PROBE}"' not in shown
        return self._takes_parts


def template_of(files: Folder, source: str | None = None) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or that `source` with its special tokens; None if there is none.

    Raises LoadError for one that is none.
    """
    config = read_json(files, CONFIG) if files.has(CONFIG) else {}
    special = {name: _token(config[name]) for name in SPECIAL if config.get(name) is not None}
    if source is None and files.has(FILES[0]):
        source = files.read(FILES[0]).decode("utf-8", "replace")
    if source is None and files.has(FILES[1]):
        source = _default(read_json(files, FILES[1]).get("chat_template"))
    if source is None:
        source = _default(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special)


def text_of(part: Any) -> str:
    """The text of a part of a message. Raises RunError for one that is no text."""
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RunError(f"a message has a part of type {kind!r}, this model reads text only")


def _default(found: Any) -> str | None:
    """One template, of several the one for every use."""
    if isinstance(found, list):
        named = {
            t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= set(t)
        }
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(found: Any) -> str:
    return str(found["content"] if isinstance(found, dict) and "content" in found else found)


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, where they are the text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json((function["arguments"] or "{}").encode("utf-8", "replace"))
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant writes, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that lead into Python's inside."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, as {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    environment.globals.pop("lipsum", None)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter writes some characters as HTML wants them."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
