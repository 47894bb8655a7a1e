# SPDX-License-Identifier: Apache-2.0
"""Answers of many requests in one event loop, whose tokens come from another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.llm.tokenizer import Tokenizer
from nnfront.serve.answers import Answer, Wanted, together
from nnfront.serve.engine import Engine

STEPS, REQUESTS = 5, 16


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        return "".join(map(chr, ids))

    def is_special(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False


class Steps:
    """Stands for the engine: all requests get a token in each step, which a thread takes while the loop is at work."""

    def __init__(self) -> None:
        self.sinks: list[Callable[[Event], None]] = []

    def submit(self, prompt: list[int], params: Params, sink: Callable[[Event], None], **_: Any) -> int:
        self.sinks.append(sink)
        return len(self.sinks)

    def cancel(self, request: int, reason: str = "") -> None:
        """Whoever left gets nothing more."""

    def step(self, number: int) -> None:
        finish = "length" if number == STEPS - 1 else None
        thread = threading.Thread(target=lambda: [s(Event(97 + number, finish=finish)) for s in self.sinks])
        thread.start()
        thread.join()


def answers(engine: Steps) -> list[Answer]:
    wanted = Wanted([1], Params())
    given = cast(Engine, engine), cast(Tokenizer, Letters())
    return [Answer(*given, wanted) for _ in range(REQUESTS)]


@pytest.mark.parametrize("are_together", [False, True])
def test_a_loop_wakes_up_once_for_the_tokens_of_a_step_and_all_come_in_order(are_together: bool) -> None:
    engine, wakes = Steps(), 0

    async def text(group: list[Answer]) -> list[str]:
        texts = [""] * len(group)
        async for i, piece in together(group):
            texts[i] += piece.text
        return texts

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*args, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        found = answers(engine)
        groups = [found] if are_together else [[each] for each in found]
        tasks = [asyncio.create_task(text(group)) for group in groups]
        while len(engine.sinks) < REQUESTS:
            await asyncio.sleep(0)
        for number in range(STEPS):
            engine.step(number)
            await asyncio.sleep(0.01)
        return [each for texts in await asyncio.gather(*tasks) for each in texts]

    assert asyncio.run(run()) == ["abcde"] * REQUESTS
    assert wakes == STEPS


def test_an_event_for_a_loop_that_is_closed_is_an_error_each_time() -> None:
    engine = Steps()

    async def begin() -> None:
        task = asyncio.create_task(anext(answers(engine)[0].pieces()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(begin())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            engine.sinks[0](Event(97))
