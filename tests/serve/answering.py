# SPDX-License-Identifier: Apache-2.0
"""What comes of a request to an engine."""

from __future__ import annotations

import queue

from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.serve.engine import Engine


class Answer:
    """What came of a request."""

    def __init__(self, engine: Engine, prompt: list[int], params: Params, **more: object) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.number = engine.submit(prompt, params, self.events.put, **more)  # type: ignore[arg-type]
        self.cached = 0

    def wait(self) -> tuple[list[int], str]:
        tokens = []
        while True:
            event = self.events.get(timeout=60)
            self.cached = event.cached
            if event.token is not None:
                tokens.append(event.token)
            if event.finish is not None:
                return tokens, event.finish + event.error
