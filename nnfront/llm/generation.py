# SPDX-License-Identifier: Apache-2.0
"""Texts that are generated together, in the thread of whoever reads them: a step is run when a token is wanted that is not there yet."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch

from nnfront.distributed.ranks import Ranks
from nnfront.engine import sequence as numbered
from nnfront.engine.compute import Compute
from nnfront.engine.draw import Draw
from nnfront.engine.multi_token import MultiTokenHead
from nnfront.engine.params import Params, Sampling
from nnfront.engine.pool import company, text_cache
from nnfront.engine.runner import Answer, Event, Runner
from nnfront.engine.schedule import Limits, Scheduler
from nnfront.engine.speculate import Guesser
from nnfront.errors import RunError
from nnfront.llm.sampling import tokens_of
from nnfront.llm.timings import Timings
from nnfront.session import Session
from nnfront.state.cache import Cache

PAGE = 16
"""Tokens of a page, where there are pages and kernels take any number."""


class Coming(ABC):
    """New tokens of some prompts, up to one of the `ends`, which is not among them: computed when they are wanted and not there yet."""

    def __init__(self, several: int) -> None:
        self._come: list[deque[int]] = [deque() for _ in range(several)]
        self._going = set(range(several))

    def tokens(self, which: int) -> Iterator[int]:
        """Yield the tokens of a prompt. When the iterator is closed, no more of it are computed."""
        come = self._come[which]
        try:
            while come or which in self._going:
                if not come:
                    self._step()
                while come:
                    yield come.popleft()
        finally:
            self.end(which)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of all prompts as they come, each with the prompt's number."""
        try:
            while self._going or any(self._come):
                for which, come in enumerate(self._come):
                    while come:
                        yield which, come.popleft()
                if self._going:
                    self._step()
        finally:
            for which in range(len(self._come)):
                self.end(which)

    def end(self, which: int) -> None:
        """Compute no more of a prompt."""
        self._come[which].clear()
        if which in self._going:
            self._going.remove(which)
            self._end(which)

    @abstractmethod
    def _step(self) -> None:
        """Compute the next tokens."""

    @abstractmethod
    def _end(self, which: int) -> None:
        """Do what is to be done where a prompt has ended early."""


class Captured(Coming):
    """Tokens of steps that a device goes through by itself: what it has drawn is where the next step begins, whoever has seen it."""

    def __init__(self, steps: Iterator[torch.Tensor], several: int, ends: Sequence[int]) -> None:
        super().__init__(several)
        self._steps, self._ends = steps, ends

    def _step(self) -> None:
        drawn = next(self._steps, None)
        if drawn is None:
            self._going.clear()
            return
        for which, token in enumerate(tokens_of(drawn)):
            if which in self._going and token in self._ends:
                self._going.remove(which)
                self._end(which)
            elif which in self._going:
                self._come[which].append(token)

    def _end(self, which: int) -> None:
        if not self._going and isinstance(self._steps, Generator):
            self._steps.close()


class Generation(Coming):
    """Sequences of a runner, `count` new tokens of each at most."""

    def __init__(
        self,
        session: Session,
        prompts: Sequence[torch.Tensor],
        sampling: Sampling,
        count: int,
        ends: Sequence[int],
        guessers: Sequence[Guesser | MultiTokenHead | None],
        adapters: Sequence[int],
        has_adapters: bool,
        stored_as: str | None,
        phases: Timings,
        ranks: Ranks,
    ) -> None:
        super().__init__(len(prompts))
        longest, several = max(map(len, prompts)) + count, len(prompts)
        chunk = min(longest, session.backend.prompt_tokens)
        pages = 2 * several * -(-longest // chunk)
        self._limits = Limits(
            longest, pages, several, several, chunk, chunk, several * chunk, remembers=False
        )
        self._session, self._stored_as, self._phases = session, stored_as, phases
        self._has_adapters = has_adapters
        if sampling.seed is None:
            seeds = ranks.from_first([secrets.randbits(64) for _ in prompts])  # all ranks draw alike
        else:
            seeds = [sampling.seed] * several
        self._waiting = []
        for i, (prompt, guesser, seed, adapter) in enumerate(
            zip(prompts, guessers, seeds, adapters, strict=True)
        ):
            tokens = prompt.tolist()
            sequence = numbered.Sequence(i, tokens, len(tokens), len(tokens) + count, adapter=adapter)
            draw = Draw(Params.of(sampling, seed=seed), tokens)
            self._waiting.append(Answer(sequence, draw, frozenset(ends), guesser))
        self._agreed = ranks.from_first if ranks.world > 1 and any(g is not None for g in guessers) else None
        self._runner: Runner | None = None

    def _step(self) -> None:
        self._phases.start()
        if self._runner is None:
            self._runner = self._made()
        step = self._runner.plan()
        before = sum(map(len, self._come))
        self._runner.run(step, self._came)
        prompts = sum(count for _, count in step.chunks)
        self._phases.end("prefill" if prompts else "decode", prompts or sum(map(len, self._come)) - before)

    def _came(self, answer: Answer, event: Event) -> None:
        which = answer.sequence.arrival
        if event.token is not None:
            self._come[which].append(event.token)
        if event.finish is not None:
            self._going.remove(which)
        if event.error:
            raise RunError(event.error)

    def _end(self, which: int) -> None:
        if self._runner is not None:
            self._runner.finish(self._runner.answers[which])

    def _made(self) -> Runner:
        """In a cache where each sequence keeps its row; where a single one needs company, there is a row of nobody's."""
        session, several = self._session, len(self._waiting)
        batch = several + (several % session.backend.decode_rows == 1 and company(session))
        guesses = any(answer.guesser is not None for answer in self._waiting)
        cache = self._cache(batch, takes_back=guesses)
        hidden = any(isinstance(answer.guesser, MultiTokenHead) for answer in self._waiting)
        compute = Compute(session, self._limits, given=cache, has_adapters=self._has_adapters, hidden=hidden)
        runner = Runner(compute, Scheduler(self._limits, shares=False), agreed=self._agreed)
        if guesses:
            runner.require_guesses()
        for answer in self._waiting:
            if answer.sequence.arrival in self._going:
                runner.add(answer)
        return runner

    def _cache(self, batch: int, *, takes_back: bool) -> Cache:
        """Of pages where tokens are taken back behind a window: a ring has written over what they would see again."""
        session, longest = self._session, self._limits.max_model_len
        make = partial(
            session.make_cache, text_cache(session), batch=batch, max_seq=longest, stored_as=self._stored_as
        )
        cache = make()
        if takes_back and any(
            layer.window is not None and layer.window < longest for layer in cache.type.layers
        ):
            allowed = session.backend.page_sizes(session.program.target)
            cache = make(page_size=allowed[0] if allowed else PAGE)
        return cache


def round_robin(streams: Sequence[Iterator[str]]) -> Iterator[tuple[int, str]]:
    """A piece of each stream in turn, with the stream's number."""
    going = dict(enumerate(streams))
    while going:
        for which, stream in list(going.items()):
            piece = next(stream, None)
            if piece is None:
                del going[which]
            else:
                yield which, piece


def until_ends(coming: Coming, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The tokens of sequences, each up to its first end."""
    for which, token in coming:
        yield which, token
        if token in ends:
            coming.end(which)
