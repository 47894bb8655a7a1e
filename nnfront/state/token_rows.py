# SPDX-License-Identifier: Apache-2.0
"""A paged cache as a call sees it that computes tokens of answers and of prompts together: a row for each token.

Tokens of one sequence are rows next to each other, each one longer than the one before. A decoding call appends all of its rows before any of them attends, so
each token sees those of its sequence before it, whether they come in this call or came in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nnfront.lower import StateLayerType, StateType
from nnfront.state.cache import Cache
from nnfront.state.fixed import full
from nnfront.state.layer import Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.page_table import PageTable
from nnfront.state.paged import PagedCache, PagedLayer
from nnfront.state.use import LayerState


class _Rows:
    """The rows of one page table: `counts` says of which sequences, and of how many tokens of each."""

    def __init__(self, table: PageTable, counts: Sequence[tuple[int, int]]) -> None:
        self.table = table
        self._counts = tuple(counts)
        device = table.pages_tensor.device
        each = [sequence for sequence, count in counts for _ in range(count)]
        self._index = torch.tensor(each, dtype=torch.int64, device=device)
        self.pages = table.pages_tensor.new_empty((len(each), table.pages_tensor.shape[1]))
        self._reserved: SequenceLengths | None = None

    def reserve(self, before: SequenceLengths) -> None:
        """Find pages for all tokens, of sequences that had so many: once for all layers. Raises RunError if there are too few."""
        if self._reserved is before:
            return
        for sequence, count in self._counts:
            self.table.reserve(before.part(sequence, 1), sequence, 1, count)
        torch.index_select(self.table.pages_tensor, 0, self._index, out=self.pages)
        self._reserved = before

    def grown(self, before: SequenceLengths) -> SequenceLengths:
        """The lengths of all sequences of the cache behind the call."""

        def make() -> SequenceLengths:
            values = list(before.values)
            for sequence, count in self._counts:
                values[sequence] += count
            return before.like(tuple(values))

        return before.remember(("rows", self._counts), make)


class TokenRowsLayer(PagedLayer):
    """One layer, with a row for each token."""

    __slots__ = ("_rows", "_whole")

    def __init__(self, type: StateLayerType, whole: PagedLayer, rows: _Rows, state: LayerState) -> None:
        self._rows, self._whole = rows, whole
        super().__init__(type, whole.table, whole._parts, state, 0, {})

    @property
    def page_table(self) -> torch.Tensor:
        return self._rows.pages

    def take(self, seq: int) -> None:
        assert seq == 1, "each row is one token"
        mine, whole = self._state.lengths, self._whole._state
        if mine.longest + 1 > self.max_seq:
            raise full(mine, seq, self.max_seq)
        self._rows.reserve(whole.lengths)
        whole.lengths = self._rows.grown(whole.lengths)
        self._state.lengths = mine.grow(0, self.batch, seq)

    def reserve_tokens(self, seq: int) -> Storage | None:
        return self.reserve(seq) if seq == 1 and self.has_capacity(seq) else None


class TokenRows(PagedCache):
    """The next tokens of some sequences of a cache, a row for each: for one decoding call."""

    __slots__ = ("_before", "_whole")

    def __init__(self, whole: PagedCache, counts: Sequence[tuple[int, int]]) -> None:
        """`counts`: which sequences of the cache, each once, and how many tokens of each come."""
        assert can_be_rows(whole)
        self._whole, self._before = whole, whole._lengths
        starts = ((self._before.values[sequence], count) for sequence, count in counts)
        lengths = self._before.like(tuple(start + i for start, count in starts for i in range(count)))
        rows = {table: _Rows(table, counts) for table in whole.tables}
        types = {type: replace(type, batch=len(lengths.values)) for type in set(whole.type.layers)}
        layers = [
            TokenRowsLayer(types[layer.type], layer, rows[layer.table], LayerState(lengths, whole.use))
            for layer in whole._paged
        ]
        super().__init__(StateType(tuple(layer.type for layer in layers)), layers, whole.use)

    def _set(self, lengths: SequenceLengths) -> None:
        """Go back to before the call, the sequences too."""
        Cache._set(self, lengths)
        self._whole._set(self._before)


def can_be_rows(cache: Cache) -> bool:
    """Whether tokens of a sequence can be rows of one call: where all that layers keep are pages of tokens."""
    return all(isinstance(layer, PagedLayer) and not layer.fixed for layer in cache)
