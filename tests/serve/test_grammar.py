# SPDX-License-Identifier: Apache-2.0
"""Answers that keep to a form: what comes is of that form, drawn or greedy, and what cannot be compiled is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest
from few_of import few_of
from hostile import limits
from serving import FOLDER, Client
from templates import FAMILIES, SPECIAL, THINKING

from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine
from nnfront.serve.grammar import json_schema
from nnfront.serve.lark import Lark
from nnfront.serve.sections import thoughts_grammar, thoughts_of

MESSAGES = [{"role": "user", "content": "def main():"}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}


def chat(client: Client, **more: Any) -> Any:
    return client.post("chat/completions", {"messages": MESSAGES, "max_tokens": 120, **more})


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_keeps_to_its_schema(client: Client, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
    reply = chat(client, temperature=1.5, seed=seed, response_format=wanted).json()["choices"][0]
    found = json.loads(reply["message"]["content"])
    assert set(found) == {"size", "ok"}
    assert 0 <= found["size"] <= 99
    assert reply["finish_reason"] == "stop"


def test_several_answers_of_one_request_keep_to_it_each_for_itself(client: Client) -> None:
    reply = chat(client, temperature=1.5, seed=1, n=3, structured_outputs={"json": SCHEMA}).json()
    assert [set(json.loads(choice["message"]["content"])) for choice in reply["choices"]] == [
        {"size", "ok"}
    ] * 3


def test_a_regular_expression_is_matched_as_a_whole(client: Client) -> None:
    body = {"prompt": "x", "max_tokens": 20, "temperature": 1.0, "seed": 2}
    reply = client.post("completions", {**body, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}})
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", reply.json()["choices"][0]["text"])


def test_a_choice_is_one_of_the_texts(client: Client) -> None:
    texts = ["red", "green ü", 'say "blue"']
    found = {
        chat(client, temperature=2.0, seed=i, structured_outputs={"choice": texts}).json()["choices"][0][
            "message"
        ]["content"]
        for i in range(8)
    }
    assert found <= set(texts)
    assert len(found) > 1


def test_a_grammar_is_kept_to(client: Client) -> None:
    grammar = 'start: "a" digit+ "z"\ndigit: /[0-9]/\n'
    reply = chat(client, temperature=1.0, seed=0, max_tokens=100, structured_outputs={"grammar": grammar})
    assert re.fullmatch("a[0-9]+z?", reply.json()["choices"][0]["message"]["content"])


THINKERS = {
    "begun by the prompt": (THINKING, "<think>\n", "so it is</think>\n\n"),
    "begun by the model": (FAMILIES["argkeys"], "<|assistant|>", "\n<think>so it is</think>\n"),
    "not begun": (FAMILIES["argkeys"], "<|assistant|>", "\n"),
    "behind which a text begins": (FAMILIES["actions"], "<|BOT|>", "<|THINKING|>so<|/THINKING|><|RESPONSE|>"),
}


@pytest.mark.parametrize("special", [{}, {"</think>": 4096}], ids=["letters", "a token"])
@pytest.mark.parametrize("case", THINKERS)
def test_a_form_begins_behind_the_thoughts(case: str, special: dict[str, int]) -> None:
    source, prompt_end, reasoning = THINKERS[case]
    template = ChatTemplate(source, SPECIAL)
    prompt = template.render(MESSAGES).rstrip("\n")
    thoughts = thoughts_of(template)
    assert thoughts is not None
    assert prompt.endswith(prompt_end.rstrip("\n"))
    before = thoughts_grammar(thoughts, Lark(special), is_thinking=prompt.endswith(thoughts.begin))
    tokens = json.loads((FOLDER / "tokenizer.json").read_text())
    tokens["added_tokens"] += [
        {**tokens["added_tokens"][0], "id": id, "content": text} for text, id in special.items()
    ]
    tokenizer = llguidance.LLTokenizer(json.dumps(tokens), n_vocab=4100)
    grammar = json.dumps(
        {"grammars": [{"lark_grammar": before}, {**json_schema(SCHEMA).grammar, "name": "answer"}]}
    )

    def takes(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    answer = '{"size": 5, "ok": true}'
    assert takes(reasoning + answer)
    assert not takes(reasoning + "so " + answer)
    assert not takes(reasoning + '{"size": 5}')
    assert takes(answer) == (case != "begun by the prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_thinks_does_so_before_an_answer_with_a_form(engine: Engine, stream: bool) -> None:
    # With an end of thoughts that this model, which was not trained to think, comes to by itself.
    client = Client(engine, template=ChatTemplate(THINKING.replace("</think>", "="), SPECIAL))
    for more in (
        {"structured_outputs": {"regex": "[a-f]{3}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "abc"}}}},
    ):
        reply = chat(client, temperature=1.0, seed=1, stream=stream, max_tokens=200, **more)
        assert reply.status_code == 200
        content, reasoning = said(reply.text, stream)
        assert re.fullmatch('"?[a-f]{3}"?', content), content
        assert reasoning
    told = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"regex": "[a-f]{3}"}}
    assert said(chat(client, stream=stream, **told).text, stream)[1] == ""


def said(text: str, stream: bool) -> tuple[str, str]:
    """The content and the reasoning of a reply."""
    if stream:
        parts = [
            json.loads(line[6:])["choices"][0]["delta"]
            for line in text.split("\n\n")
            if line.startswith("data: {")
        ]
    else:
        parts = [json.loads(text)["choices"][0]["message"]]
    return (
        "".join(part.get("content") or "" for part in parts),
        "".join(part.get("reasoning_content") or "" for part in parts),
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "the regular expression cannot be compiled"),
        ({"structured_outputs": {"json": {"type": "frob"}}}, "the schema cannot be compiled"),
        ({"structured_outputs": {"json": "{"}}, "the schema cannot be compiled"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "the grammar cannot be compiled"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "a grammar has 70000 characters, 65536 are the most"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs says not one thing that an answer may be"),
        ({"structured_outputs": {}}, "structured_outputs says not one thing that an answer may be"),
        ({"response_format": {"type": "json_schema"}}, "response_format of type 'json_schema' has no schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "the sampling parameters are out of range\n  min_tokens and ignore_eos cannot be kept where a grammar says when an answer ends"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(client: Client, more: dict[str, Any], message: str) -> None:
    response = chat(client, **more)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


HUGE = {
    "a multiple": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 9_999_991}}}},
    "two lengths": {"structured_outputs": {"grammar": "start: A\nA: /(.{9973})*/ & /(.{9967})*/"}},
    "patterns": {"structured_outputs": {"json": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 40)]}}},
    "a tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer", "multipleOf": 9_999_991}}, "required": ["x"]}}}], "tool_choice": "required"},
}  # fmt: skip


@pytest.mark.parametrize("case", few_of(HUGE))
def test_what_would_take_hours_to_compile_is_refused_and_holds_up_nobody_afterwards(
    engine: Engine, case: str
) -> None:
    client = Client(engine, template=ChatTemplate(FAMILIES["parameters"], SPECIAL))
    with limits():  # of this process, in which others are answered
        response = chat(client, **HUGE[case])
    assert response.status_code == 400
    assert "cannot be compiled\n  that takes more than 2 s" in response.json()["error"]["message"]
    assert (
        chat(client, structured_outputs={"choice": ["red"]}).json()["choices"][0]["message"]["content"]
        == "red"
    )


@pytest.mark.parametrize(
    "regex",
    [
        r"(\w{1,900}\s?){1,900}",
        "((x{0,1000}){0,1000}y){0,1000}",
        r"(a{1,5000}b{1,5000}){1,100}",
        "[^a]*a.{1000}b",
    ],
)
def test_a_short_expression_with_many_states_ends_in_time(client: Client, regex: str) -> None:
    with limits():
        response = chat(client, structured_outputs={"regex": regex}, temperature=1.0, seed=1, max_tokens=60)
    assert response.status_code == 200 or "the grammar cannot go on" in response.json()["error"]["message"]
