# SPDX-License-Identifier: Apache-2.0
"""A client that leaves before its answer's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp


async def leave(
    app: ASGIApp, path: str, body: Any, until: Callable[[asyncio.Queue[Any]], Awaitable[None]]
) -> None:
    """Ask, go away when `until`, which is given what comes of the reply, is over, and wait until the server has noticed."""
    sent, asked = asyncio.Queue[Any](), asyncio.Queue[Any]()
    asked.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
    scope = {
        "type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
        "http_version": "1.1", "scheme": "http", "server": ("server", 80), "root_path": "",
    }  # fmt: skip
    working = asyncio.create_task(app(scope, asked.get, sent.put))  # type: ignore[arg-type]
    await until(sent)
    asked.put_nowait({"type": "http.disconnect"})
    await working
