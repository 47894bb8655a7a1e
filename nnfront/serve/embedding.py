# SPDX-License-Identifier: Apache-2.0
"""The server of an encoder: `embedding_app(embedder, name)` is an ASGI application that makes vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nnfront.errors import Busy
from nnfront.llm.embedder import Embedder, batches
from nnfront.serve.failures import Failure, check_model
from nnfront.serve.http import MAX_BODY_BYTES, Log, Reply, application, model_routes, read_body
from nnfront.serve.log import Call
from nnfront.serve.protocol import Checked
from nnfront.serve.service import Chunks

MOST_TEXTS = 2048
"""Of a request, as in OpenAI's API."""
_OF_LANGUAGE_MODELS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/decisions")


class EmbeddingRequest(Checked):
    """Texts, or their tokens, whose vectors are asked for."""

    model: str | None = None
    input: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Literal[None] = None  # vectors are as the model makes them
    user: str | None = None


class EmbeddingService:
    """An encoder that is served. One batch is computed at a time, those of several requests in turn; `max_queued`: requests that there may be."""

    def __init__(self, embedder: Embedder, name: str, max_queued: int) -> None:
        self.embedder, self.name, self.max_queued = embedder, name, max_queued
        self.running = 0
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="nnfront-embedder")

    async def embed(self, request: EmbeddingRequest, call: Call) -> Chunks:
        """Yield the reply to a request; whoever leaves before ends it between two batches. Raises Failure for another model, RunError for texts that do not fit and where too many requests wait."""
        check_model([self.name], request.model)
        if self.running == self.max_queued:
            raise Busy(
                f"{self.running} requests are being answered, no more are taken",
                help="ask again later, or serve with a larger --max-queued",
            )
        self.running += 1
        try:
            rows = await asyncio.to_thread(self._rows, request.input)
            call.prompts = [len(row) for row in rows]
            vectors: dict[int, torch.Tensor] = {}
            for batch in batches(call.prompts):
                work = partial(self.embedder.vectors, [rows[i] for i in batch])
                found = await asyncio.get_running_loop().run_in_executor(self._computing, work)
                vectors.update(zip(batch, found, strict=True))
        finally:
            self.running -= 1
        written = _written if request.encoding_format == "base64" else torch.Tensor.tolist
        tokens = sum(call.prompts)
        yield {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": written(vectors[i])}
                for i in range(len(rows))
            ],
            "model": self.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _rows(self, given: str | Sequence[int | str | list[int]]) -> list[list[int]]:
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        return [self.embedder.tokens_of(text) for text in texts]  # type: ignore[arg-type]


def embedding_app(
    embedder: Embedder,
    name: str,
    *,
    keys: Sequence[str] = (),
    max_queued: int = 256,
    max_body_bytes: int = MAX_BODY_BYTES,
    log: Log | None = None,
) -> ASGIApp:
    """Return the application that serves an encoder under a name; `keys` and `log` as for `app`."""
    service = EmbeddingService(embedder, name, max_queued)

    async def health(_: Request) -> Response:
        return Response()

    async def embeddings(request: Request) -> Response:
        asked = await read_body(EmbeddingRequest, request, max_body_bytes)
        return Reply(service.embed(asked, request.state.call), is_stream=False)

    async def no_text(_: Request) -> Response:
        raise Failure(400, f"the model {name!r} makes embeddings, it continues no texts", param="model")

    return application(
        [
            Route("/health", health),
            *model_routes(name, max_model_len=embedder.context),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            *(Route(path, no_text, methods=["POST"]) for path in _OF_LANGUAGE_MODELS),
        ],
        keys,
        log,
    )


def _written(vector: torch.Tensor) -> str:
    """A vector's numbers, float32 with the lowest byte first, in base64."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
