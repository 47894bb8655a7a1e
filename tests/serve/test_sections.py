# SPDX-License-Identifier: Apache-2.0
"""Calls of tools and reasoning in what a model writes: the form is read off its chat template, and pieces may be cut anywhere."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Client
from templates import CHATML, FAMILIES, HERMES, SPECIAL, TALKS, THINKING, TOOLS

from nnfront.serve.calls import Call, call_form
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine
from nnfront.serve.sections import Sections, Thoughts, thoughts_of

PLAIN = ["parameters", "argkeys", "invokes", "budgets"]  # values are plain text
CALLERS = ["headers", "hermes", "listed", "named", "pythonic", "actions", "brackets", "args", "numbered", "states", "switched", "dated", "modes", *PLAIN]  # fmt: skip
SEVERAL = [family for family in CALLERS if family not in ("headers", "args", "listed")] + ["listed", "args"]
ENDS = ("<|eot|>", "<|im_end|>\n", "</s>", "<end>", "<|end|>\n", "[e~[\n", "<|END|>", "<|end|></s>", "<|im_end|>", "\n<SPECIAL_12>\n", "<|end_of_text|>\n")  # fmt: skip
THINK = Thoughts("<think>", "</think>")


def written(family: str, calls: list[dict[str, Any]]) -> str:
    """What the model of a family writes for some calls, without the token that ends its turn."""
    template = ChatTemplate(FAMILIES[family], SPECIAL)
    talk = copy.deepcopy(TALKS["calls"][:2])
    talk[1]["tool_calls"] = [
        {"id": f"functions.{call['name']}:{i}", "type": "function", "function": call}
        for i, call in enumerate(calls)
    ]
    whole = template.render(talk, add_generation_prompt=False)
    head = template.render(talk[:1], add_generation_prompt=True)
    head = head.rstrip().removesuffix("<think>").removesuffix("</think>").rstrip()
    text = whole[len(head) :] if whole.startswith(head) else whole[whole.index("[TOOL") :]
    text = text.lstrip("\n").removeprefix("<think></think>").removeprefix("</think>")
    for end in ENDS:
        text = text.removesuffix(end)
    return text.lstrip("\n")


def sections(
    family: str,
    pieces: list[str],
    thoughts: Thoughts | None = None,
    *,
    is_thinking: bool = False,
    **more: Any,
) -> list[tuple[str, Any]]:
    """What comes, with pieces of one kind put together."""
    form = call_form(ChatTemplate(FAMILIES[family], SPECIAL))
    reader, found = Sections(form, thoughts, is_thinking=is_thinking, **more), list[tuple[str, Any]]()
    for i, piece in enumerate(pieces):
        for kind, value in reader.push(piece, is_last=i == len(pieces) - 1):
            if found and kind == found[-1][0] and isinstance(value, str):
                found[-1] = kind, found[-1][1] + value
            else:
                found.append((kind, value))
    return found


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("family", few_of(CALLERS, 6))
@settings(max_examples=15)
@given(
    st.dictionaries(st.sampled_from(["place", "days", "k_1"]), st.text("aZ ü\"'{}<|\n\\", max_size=12) | st.integers() | st.sampled_from(["42", "true", "[1]", "null", "None", '{"a": 1}']) | st.booleans(), min_size=1),
    st.lists(st.integers(0, 500), max_size=6),
)  # fmt: skip
def test_a_call_is_read_as_the_template_writes_it(
    family: str, arguments: dict[str, Any], places: list[int]
) -> None:
    if family in PLAIN:  # values have no end but a mark, and templates do not keep every blank around them
        arguments = {key: v.strip() if isinstance(v, str) else v for key, v in arguments.items()}
        if any("<" in v or "{" in v for v in arguments.values() if isinstance(v, str)):
            return
    types = {str: "string", int: "integer", bool: "boolean"}
    tools = {"weather": {"properties": {key: {"type": types[type(v)]} for key, v in arguments.items()}}}
    text = written(family, [{"name": "weather", "arguments": arguments}])
    found = sections(family, cut(text, places), tools=tools)
    assert [kind for kind, _ in found] == ["call"]
    assert found[0][1].name == "weather"
    assert json.loads(found[0][1].arguments) == arguments


TYPED = [
    ({"type": "string"}, "42", "42"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string"}, "[1]", "[1]"),
    ({"type": "string"}, "null", "null"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"type": ["string", "null"]}, "42", "42"),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
    ({"$ref": "#/$defs/word"}, "42", "42"),
    ({"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, "42", "42"),
    ({"$ref": "#/$defs/itself"}, "42", 42),
    ({"type": ["string", "integer"]}, "42", 42),
    ({"type": ["string", "integer"]}, "4.5", "4.5"),
    ({"type": "integer"}, "42", 42),
    ({"type": "integer"}, " 42 ", 42),
    ({"type": "integer"}, "many", "many"),
    ({"type": "number"}, "42", 42),
    ({"type": "number"}, "4.5", 4.5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "array"}, "[1, null]", [1, None]),
    ({"type": "array"}, "['a', True, null]", ["a", True, None]),
    ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "object"}, "[1]", "[1]"),
    ({}, "42", 42),
    ({}, "True", "True"),
    (True, "[1]", [1]),
    (None, "[1]", [1]),
    (None, "None", "None"),
]


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize(("schema", "text", "expected"), TYPED)
def test_a_value_that_is_plain_text_has_the_type_that_the_tool_says(
    family: str, schema: Any, text: str, expected: Any
) -> None:
    definitions = {"word": {"type": "string"}, "itself": {"$ref": "#/$defs/itself"}}
    tool = {"properties": {} if schema is None else {"x": schema}, "$defs": definitions}
    found = sections(family, [written(family, [{"name": "f", "arguments": {"x": text}}])], tools={"f": tool})
    arguments = json.loads(found[0][1].arguments)
    assert (arguments, type(arguments["x"])) == ({"x": expected}, type(expected))


@pytest.mark.parametrize("family", SEVERAL)
def test_several_calls_are_read_one_after_the_other(family: str) -> None:
    calls = [{"name": name, "arguments": {"place": name + "x"}} for name in ("a", "b", "c")]
    found = sections(family, [written(family, calls)])
    assert [(value.name, json.loads(value.arguments)) for _, value in found] == [
        (call["name"], call["arguments"]) for call in calls
    ]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 500), max_size=8))
def test_text_and_reasoning_before_calls_come_as_they_are(places: list[int]) -> None:
    text = '<think>\nfirst this < that</think>\n\nNow: <tool_ <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    found = sections("hermes", cut(text, places), THINK)
    assert found == [
        ("reasoning", "first this < that"),
        ("content", "Now: <tool_"),
        ("call", Call("a", "{}")),
    ]


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    found = sections("chatml", ["so", " it</thi", "nk>\n\nyes"], THINK, is_thinking=True)
    assert found == [("reasoning", "so it"), ("content", "yes")]


THOUGHTS = {
    **dict.fromkeys(["thinking", "argkeys", "invokes", "pythonic", "states", "switched", "modes"], THINK),
    "channels": Thoughts("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
    "actions": Thoughts("<|THINKING|>", "<|/THINKING|>", "<|RESPONSE|>"),
    "budgets": Thoughts("<s:think>", "</s:think>"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_around_reasoning_is_read_off_the_template(family: str) -> None:
    assert thoughts_of(ChatTemplate(FAMILIES[family], SPECIAL)) == THOUGHTS.get(family)


@settings(max_examples=40)
@given(st.sampled_from(sorted(THOUGHTS)), st.lists(st.integers(0, 500), max_size=8))
def test_reasoning_of_every_family_comes_apart(family: str, places: list[int]) -> None:
    thoughts = THOUGHTS[family]
    text = f"{thoughts.begin}why < {thoughts.end[:3]} so{thoughts.end}{thoughts.opening}because"
    expected = [("reasoning", f"why < {thoughts.end[:3]} so"), ("content", "because")]
    assert sections(family, cut(text, places), thoughts) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>no json</tool_call>"),
        ("hermes", '<tool_call>{"nam": 1}</tool_call>'),
        ("hermes", "a <tool_call"),
        ("headers", "{not a call}"),
        ("headers", "plain [text]"),
        ("named", "<calls><call>function<sep>x no arguments```</call></calls>"),
        ("listed", "[TOOL_CALLS]oh"),
        ("parameters", "<tool_call>no function</tool_call>"),
    ],
)
def test_what_is_no_call_after_all_is_text(family: str, text: str) -> None:
    assert (
        sections(family, list(text)) == [("content", text)]
        or "".join(value for _, value in sections(family, list(text))) == text
    )


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CALLERS)))
def test_a_template_that_writes_no_calls_has_no_form(family: str) -> None:
    assert call_form(ChatTemplate(FAMILIES[family], SPECIAL)) is None


ASKED: dict[str, Any] = {
    "model": "pylib",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 90,
    "temperature": 1.0,
    "seed": 4,
}


def test_an_answer_that_must_be_a_call_is_one(engine: Engine) -> None:
    client = Client(engine, template=ChatTemplate(HERMES, SPECIAL))
    choice = client.post("chat/completions", ASKED).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["place"], str)

    async def stream(http: Any) -> list[Any]:
        api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=http)
        return [chunk async for chunk in await api.chat.completions.create(**ASKED, stream=True)]

    deltas = [chunk.choices[0].delta for chunk in client.run(stream)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert pieces[0].function.name == "weather"
    assert "".join(piece.function.arguments for piece in pieces) == call["function"]["arguments"]


@pytest.mark.parametrize(
    ("template", "more", "message"),
    [
        (CHATML, {}, "this model's chat template does not say how it calls tools"),
        (HERMES, {"tools": None}, "tool_choice asks for a call, but there are no tools"),
        (HERMES, {"tools": [{"type": "web"}]}, "a tool is no function with a name"),
        (HERMES, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice names 'x', which is none of the tools"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_had_is_refused(
    engine: Engine, template: str, more: dict[str, Any], message: str
) -> None:
    client = Client(engine, template=ChatTemplate(template, SPECIAL))
    response = client.post("chat/completions", {**ASKED, **more})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_reasoning_is_apart_from_the_answer(engine: Engine) -> None:
    client = Client(engine, template=ChatTemplate(THINKING, SPECIAL))
    body = {"messages": ASKED["messages"], "max_tokens": 8}
    message = client.post("chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    body["chat_template_kwargs"] = {"enable_thinking": False}
    message = client.post("chat/completions", body).json()["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


def test_tokens_of_texts_and_conversations(client: Client) -> None:
    reply = client.post("/tokenize", {"prompt": "import os", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert client.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "import os"}
    chat = client.post("/tokenize", {"messages": [{"role": "user", "content": "import os"}]}).json()
    assert chat["count"] > reply["count"]
    both = client.post("/tokenize", {"prompt": "a", "messages": ASKED["messages"]})
    assert both.json()["error"]["message"] == "tokenize takes a prompt or messages, and not both"
    refused = client.post("embeddings", {"input": "a"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the model 'pylib' continues texts, it makes no embeddings"
