# SPDX-License-Identifier: Apache-2.0
"""Chat templates give what transformers makes of them, and reach nothing outside their sandbox."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from few_of import few_of
from templates import CHATML, FAMILIES, PARTS, SPECIAL, TALKS, TOOLS, TURNS
from transformers.utils.chat_template_utils import render_jinja_template

from nnfront.errors import LoadError, RunError
from nnfront.files import Folder
from nnfront.serve.chat import ChatTemplate, template_of


def theirs(source: str, messages: list[dict[str, Any]], **more: Any) -> str | None:
    try:
        rendered, _ = render_jinja_template(
            [copy.deepcopy(messages)], chat_template=source, **SPECIAL, **more
        )
    except Exception:
        return None
    return str(rendered[0])


def ours(source: str, messages: list[dict[str, Any]], **more: Any) -> str | None:
    try:
        return ChatTemplate(source, SPECIAL).render(messages, **more)
    except RunError:
        return None


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", few_of(FAMILIES, 5))
def test_a_template_gives_what_transformers_makes_of_it(family: str, talk: str, tools: Any) -> None:
    for generation in (True, False):
        more = {"tools": tools, "add_generation_prompt": generation}
        assert ours(FAMILIES[family], TALKS[talk], **more) == theirs(FAMILIES[family], TALKS[talk], **more)


def test_there_are_25_families_and_each_renders_most_of_what_is_compared() -> None:
    assert len(FAMILIES) >= 25
    for source in FAMILIES.values():
        assert sum(theirs(source, talk) is not None for talk in TALKS.values()) >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_as_text_are_given_as_objects(family: str) -> None:
    written = copy.deepcopy(TALKS["calls"])
    call = written[1]["tool_calls"][0]["function"]  # type: ignore[index]
    call["arguments"] = json.dumps(call["arguments"])
    assert ours(FAMILIES[family], written) == ours(FAMILIES[family], TALKS["calls"])


@pytest.mark.parametrize(
    "more",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "high"},
        {"date_string": "1 May"},
        {"thinking": True},
        {"thinking_budget": 600},
        {"documents": [{"title": "A & B", "text": "c"}]},
    ],
)
@pytest.mark.parametrize("family", few_of(FAMILIES, 5))
def test_further_variables_reach_the_template(family: str, more: dict[str, Any]) -> None:
    given = {"tools": TOOLS, "add_generation_prompt": True, **more}
    assert ours(FAMILIES[family], TALKS["one"], **given) == theirs(FAMILIES[family], TALKS["one"], **given)


@pytest.mark.parametrize("content", ["It begins", "It begins  ", "It"])
@pytest.mark.parametrize("family", ["chatml", "hermes", "headers", "turns", "trained", "named"])
def test_the_last_message_can_be_continued(family: str, content: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    found = ours(FAMILIES[family], messages, continue_final_message=True, add_generation_prompt=False)
    assert found is not None
    expected = theirs(FAMILIES[family], messages, continue_final_message=True, add_generation_prompt=False)
    assert expected is not None
    assert found.rstrip() == expected.rstrip()


def test_parts_of_a_message_are_given_as_the_template_takes_them() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(PARTS).takes_parts
    assert not ChatTemplate(CHATML).takes_parts
    assert not ChatTemplate(TURNS, SPECIAL).takes_parts
    assert ours(CHATML, parts) == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert ours(PARTS, parts) == "<|user|>ab<|end|>\n<|assistant|>"


REFUSED = [
    (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "a message has a part of type 'image_url', this model reads text only"),
    (TURNS, TALKS["system"], {}, "the chat template refuses these messages"),
    (CHATML, [{"role": "user"}], {}, "the chat template refuses these messages"),
    (CHATML, TALKS["one"], {"continue_final_message": True}, "a final message cannot be continued and be followed by a new one"),
    (CHATML, [], {"continue_final_message": True, "add_generation_prompt": False}, "there is no final message with a text to continue"),
    ("{{ messages[0].role }}", TALKS["one"], {"continue_final_message": True, "add_generation_prompt": False}, "the chat template changes the final message, so it cannot be continued"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "messages", "more", "message"), REFUSED)
def test_what_a_template_cannot_take_is_said(
    source: str, messages: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError) as error:
        ChatTemplate(source, SPECIAL).render(messages, **more)
    assert error.value.what == message


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set n = namespace(_x=1) %}",
    "{% set n = namespace() %}{% set n._x = 1 %}{{ n }}",
    "{{ messages.append(1) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ''|attr('__class__') }}{{ ('%c' | format(95)) }}{{ ''.__class__ }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_outside_its_sandbox(source: str) -> None:
    try:
        found = ChatTemplate(source).render(TALKS["one"])
    except RunError:
        return
    assert found == "" or "class" not in found


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(LoadError, match="the chat template is none"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "{{ bos_token }}!"},
        {"chat_template.json": json.dumps({"chat_template": "{{ bos_token }}!"})},
        {"tokenizer_config.json": {"chat_template": "{{ bos_token }}!"}},
        {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ bos_token }}!"}]}},
    ],
)  # fmt: skip
def test_a_folders_template_is_found_with_its_special_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    files.setdefault("tokenizer_config.json", {})
    files["tokenizer_config.json"] = json.dumps(
        {**files["tokenizer_config.json"], "bos_token": {"content": "<s>"}, "eos_token": None}
    )
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    template = template_of(Folder(tmp_path))
    assert template is not None
    assert template.render(TALKS["one"]) == "<s>!"


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert template_of(Folder(tmp_path)) is None
    assert template_of(Folder(tmp_path), "x").source == "x"  # type: ignore[union-attr]
