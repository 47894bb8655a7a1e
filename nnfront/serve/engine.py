# SPDX-License-Identifier: Apache-2.0
"""The engine: one thread that owns a model and its cache, and answers all requests together, step by step.

Requests come from any thread. Tokens go to a request's `sink`, which is called in the engine's thread and must only pass them on: text, JSON and
sockets are others' work.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nnfront.engine.compute import Compute
from nnfront.engine.draw import Draw
from nnfront.engine.multi_token import MultiTokenHead
from nnfront.engine.params import Params
from nnfront.engine.runner import Answer, Event, Runner
from nnfront.engine.schedule import Limits, Scheduler, Step
from nnfront.engine.sequence import Sequence
from nnfront.errors import RunError
from nnfront.llm.language_model import LLM
from nnfront.llm.prompts import adapter_numbers
from nnfront.serve.stats import Stats


@dataclass(slots=True, eq=False, kw_only=True)
class _Request(Answer):
    sink: Callable[[Event], None]
    deadline: float | None
    began: float
    turn: float = 0.0
    first: float = 0.0
    last: float = 0.0


class Engine:
    """A model that answers many requests at once. `close` it, or use it in a `with`."""

    def __init__(
        self, llm: LLM, limits: Limits, *, decode_rows: int | None = None, spec: str | None = None
    ) -> None:
        """Makes the cache. `spec`: how tokens are guessed, as `LLM.guesser` has it.

        Raises RunError where it does not fit into memory, or the model cannot have one with pages, or for a way to guess that there is not.
        """
        self.llm = llm
        self.limits = limits
        self.stats = Stats()
        self._spec = spec
        self._cancelled: dict[int, str] = {}
        self._arrivals = itertools.count()
        self._updates = 0
        self._changed = threading.Condition()
        guesser = None if spec is None else llm.guesser(spec, limits.max_model_len)
        if isinstance(guesser, MultiTokenHead) and llm.ranks.world > 1:
            raise RunError(
                "a server that ranks divide guesses no tokens by the model's own head",
                help="guess with --spec ngram or draft:DIR, or leave out --tp",
            )
        compute = compute_of(llm, limits, decode_rows, hidden=isinstance(guesser, MultiTokenHead))
        self._runner = Runner(compute, _scheduler_of(compute, limits), self._changed, began=self._begin)
        if guesser is not None:
            self._runner.require_guesses()
        self._is_closing = self._is_draining = False
        llm.session.backend.end_threads()
        self._thread = threading.Thread(target=self._run, name="nnfront-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        prompt: Iterable[int],
        params: Params,
        sink: Callable[[Event], None],
        *,
        seconds: float | None = None,
        salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Ask for an answer; return the request's number. `seconds`: how long it may take, waiting included.

        `salt`: prompts with another one share no pages with it. `adapter`: the name of one of the model's adapters.
        Raises Busy if too many requests wait, RunError for a prompt or tokens that do not fit the model.
        """
        tokens = list(prompt)
        sequence = self._sequence(tokens, params, salt, adapter)
        eos = () if params.ignore_eos else self.llm.eos_token_ids
        draw = Draw(params, tokens, eos)
        now = time.monotonic()
        deadline = None if seconds is None else now + seconds
        with self._changed:
            if self._is_draining:
                raise RunError("the engine is being closed, and takes no more requests")
            ends = frozenset((*eos, *params.stop_tokens))
            guesser = None if self._spec is None else self.llm.guesser(self._spec, sequence.most)
            self._runner.add(_Request(sequence, draw, ends, guesser, sink=sink, deadline=deadline, began=now))
            self._changed.notify()
        return sequence.arrival

    def cancel(self, request: int, reason: str = "cancelled") -> None:
        """End a request at the next step, if it has not ended; it counts as ended for the first reason given."""
        with self._changed:
            self._cancelled.setdefault(request, reason)
            self._changed.notify()

    def close(self, *, drain: bool = False) -> None:
        """Stop; with `drain` when all requests are answered, else they are cancelled."""
        with self._changed:
            self._is_draining = True
            self._is_closing = self._is_closing or not drain
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._is_draining

    @property
    def _scheduler(self) -> Scheduler:
        return self._runner.scheduler

    def counts(self) -> dict[str, float]:
        """How much there is to do, and how full the cache is: pages that are remembered are not in use."""
        scheduler = self._scheduler
        with self._changed:
            used = scheduler.pages.held_by(sequence.arrival for sequence in scheduler.running)
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "remembered": len(scheduler.remembered),
            "pages_used": used,
            "pages": self.limits.pages,
            "preemptions": scheduler.preemptions,
            "drafted": self._runner.drafted,
            "accepted": self._runner.accepted,
            "snapshot_bytes": self._runner.pool.snapshot_bytes,
        }

    def update(self, weights: Mapping[str, torch.Tensor], *, cast: bool = False) -> None:
        """Replace weights as `Session.update` does, while requests run. What was computed with the old ones is shared with no later request.

        Raises LoadError if something does not fit, and RunError for a model that ranks divide; nothing has changed then.
        """
        if self.llm.ranks.world > 1:
            raise RunError(
                "a model that ranks divide keeps its weights while it is served",
                help="start it again with others",
            )
        self.llm.session.update(weights, cast=cast)
        with self._changed:
            self._updates += 1
            self._scheduler.forget()

    def forget(self) -> None:
        """Forget what is remembered of requests that have ended."""
        with self._changed:
            self._scheduler.forget()

    def _sequence(self, tokens: list[int], params: Params, salt: str, adapter: str | None) -> Sequence:
        if not tokens:
            raise RunError("the prompt is empty", help="give at least one token")
        vocab = int(self.llm.config.vocab_size)
        named = [*params.logit_bias, *params.stop_tokens]
        for which, given in (("the prompt", tokens), ("the request", named)):
            if given and not 0 <= min(given) <= max(given) < vocab:
                raise RunError(f"{which} holds a token outside the vocabulary of {vocab}")
        room = min(self.limits.max_model_len, self.limits.pages * self.limits.page_size)
        new = max(room - len(tokens), 1) if params.max_tokens is None else params.max_tokens
        own = f"{self._updates} {salt}"  # of the weights as they are now
        (number,) = adapter_numbers(self.llm.adapters, adapter, 1)
        return Sequence(next(self._arrivals), tokens, len(tokens), len(tokens) + new, own, number)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._scheduler.is_idle and not self._is_draining:
                    self._changed.wait()
                for reason in ["cancelled"] if self._is_closing else []:
                    self._cancelled.update(dict.fromkeys(self._runner.answers, reason))
                ended = self._end_cancelled()
            for request, event in ended:
                self._tell(request, event)
            try:
                with self._changed:
                    if self._scheduler.is_idle and self._is_draining:
                        break
                    step = self._runner.plan()
                self._runner.run(step, self._came)
            except Exception as error:  # whatever it is, who waits for an answer must hear of it
                self._fail(error)
        self._runner.compute.close()

    def _begin(self, step: Step) -> None:
        """Count what a step computes, and book whose turn it is for the first time."""
        self.stats.step(len(step.decode), sum(count for _, count in step.chunks))
        now = time.monotonic()
        for sequence, _ in step.chunks:
            request = self._runner.answers.get(sequence.arrival)
            if isinstance(request, _Request) and not request.turn:
                request.turn = now

    def _end_cancelled(self) -> list[tuple[_Request, Event]]:
        """Take out the requests that are not wanted any more."""
        now = time.monotonic()
        answers = self._runner.answers
        requests = {n: answer for n, answer in answers.items() if isinstance(answer, _Request)}
        late = {n: "deadline" for n, r in requests.items() if r.deadline and now > r.deadline}
        ended = []
        for number, reason in {**late, **self._cancelled}.items():
            if (request := requests.get(number)) is not None:
                self._runner.finish(request)
                self._ended(request, reason)
                ended.append((request, Event(finish=reason)))
        self._cancelled.clear()
        return ended

    def _came(self, request: Answer, event: Event) -> None:
        """Count something that came of a request, and pass it on."""
        assert isinstance(request, _Request)
        if not event.error:
            self._time(request)
        if event.finish is not None:
            self._ended(request, event.finish)
        self._tell(request, event)

    def _ended(self, request: _Request, reason: str) -> None:
        """Count a request's end."""
        now = time.monotonic()
        self.stats.ended(reason, now - request.began)
        if request.first:
            self.stats.decode.observe(now - request.first)

    def _tell(self, request: _Request, event: Event) -> None:
        try:
            request.sink(event)
        except Exception:  # whoever asked is gone; others are not to suffer from it
            self.cancel(request.sequence.arrival)

    def _time(self, request: _Request) -> None:
        """Book when a token came."""
        now = time.monotonic()
        if request.last:
            self.stats.between.observe(now - request.last)
        else:
            request.first = now
            self.stats.first(request.sequence, now - request.began, request.turn - request.began)
        request.last = now
        self.stats.generation_tokens += 1

    def _fail(self, error: Exception) -> None:
        """Tell all that run of an error, or the next that waits where none does, and go on with an empty cache."""
        with self._changed:
            lost = self._runner.reset()
            if not lost and self._scheduler.waiting:  # else it would come again, and again
                lost = [self._runner.answers[self._scheduler.waiting[0].arrival]]
                self._runner.finish(lost[0])
        for request in lost:
            assert isinstance(request, _Request)
            self._ended(request, "error")
            self._tell(request, Event(finish="error", error=str(error)))


def _scheduler_of(compute: Compute, limits: Limits) -> Scheduler:
    """Where bits do not depend on how tokens are cut into calls, pages of answers are as good as those of prompts."""
    limits = replace(limits, reuse_answers=limits.reuse_answers or compute.packs)
    return Scheduler(limits, snapshots=compute.pool.snapshots, window=compute.pool.window)


def compute_of(llm: LLM, limits: Limits, decode_rows: int | None = None, *, hidden: bool = False) -> Compute:
    """What computes an engine's steps. All ranks make one; those that are not rank 0's follow it. Raises RunError as `Engine` does."""
    more: dict[str, Any] = {"decode_rows": decode_rows, "hidden": hidden, "has_adapters": bool(llm.adapters)}
    return Compute(llm.session, limits, stored_as=llm.stored_as, ranks=llm.ranks, **more)
