# SPDX-License-Identifier: Apache-2.0
"""Answers that must be calls of tools, in every form that is read: what a grammar of them takes, and what comes of a model that is held to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import llguidance
import pytest
from few_of import few_of
from serving import FOLDER, LIMITS, Client
from templates import FAMILIES, HERMES, PARAMETERS, SPECIAL
from test_sections import CALLERS, SEVERAL, sections, written

import nnfront as nn
from nnfront.serve.calls import call_form, call_grammar
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine
from nnfront.serve.lark import Lark

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer", "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "is_long": {"type": "boolean"},
    },
    "required": ["place", "is_long"],
    "additionalProperties": False,
}
TOOLS = {"weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
ZURICH = {"name": "weather", "arguments": {"place": "Zürich", "days": 2, "unit": "C", "is_long": True}}
SHORT = {"name": "weather", "arguments": {"place": 'a "b"\n c', "is_long": False}}
NOW: dict[str, Any] = {"name": "now", "arguments": {}}
TOKENIZER = llguidance.LLTokenizer((FOLDER / "tokenizer.json").read_text(), n_vocab=4096)


@pytest.fixture
def engine(llm: nn.LLM) -> Iterator[Engine]:
    """One with room for prompts that tell of tools."""
    with Engine(llm, replace(LIMITS, max_model_len=512)) as engine:
        yield engine


def takes(grammar: dict[str, Any], text: str) -> bool:
    """Whether a whole text is one of a grammar's."""
    matcher = llguidance.LLMatcher(TOKENIZER, json.dumps({"grammars": [grammar]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and matcher.is_accepting()
    )


def grammar(family: str, *, is_one: bool = False, **tools: Any) -> dict[str, Any]:
    form = call_form(ChatTemplate(FAMILIES[family], SPECIAL))
    assert form is not None
    return call_grammar(form, tools or TOOLS, Lark({}), is_one=is_one).grammar


def one(family: str, call: dict[str, Any]) -> str:
    """What the template writes, with JSON's words where Python's stand for a value that is plain text."""
    text = written(family, [call])
    if family in ("parameters", "budgets"):
        text = text.replace("True", "true").replace("False", "false")
    return text.strip()


@pytest.mark.parametrize("family", few_of(CALLERS, 9))
def test_a_grammar_takes_the_calls_that_a_template_writes_and_no_others(family: str) -> None:
    calls = grammar(family)
    for call in (ZURICH, SHORT, NOW):
        assert takes(calls, one(family, call)), call
    for wrong in ({"days": "x"}, {"days": 100}, {"unit": "K"}, {"is_long": 1}, {"other": 1}):
        arguments = {**ZURICH["arguments"], **wrong}  # type: ignore[dict-item]
        assert not takes(calls, one(family, {"name": "weather", "arguments": arguments})), wrong
    assert not takes(calls, one(family, {"name": "weather", "arguments": {"place": "a"}}))
    assert not takes(calls, one(family, {"name": "other", "arguments": {}}))
    assert not takes(calls, "some text")


@pytest.mark.parametrize("family", few_of(CALLERS, 9))
def test_several_calls_are_taken_where_a_template_writes_them_and_they_are_wanted(family: str) -> None:
    calls = [{"name": name, "arguments": {}} for name in ("now", "later", "now")]
    tools = {"now": {}, "later": {}}
    assert takes(grammar(family, **tools), one(family, calls[0]))
    if family not in SEVERAL:
        return
    text = written(family, calls).strip()
    if family in ("actions", "numbered"):  # whose calls have a number each
        text = text.replace('"2"', '"1"').replace("later:1", "later:0").replace("now:2", "now:0")
    assert takes(grammar(family, **tools), text)
    assert not takes(grammar(family, is_one=True, **tools), text)


def test_no_mark_of_a_form_is_within_a_value() -> None:
    for text in ("</tool_call>", "<function=now>", "</parameter>"):
        call = {"name": "weather", "arguments": {"place": f"a {text} b", "is_long": True}}
        assert not takes(grammar("parameters"), one("parameters", call))


@pytest.mark.parametrize("family", ["parameters", "argkeys", "budgets", "pythonic", "hermes"])
def test_what_a_model_writes_under_a_grammar_is_read_as_calls(engine: Engine, family: str) -> None:
    source = FAMILIES[family].replace("</think>", "</none>")  # of a model that does not think
    client = Client(engine, template=ChatTemplate(source, SPECIAL))
    properties = {
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "on": {"type": "boolean"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["days", "unit", "on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool],
        "max_tokens": 200,
    }
    body["chat_template_kwargs"] = {"enable_thinking": False, "thinking_budget": 0}
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    message = client.post("chat/completions", body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert {key: type(value) for key, value in arguments.items()} == {"days": int, "unit": str, "on": bool}
    assert arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [HERMES, PARAMETERS])
def test_one_call_is_all_that_comes_where_no_more_are_wanted(
    engine: Engine, template: str, stream: bool
) -> None:
    client = Client(engine, template=ChatTemplate(template, SPECIAL))
    tool = {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": False}}}
    asked = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 300,
    }
    asked |= {"stream": stream, "logit_bias": {"0": -100}}  # whose end is put off
    counts = [
        count_calls(client.post("chat/completions", {**asked, "parallel_tool_calls": several}).text)
        for several in (True, False)
    ]
    assert counts[0] > counts[1] == 1
    response = {
        "input": "?",
        "tools": [{"type": "function", **tool["function"]}],
        "tool_choice": "required",
        "max_output_tokens": 300,
    }  # type: ignore[dict-item]
    reply = client.post("responses", {**response, "parallel_tool_calls": False}).json()
    assert [item["type"] for item in reply["output"]] == ["function_call"]
    assert reply["parallel_tool_calls"] is False


def count_calls(text: str) -> int:
    return text.count('"id":"call_')


@pytest.mark.parametrize("family", ["hermes", "listed", "parameters"])
def test_calls_behind_the_first_are_left_out_where_one_is_wanted_and_no_grammar_says_so(family: str) -> None:
    text = written(family, [{"name": name, "arguments": {"x": "y"}} for name in ("a", "b", "c")])
    assert [call.name for _, call in sections(family, [text], is_one=True)] == ["a"]
    assert [call.name for _, call in sections(family, list(text), is_one=True)] == ["a"]


@pytest.mark.parametrize("family", ["hermes", "parameters"])
def test_marks_that_are_special_tokens_are_these_and_not_the_letters_of_their_names(family: str) -> None:
    """Special tokens are none of the letters that a grammar's texts are made of, so the marks would be spelled."""
    special = {"<tool_call>": 4096, "</parameter>": 4097}
    tokens = json.loads((FOLDER / "tokenizer.json").read_text())
    like = tokens["added_tokens"][0]
    tokens["added_tokens"] += [{**like, "id": id, "content": text} for text, id in special.items()]
    tokenizer = llguidance.LLTokenizer(json.dumps(tokens), n_vocab=4100)
    form = call_form(ChatTemplate(FAMILIES[family], SPECIAL))
    assert form is not None
    calls = json.dumps({"grammars": [call_grammar(form, TOOLS, Lark(special), is_one=True).grammar]})
    text = one(family, ZURICH)
    for ids in (tokenizer.tokenize_str(text, parse_special=True), TOKENIZER.tokenize_str(text)):
        matcher = llguidance.LLMatcher(tokenizer, calls, log_level=0)
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == (4096 in ids)
