# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine, what comes of them, and how far it goes before something else happens."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from patience import HANGS_SECONDS

from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.engine.schedule import Step
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
            event = self.events.get(timeout=HANGS_SECONDS)
            self.cached = event.cached
            if event.token is not None:
                tokens.append(event.token)
            if event.finish is not None:
                return tokens, event.finish + event.error


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Within it the engine takes requests and begins no step: who runs beside whom does not depend on how soon they come."""
    with engine._changed:
        yield


def asked_together(engine: Engine, wanted: Iterable[tuple[list[int], Params]]) -> list[Answer]:
    """Requests that are all there before the engine begins with one."""
    with held(engine):
        return [Answer(engine, prompt, params) for prompt, params in wanted]


def requests(count: int, vocab: int) -> list[tuple[list[int], Params]]:
    """Long prompts beside short ones, of which some begin alike."""
    random_ = random.Random(5)
    stem = [random_.randrange(2, vocab) for _ in range(90)]
    found = []
    for i in range(count):
        start = stem[: random_.choice([0, 40, 90])]
        prompt = [*start, *(random_.randrange(2, vocab) for _ in range(random_.choice([3, 60, 120])))]
        drawn = Params(
            temperature=random_.choice([0.0, 0.9]), seed=i, max_tokens=random_.randint(5, 30), ignore_eos=True
        )
        found.append((prompt, drawn))
    return found


class Stop:
    """Lets an engine do so many steps; with the next one planned and not computed it waits, once, until `go_on` says so."""

    def __init__(self, engine: Engine, steps: int, go_on: Callable[[], bool]) -> None:
        self.is_there = threading.Event()
        self._begin, self._left, self._go_on = engine._runner._began, steps, go_on
        engine._runner._began = self._wait

    def _wait(self, step: Step) -> None:
        self._begin(step)
        self._left -= 1
        if self._left != -1:
            return
        self.is_there.set()
        end = time.monotonic() + HANGS_SECONDS
        while not self._go_on():
            assert time.monotonic() < end
            time.sleep(0.001)
