# SPDX-License-Identifier: Apache-2.0
"""Sequences that come and go, in one paged cache whose rows they are.

Rows that are to be computed in one call lie next to each other. A fork of the whole cache puts them there: it copies page numbers and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.serve.schedule import Change, Cut, Limits, Make
from nnfront.session import Session
from nnfront.state.cache import Cache

FILLER = -1
"""The number of a sequence of nobody's, which makes a single row two: kernels may add up one row in another order than several."""


class Pool:
    """The cache of an engine; sequences are known by their number."""

    def __init__(self, session: Session, limits: Limits, stored_as: str | None = None) -> None:
        self._session, self._limits, self._stored_as = session, limits, stored_as
        self.reset()

    def reset(self) -> None:
        """Begin with an empty cache, whatever was in the one before."""
        limits = self._limits
        batch = limits.max_num_seqs + limits.remembered + 2
        self._cache: Cache | None = None  # its memory may be needed
        self._views: dict[tuple[int, int], Cache] = {}
        self._cache = self._session.make_cache(
            batch=batch,
            max_seq=limits.max_model_len,
            pages=limits.pages + 1,  # the filler's
            page_size=limits.page_size,
            stored_as=self._stored_as,
        )
        self._row: dict[int, int] = {}
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

    def rows(self, sequences: Sequence[int], most: int) -> list[tuple[list[int], Cache]]:
        """Some sequences in groups of two to so many: who they are, in the order of the rows, and the rows. `FILLER` may be among them."""
        self._cut(self._row[FILLER], 0)
        if len(sequences) % most == 1:
            sequences = [*sequences, FILLER]
        count = len(sequences)
        if {self._row[s] for s in sequences} != set(range(count)):
            self._to_front(sequences)
        placed = sorted(sequences, key=self._row.__getitem__)
        return [
            (placed[i : i + most], self._view(i, min(most, count - i))) for i in range(0, count, max(most, 1))
        ]

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
        view = self._views.get((first, count))
        if view is None:
            view = self._views[first, count] = self.cache.rows(first, first + count)
        return view
