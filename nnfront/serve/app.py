# SPDX-License-Identifier: Apache-2.0
"""The server: `app(engine, name)` is an ASGI application, which uvicorn runs, other servers mount, and tests call without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nnfront.errors import LoadError
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.decisions import DecisionRequest, decide
from nnfront.serve.engine import Engine
from nnfront.serve.failures import Failure
from nnfront.serve.home import home_route
from nnfront.serve.http import MAX_BODY_BYTES, Log, Reply, application, model_routes, read_body
from nnfront.serve.metrics import EngineMetrics
from nnfront.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nnfront.serve.responses import ResponsesRequest, respond
from nnfront.serve.service import Service


def app(
    engine: Engine,
    name: str,
    *,
    template: ChatTemplate | None = None,
    keys: Sequence[str] = (),
    seconds: float | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    log: Log | None = None,
) -> ASGIApp:
    """Return the application that serves an engine's model under a name, and its adapters under theirs.

    `keys`: of which a request must have one as its bearer token; without any, none is asked for. `seconds`: the longest an answer may take. `log`: told of each request when it is over, as `Call.line` says.
    Raises LoadError for an adapter that has the model's name.
    """
    if name in engine.llm.adapters:
        raise LoadError(
            f"{name!r} is the name of the model and of an adapter", help="give one of them another name"
        )
    service = Service(engine, name, template, seconds)
    metrics = EngineMetrics(engine, name)

    async def health(_: Request) -> Response:
        return Response(status_code=200 if engine.is_alive else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def chat(request: Request) -> Response:
        asked = await read_body(ChatRequest, request, max_body_bytes)
        chunks = await asyncio.to_thread(service.chat, asked, request.state.call)
        return Reply(chunks, is_stream=bool(asked.stream))

    async def completions(request: Request) -> Response:
        asked = await read_body(CompletionRequest, request, max_body_bytes)
        chunks = await asyncio.to_thread(service.completion, asked, request.state.call)
        return Reply(chunks, is_stream=bool(asked.stream))

    async def responses(request: Request) -> Response:
        asked, call = await read_body(ResponsesRequest, request, max_body_bytes), request.state.call
        chunks = await asyncio.to_thread(lambda: service.chat(asked.chat(), call))
        return Reply(
            respond(service, asked, call.number, chunks), is_stream=bool(asked.stream), is_named=True
        )

    async def decisions(request: Request) -> Response:
        asked = await read_body(DecisionRequest, request, max_body_bytes)
        return Reply(decide(service, asked, request.state.call), is_stream=False)

    async def tokenize(request: Request) -> Response:
        asked = await read_body(TokenizeRequest, request, max_body_bytes)
        return JSONResponse(await asyncio.to_thread(service.tokenize, asked))

    async def detokenize(request: Request) -> Response:
        asked = await read_body(DetokenizeRequest, request, max_body_bytes)
        return JSONResponse(await asyncio.to_thread(service.detokenize, asked))

    async def embeddings(_: Request) -> Response:
        raise Failure(400, f"the model {name!r} continues texts, it makes no embeddings", param="model")

    routes = [
        home_route(name, is_chat=template is not None),
        Route("/health", health),
        Route("/metrics", show_metrics),
        *model_routes(name, engine.llm.adapters, max_model_len=engine.limits.max_model_len),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/decisions", decisions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    return application(routes, keys, log)
