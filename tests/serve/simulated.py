# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, which says where the scheduler is wrong; and sequences that are answered by steps alone."""

from __future__ import annotations

import random
from collections.abc import Iterable

from nnfront.engine.changes import Change, Cut, Drop, Forget, Make, Remember, Save
from nnfront.engine.schedule import Limits, Scheduler, Step
from nnfront.engine.sequence import Sequence
from nnfront.errors import Busy


class Cache:
    """What a cache would hold: for each sequence the tokens themselves, which others can begin with, and, where a state of the whole
    is kept, what that has seen, which goes back only to copies. `before` is that of the last call with guesses.
    """

    def __init__(self, limits: Limits, snapshots: int | None) -> None:
        self.rows: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}
        self.limits, self.snapshots = limits, snapshots
        self.seen: dict[int, list[int]] = {}
        self.before: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Make(new, source, length, states):
                    assert new not in self.rows
                    self.rows[new] = (
                        list((self.held | self.rows)[source][:length]) if source is not None else []
                    )
                    assert len(self.rows[new]) == length
                    self.seen[new] = (
                        list(self.rows[new]) if self.snapshots is None else list(self.saved.get(states, []))
                    )
                case Cut(cut, length):
                    del self.rows[cut][length:]
                    self.seen[cut] = list(self.rows[cut]) if self.snapshots is None else self.before[cut]
                case Remember(kept, length):
                    self.held[kept] = (self.held if kept in self.held else self.rows).pop(kept)[:length]
                    assert len(self.held[kept]) == length
                case Drop(dropped):
                    assert (self.rows if dropped in self.rows else self.held).pop(dropped) is not None
                case Save(number, sequence):
                    assert number not in self.saved
                    self.saved[number] = list(self.seen[sequence])
                case Forget(number):
                    del self.saved[number]
            assert len(self.rows) <= self.limits.max_num_seqs
            assert self.limits.remembers or not self.held
            assert len(self.saved) <= (self.snapshots or 0)
        self.before.clear()

    def compute(self, sequence: Sequence, more: list[int]) -> None:
        row, seen = self.rows[sequence.arrival], self.seen[sequence.arrival]
        assert seen == row == sequence.tokens[: sequence.computed]
        self.before[sequence.arrival] = list(seen)
        row += more
        seen += more


class Simulation:
    """An engine without a model: what it draws is a function of the tokens before, so that a wrong prefix shows in what follows."""

    def __init__(
        self,
        limits: Limits,
        snapshots: int | None = None,
        guesses: int = 0,
        window: int | None = None,
        asides: float = 0,
        packs: bool = False,
    ) -> None:
        self.packs = packs
        self.scheduler = Scheduler(limits, snapshots=snapshots, window=window)
        self.cache = Cache(limits, snapshots)
        self.snapshots, self.guesses, self.random = snapshots, guesses, random.Random(limits.pages)
        self.live: dict[int, Sequence] = {}
        self.admitted: list[int] = []
        self.idle_steps: dict[int, int] = {}
        self.arrivals = self.were_aside = 0
        self.asides = asides

    def submit(self, prompt: list[int], new: int) -> None:
        sequence = Sequence(self.arrivals, list(prompt), len(prompt), len(prompt) + new)
        try:
            self.scheduler.submit(sequence)
        except Busy:
            assert (
                len(self.scheduler.waiting) >= self.scheduler.limits.max_queued
            )  # those pre-empted wait, too
            return
        self.live[self.arrivals] = sequence
        self.arrivals += 1

    def cancel(self, which: int) -> None:
        if self.live:
            arrival = sorted(self.live)[which % len(self.live)]
            self.scheduler.finish(self.live.pop(arrival))

    def step(self) -> None:
        scheduler, limits = self.scheduler, self.scheduler.limits
        self._draft()
        tokens = self.random.randint(1, limits.step_tokens) if self.packs else None
        step = scheduler.step(tokens)
        self.cache.apply(step.changes)
        assert sum(count for _, count in step.chunks) <= (tokens or limits.step_tokens)
        for sequence, count in step.chunks if tokens is None or self.snapshots is not None else ():
            assert sequence.computed // limits.chunk == (sequence.computed + count - 1) // limits.chunk
        if self.live:
            assert step.decode or step.chunks
            oldest = min(self.live)
            assert self.live[oldest] in scheduler.running
        self._decode(step)
        for sequence, count in step.chunks:
            if not self.packs:  # else all is one call
                self.cache.apply(scheduler.changes())
            self.cache.compute(sequence, sequence.tokens[sequence.computed : sequence.computed + count])
            while self.random.random() < self.asides:
                self._aside(sequence)
            scheduler.computed(sequence, count)
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(drawn(self.cache.rows[sequence.arrival]))
            self._end(sequence)
        self.check()

    def _decode(self, step: Step) -> None:
        for sequence in step.decode:
            self.cache.compute(sequence, sequence.next)
        for sequence in step.decode:
            self._verify(sequence)
            self._end(sequence)

    def _aside(self, sequence: Sequence) -> None:
        """Have others go on answering in the middle of a chunk."""
        self._draft()
        running = list(self.scheduler.running)
        step = self.scheduler.aside()
        assert self.scheduler.running == running
        if step is not None:
            assert step.decode == [s for s in running if s.answers]
            assert len({len(s.drafts) for s in step.decode}) == 1
            assert not any(isinstance(change, Make) for change in step.changes)
            assert Drop(sequence.arrival) not in step.changes
            self.cache.apply(step.changes)
            self._decode(step)
            self.were_aside += 1

    def _end(self, sequence: Sequence) -> None:
        if len(sequence.tokens) == sequence.most:
            self.scheduler.finish(self.live.pop(sequence.arrival))

    def _draft(self) -> None:
        """Guess as many tokens of each that answers."""
        answering = [s for s in self.scheduler.running if s.answers]
        width = min([self.guesses, *(s.room for s in answering)])
        for sequence in answering:
            sequence.drafts = self._guess(sequence, width)

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        """Tokens that were drawn and not computed, and behind them what comes, often."""
        tokens = list(sequence.tokens)
        while len(tokens) <= sequence.computed + count:
            tokens.append(drawn(tokens) if self.random.random() < 0.7 else 9)
        return tokens[sequence.computed + 1 :][:count]

    def _verify(self, sequence: Sequence) -> None:
        """Draw behind what was computed as long as the next token is the one that was guessed."""
        at, row, width = sequence.computed, self.cache.rows[sequence.arrival], 1 + len(sequence.drafts)
        right = min(len(sequence.tokens) - at, width)
        sequence.drafts = []
        while at + right == len(sequence.tokens) < sequence.most:
            sequence.tokens.append(drawn(row[: at + right]))
            right += right < width and sequence.tokens[-1] == row[at + right]
        self.scheduler.computed(sequence, right if self.snapshots is None or right == width else 0)

    def check(self) -> None:
        scheduler = self.scheduler
        held = [sequence.arrival for sequence in scheduler.running] + list(scheduler.remembered)
        if scheduler.window is not None:
            held += [~number for number in scheduler.prefixes._saved]
        assert sorted(held) == sorted(scheduler.pages._held)
        counts = [0] * scheduler.limits.pages
        for holding in scheduler.pages._held.values():
            assert len(holding.pages) == scheduler.pages.of(holding.length)
            for page in holding.pages:
                counts[page] += 1
        assert counts == scheduler.pages._holders
        assert scheduler.pages.free == counts.count(0)
        running = [sequence.arrival for sequence in scheduler.running]
        waiting = [sequence.arrival for sequence in scheduler.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
        assert not running or not waiting or running[-1] < waiting[0]

    def drain(self) -> None:
        steps = 0
        while self.live:
            self.step()
            steps += 1
            assert steps < 20_000
        step = self.scheduler.step()
        self.cache.apply(step.changes)
        self.scheduler.forget()
        self.cache.apply(self.scheduler.step().changes)
        assert self.scheduler.pages.free == self.scheduler.limits.pages
        assert not self.cache.rows
        assert not self.scheduler.prefixes._roots
        assert not self.scheduler.prefixes._saved
        assert not self.cache.saved
        assert not self.cache.held


def drawn(tokens: list[int]) -> int:
    return sum(tokens[-3:]) % 5


def computed(scheduler: Scheduler, step: Step) -> list[Sequence]:
    """Count what a step has computed; the sequences whose next token can be drawn."""
    work = [*((sequence, 1) for sequence in step.decode), *step.chunks]
    for sequence, count in work:
        scheduler.computed(sequence, count)
    return [sequence for sequence, _ in work if sequence.computed == len(sequence.tokens)]


def run(scheduler: Scheduler, *sequences: Sequence) -> list[Step]:
    """The steps until all are answered."""
    left, steps = list(sequences), []
    for sequence in sequences:
        scheduler.submit(sequence)
    while left:
        steps.append(scheduler.step())
        for sequence in computed(scheduler, steps[-1]):
            sequence.tokens.append(7)
            if len(sequence.tokens) == sequence.most:
                scheduler.finish(sequence)
                left.remove(sequence)
    return steps


def limits(**given: int) -> Limits:
    known = {
        "max_model_len": 64,
        "pages": 32,
        "max_num_seqs": 4,
        "page_size": 2,
        "chunk": 4,
        "step_tokens": 8,
    }
    return Limits(**{**known, **given})


def sequence(arrival: int, prompt: int, new: int, first: int = 0) -> Sequence:
    return Sequence(arrival, [first + i for i in range(prompt)], prompt, prompt + new)
