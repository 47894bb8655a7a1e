# SPDX-License-Identifier: Apache-2.0
"""What an engine does next, decided from numbers alone: no tensor, no clock, no thread.

One rule: a sequence has tokens, and a count of those that are computed; a step computes some of the missing ones. Sequences that answer compute
one token each. Then come chunks of prompts, one of each prompt, within a budget. Admission, prefixes that others have computed,
pre-emption and recomputing all follow from it.

    turns         the prompt of which least is left comes first, and the oldest in every second step that another would begin: a short prompt waits for no
                  long one, prompts of one length come in their order, and none waits for more than twice what it and those before it take
    chunks        lie on a grid: [0, chunk), [chunk, 2 * chunk) ... of the prompt, whatever else runs. What has been answered is computed token by
                  token, again too, if its sequence had been pre-empted. So what is computed of a request, and in which calls, does not depend
                  on others. Where a token has the same bits in whatever call, a prompt is cut as a step has room for it
    prefixes      what whole chunks of prompts have left in pages is shared, by sequences that run and by those remembered after their end; where
                  layers keep a state of a whole sequence, or drop tokens behind a window, up to a chunk behind which it was copied, or what was in the
                  window was held. What an older prompt is about to compute, one that begins alike waits for, and lends it its turn
    pages         a sequence is admitted if its tokens fit beside what others that run are still to take: all of their prompts, or a page for each. What is
                  remembered holds pages as long as no other needs them: then what was used least recently gives them back, from its end. If that is not enough, the
                  youngest that runs gives all of its pages back, and waits, first in line
    order         requests are admitted in the order in which they came. The oldest is never pre-empted, so each gets there
    aside         a chunk that takes long may be set aside between two layers: then answers go on, and nothing begins or gives pages back
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from nnfront.engine.changes import Change, Cut, Drop, Forget, Make, Remember, Save
from nnfront.engine.pages import Pages
from nnfront.engine.prefixes import Found, Prefixes
from nnfront.engine.sequence import Sequence, ahead_of, in_turn
from nnfront.errors import Busy, RunError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is done at a time.

    max_num_seqs: sequences that run at a time; max_queued: requests that wait for a place before others are refused; max_model_len: tokens
    of a sequence, prompt and answer; pages, page_size: what sequences share; chunk: tokens of a prompt in one call, a multiple of the
    page size; step_tokens: tokens of prompts in one step, at least a chunk; remembers: whether pages are kept after a sequence's end, for others, until they are needed.
    reuse_answers: share the pages of answers as well, and pages that are not whole chunks: faster in long chats, but then what a request
    computes depends on what was there, in the last bits. snapshot_bytes: for copies of recurrent states behind whole chunks, as without one a
    sequence cannot begin with what others have computed; what is used least recently gives way. inter_token_ms: how far apart chunks may keep two
    tokens of an answer, where they can be set aside in between; 0: as far as a chunk takes.
    """

    max_model_len: int
    pages: int
    max_num_seqs: int = 16
    max_queued: int = 256
    page_size: int = 16
    chunk: int = 256
    step_tokens: int = 256
    remembers: bool = True
    reuse_answers: bool = False
    snapshot_bytes: int = 1 << 30
    inter_token_ms: int = 0

    def __post_init__(self) -> None:
        least = {name: int(name not in ("snapshot_bytes", "inter_token_ms")) for name in self.__slots__}
        problems = [
            f"{name} is {value!r}, expected an int >= {low}"
            for name, low in least.items()
            if type(value := getattr(self, name)) is not bool and (type(value) is not int or value < low)
        ]
        if not problems and self.chunk % self.page_size:
            problems.append(f"chunk is {self.chunk}, expected a multiple of page_size = {self.page_size}")
        if not problems and self.step_tokens < self.chunk:
            problems.append(f"step_tokens is {self.step_tokens}, expected at least chunk = {self.chunk}")
        if problems:
            raise RunError("the limits are out of range", details=problems)


@dataclass(slots=True)
class Step:
    """What to do: change the cache, in this order; compute a token of each of some sequences, and so many of the prompts of others."""

    changes: list[Change] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)


class Scheduler:
    """Sequences that wait, run and are remembered, and what is to be done for them next. `shares`: whether the cache can begin one with
    part of another; where it cannot, rows keep their places, those of a call have to lie next to each other, and so answers wait for all
    prompts; `snapshots`: how many copies of states there can be, without one of which it cannot, None where layers keep no states;
    `window`: the most tokens behind which layers drop others, whose pages such a copy holds, None where no layer drops any.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        shares: bool = True,
        snapshots: int | None = None,
        window: int | None = None,
    ) -> None:
        self.limits = limits
        self.shares = shares
        self.snapshots = snapshots
        self.window = window
        self.pages = Pages(limits.pages, limits.page_size)
        self.prefixes = Prefixes(limits.page_size if limits.reuse_answers else limits.chunk, snapshots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.remembered: OrderedDict[int, Sequence] = OrderedDict()
        self.preemptions = 0
        self._passed_over = False
        self._changes: list[Change] = []

    def submit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn. Raises Busy if too many do, RunError for one that can never have enough pages."""
        if len(self.waiting) >= self.limits.max_queued:
            raise Busy(
                f"{len(self.waiting)} requests are waiting, no more are taken",
                help="ask again later, or serve with a larger --max-queued",
            )
        room = self.limits.pages * self.limits.page_size
        if sequence.most > min(room, self.limits.max_model_len):
            raise RunError(
                "the request does not fit",
                details=[
                    f"got {sequence.prompt} tokens and {sequence.most - sequence.prompt} new ones, there is room for {min(room, self.limits.max_model_len)}"
                ],
                help="shorten the prompt, or ask for fewer new tokens",
            )
        self.waiting.append(sequence)

    def step(self, tokens: int | None = None) -> Step:
        """Say what to do next, and count it as reserved; `computed` is to be told when it is done. `tokens`: of prompts, in whatever pieces; without it
        chunks as the limits have them."""
        step, before = Step(self.changes()), self.preemptions
        self._go_on(step)
        if self.shares or all(sequence.answers for sequence in self.running):
            step.decode = [sequence for sequence in self.running if sequence.answers]
        for sequence in list(step.decode):
            if sequence not in self.running:
                continue
            count = 1 + len(sequence.drafts)
            if count > 1 and self.pages.need(sequence.arrival, count) > self.pages.free:
                for each in step.decode:  # all or none: a call computes as many of each
                    self._without_drafts(each)
                count = 1
            if not self._reserve(sequence, count, step):
                break
        if self.preemptions == before:
            self._admit(step)
        budget = self.limits.step_tokens if tokens is None else tokens
        prompts = [sequence for sequence in self.running if not sequence.answers]
        turns = in_turn(prompts, was_passed_over=self._passed_over)
        self._passed_over = turns[:1] != prompts[:1]
        for sequence in turns:
            count = self._chunk(sequence) if tokens is None else min(self._rest(sequence), budget)
            is_due = 0 < count <= budget and sequence in self.running
            if is_due and self._reserve(sequence, count, step):
                step.chunks.append((sequence, count))
                budget -= count
        return step

    def aside(self) -> Step | None:
        """Say what to do while a chunk is set aside: a token of each sequence that answers. None where one of them would need another's pages."""
        answering = [sequence for sequence in self.running if sequence.answers]
        if self._needs(answering) > self.pages.free:
            for sequence in answering:  # all or none, as above
                self._without_drafts(sequence)
        if not answering or self._needs(answering) > self.pages.free:
            return None
        step = Step(self.changes(), answering)
        for sequence in answering:
            self.pages.append(sequence.arrival, 1 + len(sequence.drafts))
        return step

    def _needs(self, sequences: Iterable[Sequence]) -> int:
        return sum(self.pages.need(s.arrival, 1 + len(s.drafts)) for s in sequences)

    def changes(self) -> list[Change]:
        """What has happened since the last step began, which the cache is to be told before anything else is computed in it."""
        changes, self._changes = self._changes, []
        return changes

    def computed(self, sequence: Sequence, count: int) -> None:
        """Count tokens that a step has computed, and give back the places of others that it has."""
        sequence.computed += count
        mine, known = sequence.arrival, sequence.computed
        if self.pages.length(mine) > known:
            self.pages.truncate(mine, known)
            self._changes.append(Cut(mine, known))
        if not self.limits.reuse_answers:
            known = min(known, sequence.prompt)
        if self.shares:
            self.prefixes.add(mine, sequence.tokens, known, sequence.own)
            if count and not sequence.computed % self.limits.chunk:
                self._save(sequence)

    def _save(self, sequence: Sequence) -> None:
        """Have the states of a sequence saved for others that begin alike, if there are pages for what they hold."""
        if not self.prefixes.lacks_states(sequence.arrival, sequence.computed):
            return
        held = 0 if self.window is None else min(self.window + self.limits.page_size, sequence.computed)
        if held and not self._make_room(self.pages.of(held) + len(self.running), self._changes):
            return
        number, gone = self.prefixes.save(sequence.arrival, sequence.computed)
        self._forget_states(gone, self._changes)
        if held:
            self.pages.add(_holder(number))
            self.pages.append(_holder(number), held)
        self._changes.append(Save(number, sequence.arrival))

    def _forget_states(self, numbers: Iterable[int], changes: list[Change]) -> None:
        for number in numbers:
            if _holder(number) in self.pages:
                self.pages.drop(_holder(number))
            changes.append(Forget(number))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whether it waits or runs; what others may use of it is remembered."""
        if sequence not in self.running:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        mine = sequence.arrival
        known = self.prefixes.length(mine)
        others = {other for other in self.prefixes.within(mine) if other in self.remembered}
        if not known or not self.limits.remembers:
            self._forget(mine, self._changes)
            return
        for other in others:
            del self.remembered[other]
            self._forget(other, self._changes)
        self.pages.truncate(mine, known)
        self._changes.append(Remember(mine, known))
        self.remembered[mine] = sequence

    def forget(self) -> None:
        """Forget all sequences that are remembered after their end."""
        while self.remembered:
            self._forget(self.remembered.popitem()[0], self._changes)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running)

    def _chunk(self, sequence: Sequence) -> int:
        """How many tokens of its prompt come next: up to the grid's next line."""
        at, chunk = sequence.computed, self.limits.chunk
        return min((at // chunk + 1) * chunk, sequence.prompt) - at

    def _rest(self, sequence: Sequence) -> int:
        """How many tokens of its prompt may come next, where they come in any pieces: up to where its states are to be saved."""
        return sequence.prompt - sequence.computed if self.snapshots is None else self._chunk(sequence)

    def _admit(self, step: Step) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            found = self._find(sequence)
            source, length, states = found or (None, 0, None)
            sequence.ahead, sequence.common = self._ahead(sequence, length)
            margin = sum(max(self._missing(s, self.pages.length(s.arrival)), 1) for s in self.running)
            wanted = self._missing(sequence, length) + margin
            must_wait = self.pages.free < wanted and wanted > self._most_free(found)
            if must_wait and (self.running or source is None):
                return
            if not self._make_room(wanted, step.changes, source, states):
                self._make_room(
                    wanted, step.changes
                )  # the one whose pages it would share holds what it needs
                continue
            self.waiting.popleft()
            self.running.append(sequence)
            self._make(sequence, found, step)

    def _go_on(self, step: Step) -> None:
        """Have those go on that have waited for what is computed now, or for one that is gone."""
        for sequence in self.running:
            ahead = sequence.ahead
            if ahead is None or (ahead.computed < sequence.common and ahead in self.running):
                continue
            found = self._find(sequence)
            if found is not None and found.length > sequence.computed:
                self._forget(sequence.arrival, step.changes)
                self._make(sequence, found, step)
            sequence.ahead, sequence.common = self._ahead(sequence, sequence.computed)

    def _find(self, sequence: Sequence) -> Found | None:
        return self.prefixes.find(sequence.tokens, sequence.prompt - 1, sequence.own)

    def _ahead(self, sequence: Sequence, known: int) -> tuple[Sequence | None, int]:
        if not self.shares or self.snapshots == 0:
            return None, 0
        older = takewhile(lambda other: other is not sequence, self.running)
        return ahead_of(
            sequence, older, known, self.prefixes.grain if self.snapshots is None else self.limits.chunk
        )

    def _make(self, sequence: Sequence, found: Found | None, step: Step) -> None:
        """Begin a sequence, with what was found of it."""
        source, length, states = found or (None, 0, None)
        sequence.computed = length
        if source is None:
            self.pages.add(sequence.arrival)
        else:
            self.pages.fork(source, length, sequence.arrival)
            if source in self.remembered:
                self.remembered.move_to_end(source)
        sequence.cached = max(sequence.cached, length)
        step.changes.append(Make(sequence.arrival, source, length, states, sequence.adapter))

    def _missing(self, sequence: Sequence, length: int) -> int:
        """How many pages its tokens and one more need beside those of the first `length`, and what another is about to compute."""
        known = max(length, sequence.common)
        return self.pages.of(min(len(sequence.tokens) + 1, sequence.most)) - self.pages.of(known)

    def _reserve(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Give a sequence places for more tokens, others' if need be; False if it had to give back its own."""
        while not self._make_room(self.pages.need(sequence.arrival, count), step.changes):
            victim = self.running.pop()
            self.preemptions += 1
            victim.computed = 0
            step.decode = [sequence for sequence in step.decode if sequence is not victim]
            step.chunks = [(sequence, count) for sequence, count in step.chunks if sequence is not victim]
            self._forget(victim.arrival, step.changes)
            insort(self.waiting, victim, key=lambda waiting: waiting.arrival)
            if victim is sequence:
                return False
        self.pages.append(sequence.arrival, count)
        return True

    def _without_drafts(self, sequence: Sequence) -> None:
        """Give back the places of drafts that have some."""
        held, sequence.drafts = sequence.computed + 1, []
        if sequence in self.running and self.pages.length(sequence.arrival) > held:
            self.pages.truncate(sequence.arrival, held)

    def _most_free(self, found: Found | None) -> int:
        """How many pages can be free beside those of sequences that run, and those of what was found."""
        kept = [sequence.arrival for sequence in self.running]
        if found is not None:
            kept += [found.sequence] if found.states is None else [found.sequence, _holder(found.states)]
        return self.limits.pages - self.pages.held_by(kept)

    def _make_room(
        self, wanted: int, changes: list[Change], but: int | None = None, states: int | None = None
    ) -> bool:
        """Have so many pages free: what was used least recently gives them back, then states that hold some, but not these. False if there are too few."""
        while self.pages.free < wanted:
            oldest = next((arrival for arrival in self.remembered if arrival != but), None)
            if oldest is not None:
                self._shorten(oldest, wanted, changes)
                continue
            gone = self.prefixes.forget_states(but=states) if self.window is not None else []
            if not gone:
                return False
            self._forget_states(gone, changes)
        return True

    def _shorten(self, sequence: int, wanted: int, changes: list[Change]) -> None:
        """Have a sequence that is remembered give back pages from its end, until so many are free."""
        length = self.prefixes.length(sequence)
        while length and self.pages.free < wanted:
            length -= self.prefixes.grain
            self.pages.truncate(sequence, length)
            self._forget_states(self.prefixes.cut(sequence, length), changes)
        if length:
            changes.append(Remember(sequence, length))
        else:
            del self.remembered[sequence]
            self._forget(sequence, changes)

    def _forget(self, sequence: int, changes: list[Change]) -> None:
        self.pages.drop(sequence)
        changes.append(Drop(sequence))
        self._forget_states(self.prefixes.cut(sequence, 0), changes)


def _holder(states: int) -> int:
    """By which number states hold pages, which is no sequence's."""
    return ~states
