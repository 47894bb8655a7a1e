# SPDX-License-Identifier: Apache-2.0
"""What a step computes, by one process or by several: rank 0 says what, and all do the same to a cache of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import NamedTuple, TypeAlias

import torch

from nnfront.backends.device import sent
from nnfront.distributed.ranks import ALONE, Ranks, end_with
from nnfront.engine.changes import Change
from nnfront.engine.likely import Row
from nnfront.engine.pool import Pool
from nnfront.engine.schedule import Limits
from nnfront.engine.speculate import MOST_GUESSED
from nnfront.llm.methods import EXTEND, STEP, WITH_HIDDEN
from nnfront.session import Session
from nnfront.state.between import between_steps, set_aside
from nnfront.state.cache import Cache


class Work(NamedTuple):
    """One step: what happens to sequences, the next tokens of those that go on, of each as many, and the tokens of prompts; sequences by number."""

    changes: Sequence[Change]
    decode: dict[int, list[int]]
    chunks: Sequence[tuple[int, list[int]]]


class Computed(NamedTuple):
    """What came of one call: which sequences it was for, what is taken of the logits that it gives of each, 1 row of [vocab] or more, how long it took,
    and what the model's head read of each token, if that was wanted: [sequences, tokens, hidden_size]."""

    sequences: Sequence[int]
    rows: Sequence[Sequence[Row | int]]
    seconds: float
    hidden: torch.Tensor | None


Counts: TypeAlias = Sequence[tuple[int, int]]
"""Numbers of sequences, one may be there twice, and how many rows each has."""
Take: TypeAlias = Callable[[Counts, torch.Tensor], list[Row | int]]
"""Take of the logits [rows, vocab] of sequences what is wanted of each row."""


def _take_nothing(counts: Counts, logits: torch.Tensor) -> list[Row | int]:
    return [-1] * len(logits)


class Compute:
    """The model and the cache that sequences are computed in: `pool`, a part of it on each rank."""

    def __init__(
        self,
        session: Session,
        limits: Limits,
        *,
        stored_as: str | None = None,
        given: Cache | None = None,
        ranks: Ranks = ALONE,
        decode_rows: int | None = None,
        has_adapters: bool = False,
        hidden: bool = False,
    ) -> None:
        """`stored_as`, `given`: as for `Pool`. `has_adapters`: methods take the number of each sequence's adapter, too. `hidden`: give what the model's head reads of each token, too.
        `decode_rows`: of one call, at most; without it those of the back end.

        Raises RunError where it does not fit into memory, or the model cannot have one with pages.
        """
        self.session, self._ranks = session, ranks
        self.decode_rows = decode_rows or session.backend.decode_rows
        self._has_adapters, self.gives_hidden = has_adapters, hidden
        self._most_rows = limits.step_tokens + limits.max_num_seqs * (1 + MOST_GUESSED)
        with ranks.together():
            self.pool = Pool(session, limits, stored_as, given)

    @cached_property
    def packs(self) -> bool:
        """Whether one call computes tokens of answers and of prompts together, each with the bits that it has alone: where it is made of kernels of which a row
        of a call knows nothing of the others, and all that the cache keeps are pages of tokens."""
        method = self.session.program.methods.get(STEP)
        is_plain = self._ranks.world == 1 and not self._has_adapters and not self.gives_hidden
        return (
            is_plain
            and method is not None
            and self.pool.can_be_rows
            and self.session.backend.packs(method, self._most_rows)
        )

    @property
    def can_be_set_aside(self) -> bool:
        """Whether other calls can be made between the steps of one: where nothing is captured, and no other rank has to do the same."""
        return self._ranks.world == 1 and not self.session.backend.captures

    def run(
        self,
        work: Work,
        between: Callable[[], None] | None = None,
        beside: Sequence[int] = (),
        take: Take = _take_nothing,
    ) -> Iterator[Computed]:
        """Compute a step, call by call. On rank 0; other ranks compute their part of it. `take`: what the host takes of logits.

        `between`: what is done between the steps of a call for tokens of a prompt, which may compute tokens of the sequences `beside`, in `set_aside`.
        With several ranks an error ends the process, and so all of them: one that has gone on waits for those that have not.
        """
        if self._ranks.world == 1:
            yield from self._run(work, between, beside, take)
            return
        try:
            self._ranks.from_first(work)
            computed = list(
                self._run(work, take=take)
            )  # whatever becomes of it here, others compute all of it
        except Exception as error:
            end_with(error)
        yield from computed

    def follow(self) -> None:
        """Compute what rank 0 says until it says that this is all. On other ranks."""
        while (work := self._ranks.from_first(None)) is not None:
            for _ in self._run(work):
                pass

    def close(self) -> None:
        """Let the other ranks end."""
        self._ranks.from_first(None)

    def set_aside(self) -> AbstractContextManager[None]:
        """Inside of this, between two steps of a call, other calls can be made."""
        return set_aside(self.pool.cache.use)

    def _run(
        self,
        work: Work,
        between: Callable[[], None] | None = None,
        beside: Sequence[int] = (),
        take: Take = _take_nothing,
    ) -> Iterator[Computed]:
        self.pool.apply(work.changes)
        if self.packs:
            if work.decode or work.chunks:
                yield self._packed(work, take)
            return
        for number, chunk in work.chunks:
            self.pool.keep_apart(beside, self.decode_rows)
            with between_steps(between):
                computed = self._call("prefill", [number], [chunk], self.pool.row(number), take)
            yield computed
        width = max(map(len, work.decode.values()), default=1)
        method = "decode" if width == 1 else EXTEND
        for numbers, rows in self.pool.rows(list(work.decode), self.decode_rows // width, width):
            if width > 1:
                # What was guessed may be wrong, and is cut off before anything else is computed that would let a window drop more.
                self.pool.save(numbers)
            tokens = [work.decode.get(n, [0] * width) for n in numbers]
            yield self._call(method, numbers, tokens, rows, take)

    def _packed(self, work: Work, take: Take) -> Computed:
        """All in one call: of answers the logits of each token, of prompts of the last one."""
        began = time.perf_counter()
        chunks = dict(work.chunks)
        tokens = work.decode | chunks
        ends = list(accumulate(map(len, tokens.values())))
        firsts = (end - (1 if n in chunks else len(tokens[n])) for n, end in zip(tokens, ends, strict=True))
        wanted = [range(first, end) for first, end in zip(firsts, ends, strict=True)]
        rows = self.pool.token_rows({n: len(each) for n, each in tokens.items()})
        device = self.session.device
        logits = self.session[STEP](
            sent([*chain(*tokens.values())], torch.int64, device)[:, None],
            rows,
            sent([*chain(*wanted)], torch.int64, device),
        )
        counts = [(number, len(rows)) for number, rows in zip(tokens, wanted, strict=True)]
        found = _of_each(take, counts, logits[:, 0])
        return Computed([*tokens], found, time.perf_counter() - began, None)

    def _call(
        self, method: str, sequences: Sequence[int], tokens: list[list[int]], rows: Cache, take: Take
    ) -> Computed:
        began = time.perf_counter()
        compute = self.session[WITH_HIDDEN[method] if self.gives_hidden else method]
        device = self.session.device
        chosen = [*map(self.pool.adapter, sequences)] if self._has_adapters else None
        more = [] if chosen is None else [sent(chosen, torch.int32, device)]
        result = compute(sent(tokens, torch.int64, device), rows, *more)
        logits, hidden = result if self.gives_hidden else (result, None)
        wanted = logits[:, -1:] if method == "prefill" else logits
        found = _of_each(take, [(number, wanted.shape[1]) for number in sequences], wanted.flatten(0, 1))
        return Computed(sequences, found, time.perf_counter() - began, hidden)


def _of_each(take: Take, counts: Counts, logits: torch.Tensor) -> list[list[Row | int]]:
    """What is taken of the logits [rows, vocab] of sequences, of each so many."""
    rows = iter(take(counts, logits))
    return [[*islice(rows, count)] for _, count in counts]
