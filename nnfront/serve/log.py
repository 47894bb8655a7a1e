# SPDX-License-Identifier: Apache-2.0
"""What is kept of a request while it runs, and the line that a log has of it: numbers and times, never a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from nnfront.serve.answers import Answer
from nnfront.serve.replies import usage


@dataclass
class Call:
    """A request and what has come of it so far. `prompts`: the tokens of each text that was given; `first`: when the reply's first byte was sent."""

    number: str
    method: str
    prompts: Sequence[int] = ()
    answers: Sequence[Answer] = ()
    status: int | None = None
    first: float | None = None
    is_whole: bool = False
    began: float = field(default_factory=time.monotonic)

    def sent(self, message: Any) -> None:
        """Take notice of a part of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            if message.get("body") and self.first is None:
                self.first = time.monotonic()
            self.is_whole = not message.get("more_body", False)

    def line(self, route: str | None) -> dict[str, Any]:
        """The log's line, when the request is over. `route`: the address as the server has it, since what a client writes there may be a text.

        `whole` is false if the client left before the reply's end; `status` is then null if it left before there was any.
        """
        tokens = usage(self.prompts, self.answers)
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.number,
            "method": self.method,
            "route": route,
            "status": self.status,
            "whole": self.is_whole,
            "prompt_tokens": tokens["prompt_tokens"],
            "cached_tokens": tokens["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": tokens["completion_tokens"],
            "first_byte_seconds": None if self.first is None else round(self.first - self.began, 6),
            "seconds": round(time.monotonic() - self.began, 6),
        }
