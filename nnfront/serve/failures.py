# SPDX-License-Identifier: Apache-2.0
"""Errors as clients of OpenAI's API read them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfront.errors import Busy, RunError


class Failure(Exception):
    """A request that is refused, or failed, with the status that says so."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """What is sent."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @staticmethod
    def of(error: RunError) -> Failure:
        """What an error of the engine's is to a client."""
        if isinstance(error, Busy):
            return Failure(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded")
        return Failure(400, str(error))


def check_model(served: Sequence[str], asked: str | None) -> None:
    """Raise Failure if a request asks for another model than those that are served."""
    if asked is not None and asked not in served:
        raise Failure(
            404,
            f"there is no model {asked!r}, this server has {', '.join(map(repr, served))}",
            param="model",
            code="model_not_found",
        )
