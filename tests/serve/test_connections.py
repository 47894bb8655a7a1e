# SPDX-License-Identifier: Apache-2.0
"""Connections that send nothing, or little by little: they are closed in time, and keep nobody else out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest
from patience import HANGS_SECONDS
from serving import Client, served
from starlette.types import Message

from nnfront.serve import http
from nnfront.serve.connections import protocol

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
BODY = {"prompt": "import os", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens connections that have sent some bytes, and closes them at last."""
    with ExitStack() as stack:

        def connect(url: str, data: bytes) -> socket.socket:
            host, port = url.removeprefix("http://").rstrip("/").split(":")
            found = stack.enter_context(socket.create_connection((host, int(port)), timeout=HANGS_SECONDS))
            found.sendall(data)
            return found

        yield connect


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    with suppress(ConnectionError):  # where it closes before it has read all
        while part := connection.recv(1 << 16):
            found += part
    return found


def test_half_a_request_from_many_keeps_out_nobody(client: Client, opened: Any) -> None:
    with served(client, http=protocol(4)) as url:
        half = [opened(url, data) for data in [b"", b"G", HEAD, HEAD] * 5]
        assert httpx2.post(f"{url}v1/completions", json=BODY, timeout=HANGS_SECONDS).status_code == 200
        for connection in half[:16]:  # those that came first had to go
            assert rest(connection) == b""
        half[-1].sendall(b"connection: close\r\n\r\n")
        assert b" 200 OK" in rest(half[-1])


def test_an_answer_is_not_cut_off_for_others_and_who_finds_all_places_taken_is_closed(
    client: Client, opened: Any
) -> None:
    with served(client, http=protocol(2)) as url, httpx2.Client(timeout=HANGS_SECONDS) as api:
        body = {**BODY, "max_tokens": 200, "stream": True}
        with api.stream("POST", f"{url}v1/completions", json=body) as one:
            events = one.iter_lines()
            next(events)
            for _ in range(3):
                opened(url, HEAD)
            with (
                httpx2.Client(timeout=HANGS_SECONDS) as other,
                other.stream("POST", f"{url}v1/completions", json=body) as two,
            ):
                assert rest(opened(url, b"")) == b""
                assert [line for line in two.iter_lines() if line][-1] == "data: [DONE]"
            assert [line for line in events if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("data", [b"", b"G", HEAD])
def test_a_head_that_does_not_come_is_not_waited_for(client: Client, opened: Any, data: bytes) -> None:
    with served(client, http=protocol(9, seconds=0.05)) as url:
        assert rest(opened(url, data)) == b""


@pytest.mark.parametrize("data", [HEAD + b"\r\n", HEAD + b"\r\n" + HEAD])
def test_a_connection_behind_a_reply_is_closed_though_half_a_request_came_with_the_first(
    client: Client, opened: Any, data: bytes
) -> None:
    with served(client, http=protocol(9), timeout_keep_alive=0.05) as url:
        assert rest(opened(url, data)).count(b" 200 OK") == 1


def test_a_body_that_does_not_come_is_told_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.01)

    async def ask() -> list[Message]:
        sent: list[Message] = []
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Message:
            return next(parts, None) or await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        await client.app(scope, receive, send)
        return sent

    start, body = asyncio.run(ask())
    assert start["status"] == 408
    assert b"the request took longer than 0.01 s to come" in body["body"]
