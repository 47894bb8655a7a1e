# SPDX-License-Identifier: Apache-2.0
"""The log: a line for each request with its number, tokens and times, whatever becomes of it, and no text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from answering import Stop
from leaving import leave
from patience import HANGS_SECONDS
from serving import Client

from nnfront.serve.engine import Engine

Lines = list[dict[str, Any]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def client(engine: Engine, lines: Lines) -> Iterator[Client]:
    yield Client(engine, keys=["right"], log=lines.append)
    assert "zebra" not in json.dumps(lines)  # a word that is in what the tests send


KEY = {"authorization": "Bearer right"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a zebra crossed"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "zebra"}]}),
        ("responses", {"input": "zebra"}),
    ],
)
def test_a_line_has_the_number_the_route_tokens_and_times(
    client: Client, lines: Lines, path: str, body: dict[str, Any], stream: bool
) -> None:
    most = {"max_output_tokens" if path == "responses" else "max_tokens": 3}
    reply = client.post(path, {**body, **most, "stream": stream}, headers={**KEY, "x-request-id": "abc-1"})
    assert reply.is_success
    (line,) = lines
    shown = ("id", "method", "route", "status", "whole", "cached_tokens", "completion_tokens")
    assert [line[name] for name in shown] == ["abc-1", "POST", f"/v1/{path}", 200, True, 0, 3]
    assert line["prompt_tokens"] > 0
    assert 0 < line["first_byte_seconds"] <= line["seconds"] < 60
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    if path == "completions" and not stream:
        assert line["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]


def test_cached_tokens_are_counted_once_for_each_prompt(
    client: Client, lines: Lines, text: list[int]
) -> None:
    for _ in range(2):
        client.post("completions", {"prompt": text[:100], "max_tokens": 1, "n": 2}, headers=KEY)
    assert [line["prompt_tokens"] for line in lines] == [100, 100]
    assert lines[1]["cached_tokens"] == 96
    assert [line["completion_tokens"] for line in lines] == [2, 2]


def test_what_is_refused_has_a_line_too_and_addresses_are_not_repeated(client: Client, lines: Lines) -> None:
    client.post("completions", {"prompt": "zebra"})
    client.post("completions", content=b'{"zebra', headers=KEY)
    client.post("completions", {"zebra": 1}, headers=KEY)
    client.get("models/zebra", headers=KEY)
    client.get("/zebra?zebra=1", headers={**KEY, "x-request-id": "a zebra"})
    client.get("completions", headers=KEY)
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", None, 401),
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/completions", 400),
        ("GET", "/v1/models/{name:path}", 404),
        ("GET", None, 404),
        ("GET", "/v1/completions", 405),
    ]
    assert all(line["prompt_tokens"] == line["completion_tokens"] == 0 for line in lines)
    assert len({line["id"] for line in lines}) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_seen(engine: Engine, lines: Lines, stream: bool) -> None:
    body = {"prompt": "import os", "max_tokens": 240, "ignore_eos": True, "stream": stream}
    stop = Stop(engine, 20 * stream, lambda: bool(engine._cancelled))

    async def until(sent: asyncio.Queue[Any]) -> None:
        for _ in range(3 * stream):
            await sent.get()
        while not stop.is_there.is_set():
            await asyncio.sleep(0.001)

    app = Client(engine, log=lines.append).app
    asyncio.run(asyncio.wait_for(leave(app, "/v1/completions", body, until), HANGS_SECONDS))
    (line,) = lines
    assert line["whole"] is False
    assert line["status"] == (200 if stream else None)
    assert line["completion_tokens"] < 240


def test_a_server_that_fails_says_so_in_the_log(
    engine: Engine, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(engine, log=lines.append)
    monkeypatch.setattr(engine, "counts", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.get("/metrics")
    assert [(line["route"], line["status"]) for line in lines] == [("/metrics", 500)]
