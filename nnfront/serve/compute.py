# SPDX-License-Identifier: Apache-2.0
"""What a step of the engine computes, by one process or by several: rank 0 says what, and all do the same to a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nnfront.distributed.ranks import end_with
from nnfront.llm.language_model import LLM
from nnfront.serve.draw import Row
from nnfront.serve.pool import Pool
from nnfront.serve.schedule import Change, Limits

DECODE_ROWS = 32
"""Rows of one decoding call: from two to so many, a CPU's own kernels add up each row in one order."""


class Work(NamedTuple):
    """One step: what happens to sequences, the last token of those that go on, and the tokens that others append; sequences by number."""

    changes: Sequence[Change]
    decode: dict[int, int]
    chunks: Sequence[tuple[int, list[int]]]


class Compute:
    """The model and the cache behind an engine: `pool`, a part of it on each rank."""

    def __init__(self, llm: LLM, limits: Limits, decode_rows: int = DECODE_ROWS) -> None:
        """Raises RunError where it does not fit into memory, or the model cannot have one with pages."""
        self._session, self._ranks, self._decode_rows = llm.session, llm.ranks, decode_rows
        with self._ranks.together():
            self.pool = Pool(llm.session, limits, llm.stored_as)
        self.shares = self.pool.shares

    def run(self, work: Work) -> dict[int, Row]:
        """Return the logits behind each sequence's last token. On rank 0; other ranks compute their part of them.

        With several ranks an error ends the process, and so all of them: one that has gone on waits for those that have not.
        """
        if self._ranks.world == 1:
            return self._run(work)
        try:
            self._ranks.from_first(work)
            return self._run(work)
        except Exception as error:
            end_with(error)

    def follow(self) -> None:
        """Compute what rank 0 says until it says that this is all. On other ranks."""
        while (work := self._ranks.from_first(None)) is not None:
            self._run(work)

    def close(self) -> None:
        """Let the other ranks end."""
        self._ranks.from_first(None)

    def _run(self, work: Work) -> dict[int, Row]:
        session, found = self._session, dict[int, Row]()
        self.pool.apply(work.changes)
        for numbers, rows in self.pool.rows(list(work.decode), self._decode_rows):
            ids = torch.tensor([[work.decode.get(n, 0)] for n in numbers], device=session.device)
            logits = session["decode"](ids, rows)[:, -1].cpu().numpy()
            found.update(zip(numbers, logits, strict=True))
        for number, chunk in work.chunks:
            ids = torch.tensor([chunk], device=session.device)
            found[number] = session["prefill"](ids, self.pool.row(number))[0, -1].cpu().numpy()
        return found
