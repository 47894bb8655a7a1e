# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: the same answers as a chat's, in the other form, read by a client that nobody here wrote."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from serving import Client
from templates import HERMES, SPECIAL, THINKING

from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine

DAYS = {"type": "integer", "minimum": 0, "maximum": 99}
FUNCTION = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": DAYS},
        "required": ["days"],
        "additionalProperties": False,
    },
}


def ask(client: Client, **more: Any) -> Any:
    async def work(http: httpx2.AsyncClient) -> Any:
        api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=http, max_retries=0)
        made = await api.responses.create(model="pylib", **more)
        return [event async for event in made] if more.get("stream") else made

    return client.run(work)


def chat(client: Client, messages: list[dict[str, str]], tokens: int) -> str:
    reply = client.post("chat/completions", {"messages": messages, "max_tokens": tokens}).json()
    return str(reply["choices"][0]["message"]["content"])


def test_a_response_is_a_chats_answer(client: Client) -> None:
    found = ask(client, input="import os", instructions="Be brief.", max_output_tokens=7)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "import os"}]
    assert found.output_text == chat(client, messages, 7)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 7


def test_the_events_of_a_stream_build_the_response(client: Client) -> None:
    events = ask(client, input="import os", max_output_tokens=7, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert (
        events[-1].response.output_text == text == chat(client, [{"role": "user", "content": "import os"}], 7)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_and_their_results_go_back_as_items(engine: Engine, stream: bool) -> None:
    client = Client(engine, template=ChatTemplate(HERMES, SPECIAL))
    asked = {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
        "temperature": 1.0,
    }
    found = ask(client, input="Weather?", stream=stream, **asked)
    (item,) = found[-1].response.output if stream else found.output
    assert (item.type, item.name) == ("function_call", "weather")
    arguments = json.loads(item.arguments)
    assert set(arguments) == {"days"}
    back: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        item.model_dump(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"},
    ]
    assert ask(client, input=back, max_output_tokens=4).output_text


def test_reasoning_is_an_item_of_its_own(engine: Engine) -> None:
    client = Client(engine, template=ChatTemplate(THINKING, SPECIAL))
    found = ask(client, input="import os", max_output_tokens=5)
    assert [item.type for item in found.output] == ["reasoning"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "the input is empty"),
        ({"input": [{"type": "computer_call"}]}, "the input has an item of type 'computer_call', which this server does not read"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "a tool has the type 'web_search', this server has functions of the client's only"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: Input should be None"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a message has a part of type 'input_image', this model reads text only"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_be_made_of_is_said(
    client: Client, body: dict[str, Any], message: str
) -> None:
    response = client.post("responses", body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
