# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: a conversation with the model, and how busy the server is. It needs nothing from elsewhere."""

from __future__ import annotations

import html
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

_HEADERS = {
    # What the page is made of is in it, and it speaks to this server alone.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; form-action 'none';"
    " base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def home_route(name: str, *, is_chat: bool) -> Route:
    """The address of the page of the model `name`, which takes messages if `is_chat`, else texts to be continued."""
    parts = {"name": html.escape(name), "api": "chat" if is_chat else "completions"}
    source = (files("nnfront.serve") / "page" / "index.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], source)

    async def home(_: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    return Route("/", home)
