# SPDX-License-Identifier: Apache-2.0
"""The application as clients see it, without a socket: its shapes, its errors, and what it does when a client leaves."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Any

import httpx2
import openai
import pytest
from answering import Stop
from leaving import leave
from patience import HANGS_SECONDS
from serving import Client
from starlette.applications import Starlette
from starlette.routing import Mount

import nnfront as nn
from nnfront.engine.schedule import Limits
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine

HELLO = [{"role": "user", "content": "def main():"}]


def events(response: httpx2.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask_openai(client: Client, **more: Any) -> Any:
    async def work(http: httpx2.AsyncClient) -> Any:
        api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=http, max_retries=0)
        made = await api.chat.completions.create(model="pylib", messages=HELLO, **more)  # type: ignore[arg-type]
        return [chunk async for chunk in made] if more.get("stream") else made

    return client.run(work)


def test_a_completion_is_what_generate_gives(client: Client, llm: nn.LLM) -> None:
    reply = client.post("completions", {"prompt": "def main():\n", "max_tokens": 12}).json()
    assert reply["choices"][0]["text"] == llm.generate("def main():\n", max_new_tokens=12)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_has_the_text_of_the_whole_reply(client: Client) -> None:
    body = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0.9, "seed": 5}
    whole = client.post("completions", body).json()["choices"][0]["text"]
    chunks = events(client.post("completions", {**body, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert len(chunks) > 5


def test_a_chat_stream_says_the_role_once_and_the_usage_last(client: Client) -> None:
    chunks = events(
        client.post(
            "chat/completions",
            {
                "messages": HELLO,
                "max_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_openais_client_reads_whole_replies_and_streams(client: Client) -> None:
    whole = ask_openai(client, max_tokens=8, n=2, temperature=1.0, seed=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    chunks = ask_openai(client, max_tokens=8, temperature=1.0, seed=3, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_the_second_request_with_a_prompt_reports_cached_tokens(client: Client, text: list[int]) -> None:
    body = {"prompt": text[:100], "max_tokens": 1}
    counts = [
        client.post("completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts == [0, 96]
    salted = client.post("completions", {**body, "cache_salt": "mine"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_several_prompts_and_answers_are_numbered_in_order(client: Client) -> None:
    reply = client.post(
        "completions", {"prompt": ["import os", "def f"], "n": 2, "max_tokens": 3, "echo": True}
    ).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:6] for choice in reply["choices"]] == ["import", "import", "def fl", "def fl"]
    assert reply["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_ends_the_text(client: Client, llm: nn.LLM, includes: bool) -> None:
    text = llm.generate("def main():\n", max_new_tokens=12)
    stop = text[8:14]
    body = {
        "prompt": "def main():\n",
        "max_tokens": 12,
        "stop": stop,
        "include_stop_str_in_output": includes,
    }
    choice = client.post("completions", body).json()["choices"][0]
    before = text[: text.index(stop)]
    assert choice["text"] == before + (stop if includes else "")
    assert choice["finish_reason"] == "stop"
    chunks = events(client.post("completions", {**body, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_a_stop_token_ends_the_text(client: Client, llm: nn.LLM) -> None:
    token = llm.tokenizer.encode(" module")[0]
    choice = client.post(
        "completions", {"prompt": "def main():\n", "max_tokens": 12, "stop_token_ids": [token]}
    ).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "module" not in choice["text"]


REFUSED = [
    ({}, 400, "prompt", "the field 'prompt' is missing"),
    ({"prompt": "x", "colour": 1}, 400, "colour", "there is no field 'colour'"),
    (
        {"prompt": "x", "stream_options": {"colour": 1}},
        400,
        "stream_options",
        "there is no field 'colour' in 'stream_options'",
    ),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "temperature: Input should be a valid number"),
    ({"prompt": "x", "n": 0}, 400, "n", "n: Input should be greater than or equal to 1"),
    ({"prompt": "x", "stop": [""]}, 400, "stop", "'stop' holds an empty text"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "logit_bias has 'a' for a token, expected its number"),
    ({"prompt": "x", "model": "y"}, 404, "model", "there is no model 'y', this server has 'pylib'"),
    ({"prompt": "x", "temperature": -1}, 400, None, "the sampling parameters are out of range\n  temperature is -1.0, expected a number >= 0"),
    ({"prompt": [5, 9999]}, 400, None, "the prompt holds a token outside the vocabulary of 4096"),
    ({"prompt": ""}, 400, None, "the prompt is empty\n  help: give at least one token"),
    ({"prompt": []}, 400, "prompt", "the prompt is empty"),
    ({"prompt": [1] * 250}, 400, None, "the request does not fit\n  got 250 tokens and 16 new ones, there is room for 256\n  help: shorten the prompt, or ask for fewer new tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param", "message"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_before_anything_is_sent(
    client: Client, body: dict[str, Any], status: int, param: str | None, message: str, stream: bool
) -> None:
    response = client.post("completions", {**body, "stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] == message
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "data", [b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": ' + b"1" * 500 + b"}"]
)
def test_what_is_no_json_is_refused(client: Client, data: bytes) -> None:
    response = client.post("completions", content=data)
    assert response.status_code == 400
    assert "error" in response.json()


def test_a_request_that_is_too_large_is_refused(engine: Engine) -> None:
    response = Client(engine, max_body_bytes=100).post("completions", {"prompt": "x" * 200})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_model_without_a_template_takes_no_messages(engine: Engine) -> None:
    response = Client(engine, template=None).post("chat/completions", {"messages": HELLO})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("this model has no chat template")


def test_a_template_that_refuses_is_an_error_of_the_request(engine: Engine) -> None:
    template = ChatTemplate("{{ raise_exception('no system messages here') }}")
    response = Client(engine, template=template).post("chat/completions", {"messages": HELLO})
    assert response.status_code == 400
    assert "no system messages here" in response.json()["error"]["message"]


def test_a_key_is_asked_for_everywhere_but_health(engine: Engine) -> None:
    client = Client(engine, keys=["right", "other"])
    statuses = [
        client.get("models", headers={} if key is None else {"authorization": key}).status_code
        for key in (None, "Bearer wrong", "right", "Bearer right", "bearer other")
    ]
    assert statuses == [401, 401, 401, 200, 200]
    assert client.get("/health").status_code == client.get("/").status_code == 200
    assert client.get("models").json()["error"]["code"] == "invalid_api_key"


def test_health_needs_no_key_under_a_path_of_the_servers_around_it_either(engine: Engine) -> None:
    client = Client(engine, keys=["right"])
    client.app = Starlette(routes=[Mount("/some/path", client.app)])
    assert client.get("/some/path/health").status_code == 200
    assert client.get("/some/path/v1/models").status_code == 401


def test_a_request_has_the_number_that_it_came_with(client: Client) -> None:
    assert client.get("models", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(client.get("models", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 24
    reply = client.post("completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "abc-2"})
    assert reply.json()["id"] == "cmpl-abc-2"


def test_models_addresses_and_methods(client: Client) -> None:
    assert [model["id"] for model in client.get("models").json()["data"]] == ["pylib"]
    assert client.get("models/pylib").json()["max_model_len"] == 256
    assert client.get("models/other").status_code == 404
    assert (
        client.get("nothing").json()["error"]["message"]
        == "GET /v1/nothing: this is no address of this server"
    )
    assert client.get("completions").status_code == 405


def test_metrics_count_requests_and_tokens(client: Client) -> None:
    client.post("completions", {"prompt": "import os", "max_tokens": 7})
    text = client.get("/metrics").text
    assert 'nnfront:generation_tokens_total{model_name="pylib"} 7.0' in text
    assert 'nnfront:request_success_total{finished_reason="length",model_name="pylib"} 1.0' in text
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    for name in ("time_to_first_token", "e2e_request_latency", *parts):
        assert f'nnfront:{name}_seconds_count{{model_name="pylib"}} 1.0' in text
    sums = {name: float(value) for name, value in re.findall(r"nnfront:(\w+)_seconds_sum\{.*?\} (\S+)", text)}
    assert sum(sums[name] for name in parts) == pytest.approx(sums["e2e_request_latency"])


def test_an_answer_that_a_stop_string_ends_counts_as_stopped(engine: Engine, client: Client) -> None:
    body = {"prompt": "import os", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    said = client.post("completions", {**body, "max_tokens": 8}).json()["choices"][0]["text"]
    Stop(engine, 12, lambda: bool(engine._cancelled))  # it goes no further before it hears of the string
    reply = client.post("completions", {**body, "stop": said[2:6]}).json()["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == (said[:2], "stop")
    engine.close(drain=True)
    text = client.get("/metrics").text
    for reason in ("length", "stop"):
        assert f'nnfront:request_success_total{{finished_reason="{reason}",model_name="pylib"}} 1.0' in text
    assert "cancelled" not in text
    assert 'nnfront:request_decode_time_seconds_count{model_name="pylib"} 2.0' in text


def test_a_prompt_of_several_answers_is_computed_once(
    engine: Engine, client: Client, text: list[int]
) -> None:
    client.post("completions", {"prompt": text[:65], "n": 4, "max_tokens": 1})
    assert engine.stats.step_tokens.sum == 65 + 3


def test_too_many_requests_are_told_to_come_again(llm: nn.LLM) -> None:
    limits = Limits(max_model_len=256, pages=32, max_num_seqs=1, max_queued=1, page_size=8, chunk=32)
    with Engine(llm, limits) as engine:
        has_refused = threading.Event()
        Stop(engine, 0, has_refused.is_set)
        body = {"prompt": "import os", "max_tokens": 60, "ignore_eos": True}

        async def work(http: httpx2.AsyncClient) -> list[httpx2.Response]:
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(6)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            has_refused.set()
            return await asyncio.gather(*tasks)

        responses = Client(engine).run(work)
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_back_what_its_request_held(
    engine: Engine, client: Client, stream: bool
) -> None:
    body = {"prompt": "import os", "max_tokens": 240, "ignore_eos": True, "stream": stream}
    stop = Stop(engine, 20 * stream, lambda: bool(engine._cancelled))

    async def until(sent: asyncio.Queue[Any]) -> None:
        for _ in range(3 * stream):
            await sent.get()
        while not stop.is_there.is_set():
            await asyncio.sleep(0.001)

    async def work() -> None:
        await leave(client.app, "/v1/completions", body, until)
        while not engine.stats.ends["cancelled"]:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(work(), HANGS_SECONDS))
    assert engine.counts()["pages_used"] == 0


def test_an_answer_that_takes_too_long_is_an_error(engine: Engine) -> None:
    client = Client(engine, seconds=0.01)
    Stop(engine, 3, lambda: not time.sleep(0.02))
    body = {"prompt": "import os", "max_tokens": 240, "ignore_eos": True}
    response = client.post("completions", body)
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "the answer took longer than the server allows"


def test_the_page_is_of_the_server_alone(engine: Engine) -> None:
    page = Client(engine, template=None).get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert 'data-api="completions"' in page.text
    assert 'data-api="chat"' in Client(engine).get("/").text
    assert "{{" not in page.text
    assert "//" not in page.text.replace("// The data", "")  # no other address
