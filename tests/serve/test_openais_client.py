# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client, which nobody here wrote, over a socket: whole replies and streams, forms and tools, what is wrong, from one thread and from many tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
import uvicorn
from openai._constants import DEFAULT_CONNECTION_LIMITS
from pydantic import BaseModel
from serving import FOLDER, LIMITS, Client, served
from templates import HERMES, SPECIAL

import nnfront as nn
from nnfront.cli import main
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine

HELLO: Any = [{"role": "user", "content": "def main():"}]
MORE: dict[str, Any] = {"model": "pylib", "max_tokens": 90, "temperature": 1.0, "seed": 4}


class Weather(BaseModel):
    """What an answer says, and what a tool is called with."""

    place: Literal["Rome", "Oslo"]
    is_dry: bool


@pytest.fixture(scope="module")
def address(llm: nn.LLM) -> Iterator[str]:
    limits = replace(LIMITS, max_model_len=llm.context, pages=320)  # tools take room
    template = ChatTemplate(HERMES, SPECIAL)
    with Engine(llm, limits) as engine, served(Client(engine, template=template, keys=["k"])) as url:
        yield f"{url}v1"


@pytest.fixture
def api(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="k", max_retries=0) as api:
        yield api


def test_a_text_is_the_same_whole_and_in_pieces_and_that_of_generate(api: openai.OpenAI, llm: nn.LLM) -> None:
    whole = api.completions.create(model="pylib", prompt="import os", max_tokens=9)
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(api.completions.create(model="pylib", prompt="import os", max_tokens=9, **asked))
    assert whole.choices[0].text == llm.generate("import os", max_new_tokens=9)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_an_answer_in_a_form_is_an_object_of_its_class(api: openai.OpenAI) -> None:
    reply = api.chat.completions.parse(messages=HELLO, response_format=Weather, **MORE)
    assert isinstance(reply.choices[0].message.parsed, Weather)
    with api.chat.completions.stream(messages=HELLO, response_format=Weather, **MORE) as stream:
        found = stream.get_final_completion().choices[0].message.parsed
    assert found == reply.choices[0].message.parsed


def test_a_call_of_a_tool_is_parsed_and_its_result_goes_back(api: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    asked: dict[str, Any] = {**MORE, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    whole = api.chat.completions.parse(messages=HELLO, **asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    with api.chat.completions.stream(messages=HELLO, **asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message
    (call,) = final.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert [event.arguments for event in done] == [call.function.arguments]
    assert whole.message.tool_calls
    assert whole.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 7})}
    history = [*HELLO, whole.message.model_dump(exclude_none=True), result]
    reply = api.chat.completions.create(messages=history, model="pylib", max_tokens=3)
    assert reply.choices[0].finish_reason == "length"


def test_tasks_that_ask_at_once_get_what_each_gets_alone(address: str, api: openai.OpenAI) -> None:
    prompts = [f"def f{i}(" for i in range(8)]

    async def at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="k", max_retries=0) as api:

            async def one(prompt: str) -> str:
                stream = await api.completions.create(prompt=prompt, stream=True, **MORE)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    alone = [api.completions.create(prompt=prompt, **MORE).choices[0].text for prompt in prompts]
    assert asyncio.run(at_once()) == alone
    assert len(set(alone)) > 1


def test_what_is_wrong_has_a_class_of_its_own(address: str, api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        api.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="the request does not fit") as error:
        api.completions.create(model="pylib", prompt=[5] * 3000)
    assert error.value.type == "invalid_request_error"
    with (
        openai.OpenAI(base_url=address, api_key="another", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"),
    ):
        stranger.models.list()


def test_a_connection_that_waits_is_closed_by_the_client_and_not_under_its_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **more: how.update(more))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["serve", str(FOLDER)]) == 0
    assert DEFAULT_CONNECTION_LIMITS.keepalive_expiry is not None
    assert how["timeout_keep_alive"] > 2 * DEFAULT_CONNECTION_LIMITS.keepalive_expiry
