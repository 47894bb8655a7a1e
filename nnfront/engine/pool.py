# SPDX-License-Identifier: Apache-2.0
"""Sequences that come and go, in one paged cache whose rows they are.

Rows that are to be computed in one call lie next to each other. A fork of the whole cache puts them there: it copies page numbers and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.engine.schedule import Change, Cut, Limits, Make
from nnfront.session import Session
from nnfront.state.cache import Cache

FILLER = -1
"""The number of rows of nobody's. One makes a single row two where kernels add up one row in another order than several."""
SHORT = 32
"""Tokens of a row of nobody's."""


def company(session: Session, count: int = 1) -> bool:
    """Whether a single sequence of a call of `count` tokens needs another row for its sums to have the order that those of several have."""
    return count == 1 and session.backend.adds_single_rows_otherwise


class Pool:
    """The cache of an engine; sequences are known by their number.

    A cache that is given, for as many sequences as there ever are and a row of nobody's besides if `company` says so, may be one without pages: there each sequence keeps its row.
    """

    def __init__(
        self, session: Session, limits: Limits, stored_as: str | None = None, given: Cache | None = None
    ) -> None:
        self._session, self._limits, self._stored_as, self._given = session, limits, stored_as, given
        self.reset()

    def reset(self) -> None:
        """Begin with an empty cache, whatever was in the one before."""
        limits = self._limits
        batch = limits.max_num_seqs + limits.remembered + 2
        self._cache: Cache | None = None  # its memory may be needed
        self._views: dict[tuple[int, int], Cache] = {}
        self._row: dict[int, int] = {}
        if self._given is not None:
            self._cache, self._free = self._given, list(reversed(range(self._given.batch)))
            self._given.reset()
            return
        self._cache = self._session.make_cache(
            batch=batch,
            max_seq=limits.max_model_len,
            pages=limits.pages + 1,  # the filler's
            page_size=limits.page_size,
            stored_as=self._stored_as,
        )
        self._free = list(range(batch))
        self._row[FILLER] = self._free.pop()

    @property
    def cache(self) -> Cache:
        """The cache as it is now; another one after the next change."""
        assert self._cache is not None
        return self._cache

    @property
    def shares(self) -> bool:
        """Whether a sequence can begin with any part of another: not where layers keep a state of the whole, or drop tokens behind a window."""
        longest = self._limits.max_model_len
        return not any(
            layer.per_sequence or (layer.window is not None and layer.window < longest)
            for layer in self.cache.type.layers
        )

    @property
    def forgets(self) -> bool:
        """Whether the last tokens can be taken back: not where layers keep a state of the whole."""
        return not any(layer.per_sequence for layer in self.cache.type.layers)

    def apply(self, changes: Sequence[Change]) -> None:
        """Begin, cut and forget sequences, in this order."""
        for change in changes:
            if isinstance(change, Make):
                row = self._row[change.sequence] = self._free.pop()
                if change.source is not None:
                    order = list(range(self.cache.batch))
                    order[row] = self._row[change.source]
                    self._fork(order)
                    self._cut(row, change.length)
            elif isinstance(change, Cut):
                self._cut(self._row[change.sequence], change.length)
            else:
                row = self._row.pop(change.sequence)
                self._cut(row, 0)
                self._free.append(row)

    def row(self, sequence: int) -> Cache:
        """One sequence."""
        return self._view(self._row[sequence], 1)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first tokens of a sequence."""
        view = self.row(sequence)
        if view.length() > length:
            view.truncate(length)

    def rows(self, sequences: Sequence[int], most: int, count: int = 1) -> list[tuple[list[int], Cache]]:
        """Some sequences in groups of up to so many, for a call of `count` tokens of each: who they are, in the order of the rows, and the rows.

        `FILLER` may be among them.
        """
        if not sequences:
            return []
        if self._given is not None:
            placed = self._as_they_lie(count)
        else:
            placed = self._together(sequences, most, count)
        return [
            (placed[i : i + most], self._view(i, min(most, len(placed) - i)))
            for i in range(0, len(placed), most)
        ]

    def _as_they_lie(self, count: int) -> list[int]:
        """All rows; those of nobody's are computed as well, and are to stay short."""
        placed = [FILLER] * self.cache.batch
        for sequence, row in self._row.items():
            placed[row] = sequence
        for row, sequence in enumerate(placed):
            if sequence == FILLER and self._view(row, 1).length() + count > min(SHORT, self.cache.max_seq):
                self._cut(row, 0)
        return placed

    def _together(self, sequences: Sequence[int], most: int, count: int) -> list[int]:
        """Some sequences, in the first rows."""
        if len(sequences) % most == 1 and company(self._session, count):
            self._cut(self._row[FILLER], 0)
            sequences = [*sequences, FILLER]
        if {self._row[s] for s in sequences} != set(range(len(sequences))):
            self._to_front(sequences)
        return sorted(sequences, key=self._row.__getitem__)

    def _to_front(self, sequences: Sequence[int]) -> None:
        wanted = {self._row[s] for s in sequences}
        holes = [row for row in range(len(wanted)) if row not in wanted]
        order = list(range(self.cache.batch))
        for hole, row in zip(holes, sorted(row for row in wanted if row >= len(wanted)), strict=True):
            order[hole], order[row] = row, hole
        self._fork(order)
        self._row = {sequence: order[row] for sequence, row in self._row.items()}  # swaps undo themselves
        self._free = [order[row] for row in self._free]

    def _fork(self, order: list[int]) -> None:
        self._views.clear()
        self._cache = self.cache.fork(order)

    def _cut(self, row: int, length: int) -> None:
        view = self._view(row, 1)
        if length:
            view.truncate(length)
        else:
            view.reset()  # which a window that has dropped tokens allows, too

    def _view(self, first: int, count: int) -> Cache:
        if count == self.cache.batch:
            return self.cache
        view = self._views.get((first, count))
        if view is None:
            view = self._views[first, count] = self.cache.rows(first, first + count)
        return view
