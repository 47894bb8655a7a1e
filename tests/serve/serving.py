# SPDX-License-Identifier: Apache-2.0
"""What tests of the server share: limits that are soon reached, a template, and calls of an application without a socket and with one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import uvicorn
from patience import HANGS_SECONDS
from starlette.types import ASGIApp

import nnfront as nn
from nnfront.engine.schedule import Limits
from nnfront.serve.app import app
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine

FOLDER = Path(nn.__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
LIMITS = Limits(max_model_len=256, pages=160, max_num_seqs=6, page_size=8, chunk=32, step_tokens=64)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
Result = TypeVar("Result")


class Client:
    """Calls of an application without a socket."""

    def __init__(self, engine: Engine, **more: Any) -> None:
        more.setdefault("template", ChatTemplate(TEMPLATE))
        self.app = app(engine, "pylib", **more)

    @classmethod
    def of(cls, application: ASGIApp) -> Client:
        """Calls of an application that is made already."""
        client = cls.__new__(cls)
        client.app = application
        return client

    def run(self, work: Callable[[httpx2.AsyncClient], Awaitable[Result]]) -> Result:
        async def main() -> Result:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
                return await work(http)

        return asyncio.run(main())

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return self.run(lambda http: http.get(_whole(path), **more))

    def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.run(
            lambda http: http.post(_whole(path), **({"json": body} if body is not None else {}), **more)
        )


def _whole(path: str) -> str:
    return path if path.startswith("/") else f"/v1/{path}"


@contextmanager
def served(client: Client, **more: Any) -> Iterator[str]:
    """The application on a socket, at this address; `more` are settings of uvicorn's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(client.app, log_level="warning", **more))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(HANGS_SECONDS)
        assert not thread.is_alive()
