# SPDX-License-Identifier: Apache-2.0
"""What clients have come to expect of servers of this API, whatever engine is behind it: each claim is one that llama.cpp's server is tested by, too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Client
from templates import HERMES, PARAMETERS, SPECIAL, TOOLS

from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine

HELLO = [{"role": "user", "content": "def main():"}]
PROMPT = "def read_file(path"


def text(client: Client, **more: Any) -> str:
    reply = client.post("completions", {"prompt": PROMPT, "max_tokens": 24, **more}).json()
    return str(reply["choices"][0]["text"])


def events(body: str) -> list[Any]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("text", "messages: Input should be a valid list"),
        ([], "messages: List should have at least 1 item after validation, not 0"),
        ([5], "messages: Input should be a valid dictionary"),
        ([{}], "message 0 has no role"),
        ([{"role": 5, "content": "a"}], "message 0 has no role"),
        ([*HELLO, {"content": "a"}], "message 1 has no role"),
        ([{"role": "user", "content": 5}], "message 0 has a content of type 'int', expected a text or a list of parts"),
        ([{"role": "user", "content": {"type": "text"}}], "message 0 has a content of type 'dict', expected a text or a list of parts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["chat/completions", "/tokenize"])
def test_messages_that_are_none_are_refused(client: Client, messages: Any, message: str, path: str) -> None:
    response = client.post(path, {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }


def test_tokens_are_a_prompt_as_their_text_is_alone_and_several_at_a_time(client: Client) -> None:
    tokens = client.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    alone = text(client)
    assert text(client, prompt=tokens) == alone
    reply = client.post("completions", {"prompt": [tokens, tokens], "max_tokens": 24}).json()
    assert [choice["text"] for choice in reply["choices"]] == [alone, alone]


def test_a_seed_repeats_a_text_and_another_gives_another(client: Client) -> None:
    drawn = [text(client, temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_tokens_with_a_low_bias_do_not_come(client: Client) -> None:
    tokens = client.post("/tokenize", {"prompt": text(client)}).json()["tokens"]
    reply = client.post(
        "completions",
        {
            "prompt": PROMPT,
            "max_tokens": 24,
            "logprobs": 0,
            "logit_bias": {str(token): -100 for token in tokens},
        },
    )
    strings = client.post("/tokenize", {"prompt": text(client), "return_token_strs": True}).json()[
        "token_strs"
    ]
    assert not set(reply.json()["choices"][0]["logprobs"]["tokens"]) & set(strings)


def test_log_probabilities_of_a_stream_are_those_of_its_text_token_by_token(client: Client) -> None:
    asked = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
    whole = client.post("chat/completions", asked).json()["choices"][0]
    chunks = [
        chunk["choices"][0]
        for chunk in events(client.post("chat/completions", {**asked, "stream": True}).text)
    ]
    entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", [])]
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    assert entries == whole["logprobs"]["content"]
    for entry in entries:
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])


def test_every_token_of_a_text_has_a_string_and_all_of_them_give_it_back(client: Client) -> None:
    written = "a text with 媽 and 🤗"
    found = client.post("/tokenize", {"prompt": written, "return_token_strs": True}).json()
    assert all(found["token_strs"])
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": written}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [HERMES, PARAMETERS])
@pytest.mark.parametrize("more", [{"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {}])
def test_nothing_is_called_where_there_are_no_tools_to_call(
    engine: Engine, template: str, stream: bool, more: dict[str, Any]
) -> None:
    client = Client(engine, template=ChatTemplate(template, SPECIAL))
    # What looks like a call is the text that was asked for.
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    asked = {"messages": HELLO, "max_tokens": 99, "structured_outputs": {"choice": [call]}, "stream": stream}
    body = client.post("chat/completions", {**asked, **more}).text
    parts = (
        [chunk["choices"][0]["delta"] for chunk in events(body)]
        if stream
        else [json.loads(body)["choices"][0]["message"]]
    )
    assert "".join(part.get("content") or "" for part in parts) == call
    assert not any("tool_calls" in part for part in parts)


@pytest.mark.parametrize(
    "choice", [{"type": "function"}, {"type": "function", "function": 3}, {"function": {"name": []}}]
)
def test_a_tool_that_is_chosen_by_no_name_is_refused(client: Client, choice: Any) -> None:
    response = client.post("chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("which is none of the tools")


def test_events_of_a_response_tell_of_one_response_and_one_item(client: Client) -> None:
    found = events(
        client.post("responses", {"input": "import os", "max_output_tokens": 7, "stream": True}).text
    )
    responses = {event["response"]["id"] for event in found if "response" in event}
    items = {event["item_id"] for event in found if "item_id" in event}
    items |= {event["item"]["id"] for event in found if "item" in event}
    assert len(responses) == len(items) == 1
    assert responses.pop().startswith("resp_")
    assert found[-1]["response"]["output"][0]["id"] == items.pop()


@pytest.mark.parametrize(
    "form",
    [{"type": "json_schema", "name": "t", "schema": {"const": "foo"}}, {"type": "json_schema", "name": "t"}],
)
def test_a_response_keeps_to_its_form(client: Client, form: dict[str, Any]) -> None:
    response = client.post("responses", {"input": "a", "max_output_tokens": 20, "text": {"format": form}})
    if "schema" not in form:
        assert response.status_code == 400
    else:
        assert response.json()["output"][0]["content"][0]["text"] == '"foo"'
