# SPDX-License-Identifier: Apache-2.0
"""What all that is served goes through, whatever the model: keys, numbers of requests, bodies read within limits, replies and streams, errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nnfront.errors import RunError
from nnfront.files import parse_json
from nnfront.serve.answers import AnswerFailed
from nnfront.serve.failures import Failure, check_model
from nnfront.serve.log import Call
from nnfront.serve.protocol import read
from nnfront.serve.service import Chunks

MAX_BODY_BYTES = 8 << 20
"""Of a request: the text of a million tokens."""
BODY_SECONDS = 120.0
"""For a request's body to come."""
Asked = TypeVar("Asked", bound=BaseModel)
Log = Callable[[dict[str, Any]], None]
_OPEN = ("/", "/health")
"""Addresses that need no key: a browser asks for a page without one, and the page has nothing of anybody's in it."""
_REQUEST_ID = re.compile(r"[\w.-]{1,128}")

_NO_KEY = Failure(
    401, "the key is missing or wrong, expected 'Authorization: Bearer KEY'", code="invalid_api_key"
)


def application(routes: Sequence[Route], keys: Sequence[str] = (), log: Log | None = None) -> ASGIApp:
    """Return the application that has these addresses.

    `keys`: of which a request must have one as its bearer token, if there are any. `log`: told of each request when it is over, as `Call.line` says.
    """
    handlers = {Failure: _failed, RunError: _failed, 404: _not_found, 405: _not_found, Exception: _broken}
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), keys, log)


def model_routes(name: str, adapters: Sequence[str] = (), **more: Any) -> list[Route]:
    """The addresses that say which model there is, under its name, and which adapters of it, under theirs."""
    like = {"object": "model", "created": int(time.time()), "owned_by": "nnfront", **more}
    served = {name: {"id": name, **like}}
    served |= {adapter: {"id": adapter, **like, "parent": name} for adapter in adapters}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*served.values()]})

    async def one_model(request: Request) -> Response:
        asked = request.path_params["name"]
        check_model([*served], asked)
        return JSONResponse(served[asked])

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]


class _Guard:
    """What every request goes through: a number for it, the key, and a line of the log."""

    def __init__(self, inner: ASGIApp, keys: Sequence[str], log: Log | None) -> None:
        self._inner = inner
        self._log = log
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        number = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        call = scope.setdefault("state", {})["call"] = Call(number, scope["method"])

        async def send_numbered(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", number.encode())],
                }
            call.sent(message)
            await send(message)

        try:
            if self._keys and not _is_open(scope) and not self._knows(headers):
                await response(_NO_KEY)(scope, receive, send_numbered)
            else:
                await self._inner(scope, receive, send_numbered)
        finally:
            if self._log is not None:
                self._log(call.line(getattr(scope.get("route"), "path", None)))

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All of them are compared, so that the time tells nothing.
        same = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(same)


def _is_open(scope: Scope) -> bool:
    """Whether an address needs no key, whatever this is mounted under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in _OPEN


class Reply(Response):
    """A whole reply, or chunks as server-sent events; given up when the client has gone.

    What is wrong before the first token still has a status of its own.
    """

    def __init__(self, chunks: Chunks, *, is_stream: bool, is_named: bool = False) -> None:
        super().__init__()
        self._is_named = is_named  # events have their type as a name, and no [DONE] behind them
        self._chunks = chunks
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except RunError as error:
                await response(_failure(error))(scope, receive, send)
                return
            if not self._is_stream:
                await JSONResponse(first)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await _send_part(send, _event(first, self._is_named))
            try:
                async for chunk in chunks:
                    await _send_part(send, _event(chunk, self._is_named))
            except RunError as error:
                await _send_part(send, _event(_failure(error).body(), False))
            if not self._is_named:
                await _send_part(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await some work, and cancel it if the client goes away meanwhile."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled() and (error := working.exception()) is not None:
        raise error


async def read_body(kind: type[Asked], request: Request, most: int) -> Asked:
    """What a request's body says. Raises Failure for one that is too large or too slow, no JSON, or no request of this kind."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise Failure(413, f"the request has more than {most} bytes", code="request_too_large")
    except TimeoutError:
        raise Failure(408, f"the request took longer than {BODY_SECONDS:g} s to come") from None
    return await asyncio.to_thread(_understood, kind, bytes(data))  # a large one takes its time


def _understood(kind: type[Asked], data: bytes) -> Asked:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise Failure(400, f"the request is no JSON: {error}") from None
    return read(kind, found)


def _event(data: dict[str, Any], is_named: bool) -> bytes:
    name = f"event: {data['type']}\n".encode() if is_named else b""
    return name + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, AnswerFailed):
        return Failure({"cancelled": 503, "deadline": 504}.get(error.reason, 500), str(error))
    assert isinstance(error, RunError)
    return Failure.of(error)


def response(failure: Failure) -> Response:
    headers = {"retry-after": "1"} if failure.status == 429 else None
    return JSONResponse(failure.body(), failure.status, headers)


async def _failed(_: Request, error: Exception) -> Response:
    return response(_failure(error))


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "takes no such method" if status == 405 else "is no address of this server"
    return response(Failure(status, f"{request.method} {request.url.path}: this {what}"))


async def _broken(_: Request, error: Exception) -> Response:
    return response(Failure(500, f"the server failed: {type(error).__name__}"))
