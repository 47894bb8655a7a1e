# SPDX-License-Identifier: Apache-2.0
"""Answer several sequences together, step by step, in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from nnfront.engine.changes import Change
from nnfront.engine.compute import Compute, Counts, Work
from nnfront.engine.draw import Draw, Logprobs
from nnfront.engine.likely import Row
from nnfront.engine.multi_token import Heads, MultiTokenHead, Wish
from nnfront.engine.pace import Pace
from nnfront.engine.schedule import Scheduler, Step
from nnfront.engine.sequence import Sequence
from nnfront.engine.speculate import MOST_GUESSED, Clock, Guesser, Pay
from nnfront.engine.taken import Asked, taken
from nnfront.errors import RunError
from nnfront.llm.methods import EXTEND


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request: a token, its end, or both.

    finish: "stop" at an end token, which is not among the tokens; "length"; "cancelled"; "deadline"; "error", of which `error` says what.
    cached: how many tokens of the prompt had been computed for others.
    """

    token: int | None = None
    logprobs: Logprobs | None = None
    finish: str | None = None
    error: str = ""
    cached: int = 0


@dataclass(slots=True, eq=False)
class Answer:
    """A sequence, what draws its tokens, and the tokens that end it; `guesser` guesses tokens ahead."""

    sequence: Sequence
    draw: Draw
    ends: frozenset[int]
    guesser: Guesser | MultiTokenHead | None = None
    pay: Pay = field(default_factory=Pay)


Came: TypeAlias = Callable[[Answer, Event], None]
"""Told of what came of an answer, as it comes."""
Known: TypeAlias = tuple[list[int], list[int]]
"""Tokens of a sequence behind those that are computed next: drawn already, and then those without a choice."""


class Runner:
    """Sequences that are answered together by a model, in a cache that is theirs. `lock` is held where others may look at what waits and runs."""

    def __init__(
        self,
        compute: Compute,
        scheduler: Scheduler,
        lock: AbstractContextManager[object] | None = None,
        agreed: Callable[[list[list[int]]], list[list[int]]] | None = None,
        began: Callable[[Step], None] = lambda step: None,
    ) -> None:
        """`agreed`: what all ranks take for guessed, of what this one has guessed, where each has a runner: how long calls took differs between them.
        `began`: told of each step that begins, those between the parts of another's calls too."""
        self.compute = compute
        self.pool = compute.pool
        self.scheduler = scheduler
        self.answers: dict[int, Answer] = {}
        self.drafted = self.accepted = 0
        self._lock = lock or nullcontext()
        self._agreed = agreed or (lambda guesses: guesses)
        self._began = began
        self._clock = Clock()
        self._pace = Pace(scheduler.limits.inter_token_ms / 1e3, compute.session.backend.rows_together)
        self._is_paced = (
            scheduler.limits.inter_token_ms > 0 and compute.can_be_set_aside and not compute.packs
        )
        self._guessing = 0.0
        self._heads = self._new_heads()

    @property
    def guesses(self) -> bool:
        """Whether tokens can be computed ahead of being drawn: the model has the method."""
        return EXTEND in self.compute.session.methods

    def require_guesses(self) -> None:
        """Raise RunError where tokens cannot be computed ahead."""
        if not self.guesses:
            raise RunError(
                f"tokens cannot be guessed: the model has no method {EXTEND!r}, which computes several tokens of each sequence",
                details=[f"methods are {', '.join(map(repr, self.compute.session.methods))}"],
                help="LLM.load(DIR, extends=True); an artefact without it is older, and is to be exported again",
            )

    def add(self, answer: Answer) -> None:
        """Let a sequence wait for its turn. Raises as `Scheduler.submit` does."""
        self.scheduler.submit(answer.sequence)
        self.answers[answer.sequence.arrival] = answer

    def reset(self) -> list[Answer]:
        """Begin with an empty cache; return those that ran, of which nothing is left. Those that wait still do."""
        before = self.scheduler
        self.scheduler = Scheduler(
            before.limits, shares=before.shares, snapshots=before.snapshots, window=before.window
        )
        self.scheduler.waiting = before.waiting
        self.pool.reset()
        self._heads = self._new_heads()
        return [self.answers.pop(s.arrival) for s in before.running if s.arrival in self.answers]

    def plan(self) -> Step:
        """Say what to do next, and count it as reserved."""
        self._guess()
        return self.scheduler.step(self._budget() if self.compute.packs else None)

    def run(self, step: Step, came: Came) -> None:
        """Do it, and say what came of it as it comes: a token of each that answers, then chunks of prompts, in the middle of which others go on answering."""
        self._began(step)
        if self.compute.packs:
            self._run_packed(step, came)
            return
        if step.decode or not step.chunks:
            began = self._pace.clock()
            decode = {s.arrival: s.next for s in step.decode}
            self._compute(Work(step.changes, decode, []), step.decode, came)
            self._pace.took(began)
        for i, (sequence, count) in enumerate(step.chunks):
            running = self.scheduler.running
            answering = sum(s.answers for s in running)
            self._pace.divide(len(self.scheduler.waiting) + len(running) - answering, answering)
            changes = self._changes() if i or step.decode else step.changes
            tokens = sequence.tokens[sequence.computed : sequence.computed + count]
            self._compute(Work(changes, {}, [(sequence.arrival, tokens)]), [sequence], came)

    def _budget(self) -> int:
        """How many tokens of prompts the next step computes beside those of answers."""
        running = self.scheduler.running
        answering = sum(1 + len(s.drafts) for s in running if s.answers)
        waiting = len(self.scheduler.waiting) + sum(not s.answers for s in running)
        return self._pace.tokens(answering, waiting, self.scheduler.limits.step_tokens)

    def _run_packed(self, step: Step, came: Came) -> None:
        """Do it in one call."""
        decode = {s.arrival: s.next for s in step.decode}
        chunks = [(s.arrival, s.tokens[s.computed : s.computed + count]) for s, count in step.chunks]
        began = self._pace.clock()
        sequences = [*step.decode, *(sequence for sequence, _ in step.chunks)]
        self._compute(Work(step.changes, decode, chunks), sequences, came)
        self._pace.computed(began, sum(map(len, (*decode.values(), *(tokens for _, tokens in chunks)))))

    def _compute(self, work: Work, sequences: Several[Sequence], came: Came) -> None:
        for sequence, count, rows in self._calls(work, sequences, came):
            answer = self.answers[sequence.arrival]
            for event in self._drawn(answer, count, rows):
                if event.finish is not None:
                    self.finish(answer)
                came(answer, event)

    def _changes(self) -> list[Change]:
        with self._lock:
            return self.scheduler.changes()

    def _set_aside(self, came: Came) -> None:
        """In the middle of a chunk: have others go on answering, if it is time for that, and there are pages."""
        if not self._pace.is_due:
            return
        with self.compute.set_aside():
            with self._lock:
                self._guess()
                step = self.scheduler.aside()
            if step is None:
                self._pace.wait()
            else:
                self.run(step, came)

    def finish(self, answer: Answer) -> None:
        """Take a sequence out."""
        with self._lock:
            self.scheduler.finish(answer.sequence)
            del self.answers[answer.sequence.arrival]
        if self._heads is not None:
            self._heads.end(answer.sequence.arrival)

    def _new_heads(self) -> Heads | None:
        compute = self.compute
        return Heads(compute.session, self.scheduler.limits) if compute.gives_hidden else None

    def _guess(self) -> None:
        """Say which tokens may come behind those that are computed next: as many of each sequence where one call computes as many of each."""
        answers = [a for s in self.scheduler.running if s.answers and (a := self.answers.get(s.arrival))]
        if not answers or not self.guesses:
            return
        rows = self.compute.decode_rows // len(answers)
        most = min(MOST_GUESSED, rows - 1, *(a.sequence.room for a in answers))
        if most < 1:
            return
        began = time.perf_counter()
        known = [self._known_of(answer, most) for answer in answers]
        (due,) = self._agreed(
            [[i for i, tokens in enumerate(known) if self._is_due(answers[i], tokens, most)]]
        )
        found = self._agreed(self._guesses_of(answers, known, due, most))
        self._guessing = time.perf_counter() - began
        width = 0 if self.compute.packs else max(map(len, found))
        for answer, guess in zip(answers, found, strict=True):
            answer.sequence.drafts = guess + [0] * (width - len(guess))

    def _known_of(self, answer: Answer, most: int) -> Known:
        sequence = answer.sequence
        drawn = sequence.tokens[sequence.computed + 1 :][:most]
        left = most - len(drawn)
        return drawn, answer.draw.forced(left) if left else []

    def _is_due(self, answer: Answer, known: Known, most: int) -> bool:
        """Whether to guess further ones."""
        drawn, forced = known
        may = answer.guesser is not None and not forced and len(drawn) < most
        return may and answer.pay.is_due(self._clock.cost)

    def _guesses_of(
        self, answers: Several[Answer], known: Several[Known], due: Several[int], most: int
    ) -> list[list[int]]:
        """Up to so many tokens behind the next one of each: what is known of them, and guesses behind it for those that are due."""
        found, wishes = [drawn + forced for drawn, forced in known], {}
        for i in due:
            sequence, guesser, left = answers[i].sequence, answers[i].guesser, most - len(found[i])
            if isinstance(guesser, MultiTokenHead):
                wishes[sequence.arrival] = Wish(guesser, sequence.tokens, left)
            elif guesser is not None:
                found[i] += guesser.guess(sequence.tokens, left)
        if self._heads is not None and wishes:
            together = self._heads.guess(wishes)
            for answer, guess in zip(answers, found, strict=True):
                guess += together.get(answer.sequence.arrival, [])
        return found

    def _calls(
        self, work: Work, sequences: Several[Sequence], came: Came
    ) -> Iterator[tuple[Sequence, int, Several[Row | int]]]:
        """Compute the next tokens of sequences, or of a prompt; for each sequence how many, and what is taken of the logits that follow the last of them, 1 or more."""
        asked = {s.arrival: s for s in sequences}
        prompts = {number: len(tokens) for number, tokens in work.chunks}
        beside = [s.arrival for s in self.scheduler.running if s.answers] if self._is_paced else []
        between = partial(self._set_aside, came) if beside else None
        take = partial(self._take, asked)
        for numbers, found, seconds, hidden in self.compute.run(work, between, beside, take):
            if hidden is not None:
                self._tell(numbers, hidden)
            if not work.chunks:
                width = max(map(len, found))
                self._clock.took(seconds + (width > 1) * self._guessing, width > 1)
            for number, rows in zip(numbers, found, strict=True):
                sequence = asked.get(number)
                if sequence is None:
                    continue
                known = self._known_rows(sequence, len(rows))
                yield sequence, prompts.get(number, known), rows[known - 1 :]

    def _known_rows(self, sequence: Sequence, rows: int) -> int:
        """Of so many rows of logits those up to the first that a token is drawn from."""
        return min(len(sequence.tokens) - sequence.computed, rows)

    def _take(self, asked: Mapping[int, Sequence], counts: Counts, logits: torch.Tensor) -> list[Row | int]:
        """What is to be known of the logits of sequences, of each so many rows."""
        rows: list[Asked | None] = []
        for number, count in counts:
            if (sequence := asked.get(number)) is None:
                rows += [None] * count
                continue
            draw = self.answers[number].draw
            first = self._known_rows(sequence, count) - 1
            rows += [(draw, draw.drawn + i - first) for i in range(count)]
        return taken(logits, rows)

    def _tell(self, numbers: Several[int], hidden: torch.Tensor) -> None:
        """Tell those that guess of it what was made of tokens, before these count as computed."""
        for number, made in zip(numbers, hidden, strict=True):
            answer = self.answers.get(number)
            if answer is not None and isinstance(answer.guesser, MultiTokenHead):
                answer.guesser.saw(answer.sequence.computed, made)

    def _drawn(self, answer: Answer, count: int, rows: Several[Row | int]) -> Iterator[Event]:
        """Draw the tokens behind those that were computed, if there are all that stand before, and count what is right as computed."""
        sequence = answer.sequence
        drafts, sequence.drafts = sequence.drafts[count - 1 :], []
        events: list[Event] = []
        guessed, right = len(rows) - 1, 0
        if sequence.computed + count == len(sequence.tokens):
            events = self._draw(answer, rows, drafts)
            right = len(events) - 1
            if guessed:
                answer.pay.took(len(events))
                self.drafted, self.accepted = self.drafted + guessed, self.accepted + right
        with self._lock:
            # States of whole sequences go back to where they were before the call, or not at all.
            is_undone = right < guessed and self.pool.keeps_states
            self.scheduler.computed(sequence, 0 if is_undone else count + right)
        yield from events

    def _draw(self, answer: Answer, rows: Several[Row | int], drafts: Several[int]) -> list[Event]:
        """Draw a token, and as long as it is the one that was guessed, the one behind it."""
        sequence, draw = answer.sequence, answer.draw
        events: list[Event] = []
        for i, row in enumerate(rows):
            try:
                token = draw(row)
            except RunError as error:
                return [*events, Event(finish="error", error=str(error))]
            sequence.tokens.append(token)
            if token in answer.ends:
                return [*events, Event(finish="stop", cached=sequence.cached)]
            is_full = len(sequence.tokens) == sequence.most
            finish = "stop" if draw.is_over else "length" if is_full else None
            events.append(Event(token, draw.logprobs(row, token), finish, cached=sequence.cached))
            if finish is not None or i + 1 == len(rows) or token != drafts[i]:
                break
        return events
