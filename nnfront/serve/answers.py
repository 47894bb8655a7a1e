# SPDX-License-Identifier: Apache-2.0
"""A request's answer as text: from the engine's tokens, which come in its thread, to pieces in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from nnfront.engine.draw import Logprobs
from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.errors import RunError
from nnfront.llm.tokenizer import Stops, TextStream, Tokenizer
from nnfront.serve.engine import Engine

_FAILED = {
    "error": "the model failed",
    "cancelled": "the server is being closed",
    "deadline": "the answer took longer than the server allows",
}


class AnswerFailed(RunError):
    """An answer that ends before its end; `reason` is the engine's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, the tokens that came with it if their log probabilities were asked for, and why it is the last one, if it is."""

    text: str
    tokens: tuple[tuple[int, Logprobs], ...] = ()
    finish: str | None = None


@dataclass(slots=True)
class Wanted:
    """What is asked of the engine, and how its tokens become text."""

    prompt: list[int]
    params: Params
    stops: Sequence[str] = ()
    includes_stop: bool = False
    shows_special: bool = False
    seconds: float | None = None
    salt: str = ""
    adapter: str | None = None


class _Post:
    """Events on their way from an engine's thread to an event loop, which is woken once for all that come before it looks: a loop that runs keeps the engine from the interpreter."""

    def __init__(self) -> None:
        self._sent: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._is_due = False

    def send(self, loop: asyncio.AbstractEventLoop, to: asyncio.Queue[Event], event: Event) -> None:
        """In the engine's thread. Raises RuntimeError if the loop is closed."""
        self._sent.append((to, event))
        if self._is_due:
            return
        self._is_due = True  # what is sent from here on is there before it is looked for
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._is_due = False
            raise

    def _deliver(self) -> None:
        self._is_due = False
        while self._sent:
            to, event = self._sent.popleft()
            to.put_nowait(event)


_POSTS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = WeakKeyDictionary()


@dataclass(slots=True)
class Answer:
    """One answer; `tokens` counts those that were drawn, `cached` those of the prompt that had been computed for others."""

    engine: Engine
    tokenizer: Tokenizer
    wanted: Wanted
    tokens: int = 0
    cached: int = 0
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer as it comes; whoever leaves before the end cancels it.

        Raises RunError, before anything comes, for a request that the engine does not take; AnswerFailed for one that does not get to its end.
        """
        wanted, loop = self.wanted, asyncio.get_running_loop()
        post = _POSTS.setdefault(loop, _Post())
        text, stops = TextStream(self.tokenizer, special=wanted.shows_special), Stops(wanted.stops)

        def sink(event: Event) -> None:  # in the engine's thread
            post.send(loop, self._events, event)

        number = self.engine.submit(
            wanted.prompt,
            wanted.params,
            sink,
            seconds=wanted.seconds,
            salt=wanted.salt,
            adapter=wanted.adapter,
        )
        has_ended = False
        try:
            drawn: list[tuple[int, Logprobs]] = []
            while not has_ended:
                event = await self._events.get()
                self.cached = event.cached
                new, finish = "", event.finish
                has_ended = finish is not None
                if finish in _FAILED:
                    raise AnswerFailed(finish, event.error or _FAILED[finish])
                if event.token is not None:
                    self.tokens += 1
                    new = stops.push(text.push(event.token))
                    if event.logprobs is not None:
                        drawn.append((event.token, event.logprobs))
                if finish is not None and stops.found is None:
                    new += stops.push(text.end())
                if stops.found is not None:
                    new += stops.found if wanted.includes_stop else ""
                    finish = "stop"
                elif finish is not None:
                    new += stops.pending
                if new or finish:
                    yield Piece(new, tuple(drawn), finish)
                    drawn.clear()
                if finish is not None:
                    return
        finally:
            if not has_ended:
                self.engine.cancel(number, "cancelled" if stops.found is None else "stop")


async def together(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of several answers as they come, each with its answer's number. Raises as `Answer.pieces` does, and ends all then."""
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as alone:
            async for only in alone:
                yield 0, only
        return
    found: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def follow(i: int, answer: Answer) -> None:
        try:
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    found.put_nowait((i, piece))
            found.put_nowait((i, None))
        except RunError as error:
            found.put_nowait((i, error))

    tasks = [asyncio.create_task(follow(i, answer)) for i, answer in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            i, piece = await found.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield i, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
