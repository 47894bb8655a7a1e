# SPDX-License-Identifier: Apache-2.0
"""Which pages hold the tokens of each sequence of a cache, for the layers that have one window.

The token at position p lies in page `rows[sequence][p // page_size]` at p % page_size. The first layer that appends finds pages for all of
them; the next ones, which go through the same lengths, get the same answer.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from nnfront.backends.device import sent
from nnfront.errors import RunError
from nnfront.state.fixed import Saved
from nnfront.state.lengths import SequenceLengths
from nnfront.state.page_pool import Pool
from nnfront.state.use import LayerState

# A page that a window has left behind.
GONE = -1
_STAMPS = itertools.count()


@dataclass(slots=True)
class View:
    """Where the tokens of some sequences are to be read.

    `first` is the first page, if the pages of the only sequence lie next to each other; else `index` [sequences, pages] are the pages,
    and those of a sequence that has fewer are any of its own. `stored` slots of them are in use; slot 0 is position `starts[i]`.
    """

    first: int | None
    index: torch.Tensor | None
    stored: int
    starts: tuple[int, ...]
    lengths: SequenceLengths

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position of the token in each slot: int64 [sequences, stored], -1 for an empty one."""
        lengths, starts = (sent(x, torch.int64, device)[:, None] for x in (self.lengths.values, self.starts))
        slots = starts + torch.arange(self.stored, device=device)
        return slots.masked_fill_(slots >= lengths, -1)


class PageTable:
    """The pages of each sequence. `pages_tensor` int32 [batch, pages at most] has them for kernels, -1 where there is none, and stays where it is in memory.

    `states` are those of the layers. `reserved` is how many tokens of each sequence have a page. `stamp` is another number, which no other
    table ever has, after each change of `pages_tensor`.
    """

    __slots__ = (
        "__weakref__",
        "_gone",
        "_reserved",
        "_slots",
        "_views",
        "pages_tensor",
        "pool",
        "reserved",
        "rows",
        "stamp",
        "states",
        "window",
    )

    def __init__(
        self,
        pool: Pool,
        window: int | None,
        states: Sequence[LayerState],
        rows: list[list[int]],
        reserved: list[int],
        columns: int,
        device: torch.device,
    ) -> None:
        """Takes over the counts of `rows`: the caller has counted them."""
        self.pool = pool
        self.window = window
        self.states = tuple(states)
        self.rows = rows
        self.reserved = reserved
        self._gone = [row.count(GONE) for row in rows]
        padded = [row + [GONE] * (columns - len(row)) for row in rows]
        self.pages_tensor = torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), columns)
        self.stamp = next(_STAMPS)
        self._forget()
        pool.tables.add(self)

    def __del__(self) -> None:
        self.pool.drop(page for row in self.rows for page in row if page != GONE)

    def _forget(self) -> None:
        self._reserved: tuple[SequenceLengths, tuple[int, int, int]] | None = None
        self._slots: torch.Tensor | None = None
        self._views: dict[tuple[int, int], tuple[SequenceLengths, View]] = {}

    def reserve(self, before: SequenceLengths, first: int, count: int, seq: int) -> None:
        """Find pages for `seq` more tokens of each of `count` sequences.

        Copies pages that would be written and that others hold as well. Raises RunError, with nothing changed, if there are too few pages.
        """
        known = self._reserved
        if known is not None and known[0] is before and known[1] == (first, count, seq):
            return
        # Else it has been done, and a call that fails gives nothing back.
        may_evict = self.states[0].use.journal is None
        if may_evict:
            self.evict()
        self._views.clear()
        places = self._places(before, first, seq)
        if len(places) > self.pool.free:
            if may_evict:
                self.pool.settle()
            if len(places) > self.pool.free:
                raise self._too_few(before, first, seq, len(places))
        self._take(places)
        reserved = [n + seq for n in before.values]
        reserved = [max(pair) for pair in zip(reserved, self.reserved[first : first + count], strict=True)]
        self.reserved[first : first + count] = reserved
        self._reserved = before, (first, count, seq)
        self._slots = None

    def slots(self, before: SequenceLengths, first: int, count: int, seq: int) -> torch.Tensor:
        """Where the tokens lie that were reserved last: int64 [count, seq], page * page_size + offset."""
        assert self._reserved == (before, (first, count, seq))
        if self._slots is None:
            size, device = self.pool.page_size, self.pages_tensor.device
            positions = before.positions(seq).to(device)
            pages = self.pages_tensor.narrow(0, first, count).long().gather(1, positions // size)
            self._slots = pages.mul_(size).add_(positions % size)
        return self._slots

    def _places(self, before: SequenceLengths, first: int, seq: int) -> list[tuple[int, int]]:
        """Row and column of each page that has to be found for `seq` more tokens a sequence: new ones, and copies of shared ones."""
        size, counts = self.pool.page_size, self.pool.counts
        left: Counter[int] = Counter()  # the last sequence that holds a page may keep it
        places = []
        for i, n in enumerate(before.values if seq else (), first):
            row = self.rows[i]
            end = -(-(n + seq) // size)
            for column in range(n // size, min(end, len(row))):
                if counts[row[column]] - left[row[column]] > 1:
                    left[row[column]] += 1
                    places.append((i, column))
            places += [(i, column) for column in range(len(row), end)]
        return places

    def _take(self, places: list[tuple[int, int]]) -> None:
        """Put pages into these places."""
        if not places:
            return
        pages = self.pool.take(len(places))
        sources, targets = [], []
        for (i, column), page in zip(places, pages, strict=True):
            row = self.rows[i]
            if column < len(row):
                sources.append(row[column])
                targets.append(page)
                row[column] = page
            else:
                row.append(page)
        if sources:
            self.pool.copy(sources, targets)
            self.pool.drop(sources)
        self._write([i for i, _ in places], [column for _, column in places], pages)

    def _write(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """Change entries of the tensor."""
        where = sent([rows, columns, pages], torch.int64, self.pages_tensor.device)
        self.pages_tensor[where[0], where[1]] = where[2].int()
        self.stamp = next(_STAMPS)

    def _too_few(self, before: SequenceLengths, first: int, seq: int, needed: int) -> RunError:
        count, pool = len(before.values), self.pool
        fits = bisect_right(range(seq), pool.free, key=lambda n: len(self._places(before, first, n))) - 1
        sequences = "1 sequence" if count == 1 else f"{count} sequences"
        return RunError(
            f"cache is out of pages: {seq} more tokens for {sequences} need {needed} pages of {pool.page_size}, {pool.free} of {pool.pages} are free",
            details=[f"tokens that fit: {fits} in each of them, {fits * count} in all"],
            help="make a cache with more pages, append fewer tokens, or drop, reset or truncate sequences that share the pool",
        )

    def view(self, lengths: SequenceLengths, first: int, count: int) -> View:
        """Where the tokens of some sequences lie."""
        known = self._views.get((first, count))
        if known is not None and known[0] is lengths:
            return known[1]
        view = self._look(lengths, first, count)
        self._views[first, count] = lengths, view
        return view

    def _look(self, lengths: SequenceLengths, first: int, count: int) -> View:
        size, gone = self.pool.page_size, self._gone[first : first + count]
        held = [-(-n // size) for n in lengths.values]
        width = max([0, *(h - g for h, g in zip(held, gone, strict=True))])
        stored = max([0, *(n - g * size for n, g in zip(lengths.values, gone, strict=True))])
        starts = tuple(g * size for g in gone)
        if count == 1:
            pages = self.rows[first][gone[0] : held[0]] or [0]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                return View(pages[0], None, stored, starts, lengths)
        device = self.pages_tensor.device
        first_columns, ends = (sent(x, torch.int64, device)[:, None] for x in (gone, held))
        columns = first_columns + torch.arange(width, device=device)
        columns = columns.minimum(ends - 1).clamp_(min=0)
        index = self.pages_tensor.narrow(0, first, count).long().gather(1, columns).clamp_(min=0)
        return View(None, index, stored, starts, lengths)

    def evict(self) -> None:
        """Give back the pages that no layer's next token sees, nor would if its last one were taken back."""
        if self.window is None or not self.states:
            return
        lengths = self.states[0].lengths
        values = lengths.values
        if any(state.lengths is not lengths for state in self.states):
            values = tuple(map(min, zip(*(state.lengths.values for state in self.states), strict=True)))
        for i, n in enumerate(values):
            old, new = self._gone[i], min(max(n - self.window, 0) // self.pool.page_size, len(self.rows[i]))
            if new > old:
                self.pool.drop(self.rows[i][old:new])
                self.rows[i][old:new] = [GONE] * (new - old)
                self.pages_tensor[i, old:new] = GONE
                self.stamp = next(_STAMPS)
                self._gone[i] = new
                self._forget()

    def keeps(self, row: int, length: int) -> bool:
        """Whether all that the next token would see is there, if a sequence were cut to `length` tokens."""
        if not self._gone[row] or self.window is None:
            return True
        return self._gone[row] * self.pool.page_size <= max(length - self.window + 1, 0)

    def cut(self, first: int, lengths: SequenceLengths) -> None:
        """Give back the pages behind these lengths."""
        self._forget()
        for i, n in enumerate(lengths.values, first):
            row, kept = self.rows[i], -(-n // self.pool.page_size)
            self.reserved[i] = min(self.reserved[i], n)
            if kept < len(row):
                self.pool.drop(page for page in row[kept:] if page != GONE)
                self.pages_tensor[i, kept : len(row)] = GONE
                del row[kept:]
                self._gone[i] = min(self._gone[i], kept)
                self.stamp = next(_STAMPS)

    def save(self, first: int, count: int) -> Saved:
        """Hold the pages of some sequences in a row as they are: what is written there later is written to copies."""
        held = self.fork(range(first, first + count), ())
        return Saved(0, lambda: self.put(first, held))

    def put(self, first: int, held: PageTable) -> None:
        """Have the sequences from `first` on hold the pages of a fork instead of their own."""
        self._forget()
        for i, row in enumerate(held.rows, first):
            self.pool.share(page for page in row if page != GONE)
            self.pool.drop(page for page in self.rows[i] if page != GONE)
            self.rows[i], self._gone[i] = list(row), row.count(GONE)
            self.reserved[i] = held.reserved[i - first]
        self.pages_tensor.narrow(0, first, len(held.rows)).copy_(held.pages_tensor)
        self.stamp = next(_STAMPS)

    def fork(self, sequences: Sequence[int], states: Sequence[LayerState]) -> PageTable:
        """Sequences that begin with the pages of these."""
        return self._like(self.pool, self.pool.share, sequences, states)

    def clone(self, pool: Pool, sequences: Sequence[int], states: Sequence[LayerState]) -> PageTable:
        """The same pages, of a copy of the pool that counts nothing yet."""
        return self._like(pool, pool.claim, sequences, states)

    def _like(
        self,
        pool: Pool,
        hold: Callable[[Iterable[int]], None],
        sequences: Sequence[int],
        states: Sequence[LayerState],
    ) -> PageTable:
        rows = [list(self.rows[i]) for i in sequences]
        hold(page for row in rows for page in row if page != GONE)
        reserved = [self.reserved[i] for i in sequences]
        columns = self.pages_tensor.shape[1]
        return PageTable(pool, self.window, states, rows, reserved, columns, self.pages_tensor.device)
