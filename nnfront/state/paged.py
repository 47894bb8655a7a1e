# SPDX-License-Identifier: Apache-2.0
"""The paged cache: sequences take pages from a pool when they need them, and may share them.

A page that several sequences hold is copied when one of them writes to it. Pages that lie wholly behind a window go back to the pool.
Caches that were forked from each other share their pool and belong to one caller together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from nnfront.dims import Size
from nnfront.errors import RunError
from nnfront.lower import CacheLayerType, CacheType
from nnfront.state.cache import Cache, Use
from nnfront.state.layer import CacheLayer, LayerState, Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.page_pool import Pool
from nnfront.state.page_table import PageTable, View
from nnfront.state.quantize import Parts, buffers, decode, encode


class PagedLayer(CacheLayer):
    """One layer, in buffers [kv_heads, pages, page_size, head_size] of the pool: there, gathered pages need no second copy."""

    __slots__ = ("_parts", "table")

    def __init__(
        self,
        type: CacheLayerType,
        table: PageTable,
        parts: Parts,
        state: LayerState,
        first: int,
    ) -> None:
        super().__init__(type, state, first)
        self.table = table
        self._parts = parts

    @property
    def key_pages(self) -> torch.Tensor:
        """The keys in all pages of the pool: [pages, kv_heads, page_size, head_size]."""
        return self.storage.keys

    @property
    def value_pages(self) -> torch.Tensor:
        """The values in all pages of the pool: [pages, kv_heads, page_size, head_size]."""
        return self.storage.values

    @property
    def page_table(self) -> torch.Tensor:
        """The pages of each sequence, in the order of its tokens: int32 [batch, pages at most], -1 where there is none."""
        return self.table.pages_tensor.narrow(0, self._first, self.batch)

    @property
    def lengths_tensor(self) -> torch.Tensor:
        """How many tokens of each sequence have a page: int32 [batch]. In a call, those with the call's own."""
        return self.table.lengths_tensor.narrow(0, self._first, self.batch)

    @property
    def storage(self) -> Storage:
        return Storage.of(tuple(part.transpose(0, 1) for part in self._parts), self.page_table)

    def take(self, seq: int) -> None:
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise self._full(before, seq)
        self.table.reserve(before, self._first, self.batch, seq)
        self._state.lengths = self._state.lengths.grow(self._first, self.batch, seq)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        before, seq = self.lengths, k.shape[1]
        self.take(seq)
        slots = self.table.slots(before, self._first, self.batch, seq)
        for pages, new in zip(self._parts, encode(k, v, len(self._parts) > 2), strict=True):
            pages.flatten(1, 2)[:, slots] = new.permute(2, 0, 1, 3)

    def keys(self) -> torch.Tensor:
        return self._read(0)

    def values(self) -> torch.Tensor:
        return self._read(1)

    def _read(self, index: int) -> torch.Tensor:
        parts = tuple(_read(part, self._view) for part in self._parts)
        return decode(parts, index, getattr(torch, self.type.dtype))

    def key_positions(self) -> torch.Tensor:
        return self._view.positions(self.lengths.device)

    def release(self) -> None:
        pass  # what the tokens saw lies in pages until the next ones come

    @property
    def _view(self) -> View:
        return self.table.view(self.lengths, self._first, self.batch)

    @property
    def slot_order(self) -> Hashable:
        return self._view.starts

    def keeps(self, row: int, length: int) -> bool:
        return self.table.keeps(self._first + row, length)

    def part(self, first: int, count: int) -> PagedLayer:
        type = replace(self.type, batch=count)
        return PagedLayer(type, self.table, self._parts, self._state, self._first + first)


def _read(pages: torch.Tensor, view: View) -> torch.Tensor:
    """Gather [kv_heads, pages, page_size, head_size] into [sequences, kv_heads, stored, head_size]; no copy if they lie in order."""
    if view.index is None:
        assert view.first is not None
        size = pages.shape[2]
        return pages.flatten(1, 2).narrow(1, view.first * size, view.stored).unsqueeze(0)
    return pages[:, view.index].flatten(2, 3).narrow(2, 0, view.stored).transpose(0, 1)


class PagedCache(Cache):
    """A cache whose sequences share a pool of pages; layers with another window have a pool of their own, of as many pages."""

    __slots__ = ("tables",)

    _layers: tuple[PagedLayer, ...]

    def __init__(self, type: CacheType, layers: Sequence[CacheLayer], use: Use | None = None) -> None:
        super().__init__(type, layers, use)
        self.tables: tuple[PageTable, ...] = tuple(dict.fromkeys(layer.table for layer in self._layers))

    @property
    def lengths_tensor(self) -> torch.Tensor:
        return self._layers[0].lengths_tensor if self._layers else torch.empty(0, dtype=torch.int32)

    @property
    def page_size(self) -> int:
        """How many tokens a page holds."""
        return self.tables[0].pool.page_size

    @property
    def pages(self) -> int:
        """How many pages the pools have."""
        return sum(table.pool.pages for table in self.tables)

    @property
    def free_pages(self) -> int:
        """How many pages of the pools no sequence holds, of this cache or of one that shares them."""
        for table in self.tables:
            table.pool.settle()
        return sum(table.pool.free for table in self.tables)

    @property
    def used_pages(self) -> int:
        """How many pages of the pools are held."""
        return self.pages - self.free_pages

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for table in self.tables for buffer in table.pool.buffers)

    def clone(self) -> PagedCache:
        def copy(table: PageTable, sequences: Sequence[int], states: Sequence[LayerState]) -> PageTable:
            return table.clone(table.pool.clone(), sequences, states)

        return self._copied(tuple(range(self.batch)), copy, Use())

    def _fork(self, sequences: tuple[int, ...]) -> PagedCache:
        return self._copied(sequences, PageTable.fork, self.use)

    def _copied(
        self,
        sequences: tuple[int, ...],
        copy: Callable[[PageTable, Sequence[int], Sequence[LayerState]], PageTable],
        use: Use,
    ) -> PagedCache:
        states = [LayerState(lengths, {}) for lengths in self._lengths_of(sequences)]
        first = self._layers[0]._first if self._layers else 0
        layers: dict[int, PagedLayer] = {}
        for table in self.tables:
            mine = [i for i, layer in enumerate(self._layers) if layer.table is table]
            new = copy(table, [first + i for i in sequences], [states[i] for i in mine])
            layers |= _layers_of(new, {i: replace(self._layers[i].type, batch=len(sequences)) for i in mine})
        return self._with([layers[i] for i in range(len(self))], use)

    def _set(self, lengths: SequenceLengths) -> None:
        super()._set(lengths)
        for table in self.tables:
            table.cut(self._layers[0]._first, lengths)

    def __repr__(self) -> str:
        pages = f"{self.free_pages} of {self.pages} pages of {self.page_size} free"
        return f"{super().__repr__()[:-1]}, {pages}>"


def _layers_of(table: PageTable, types: dict[int, CacheLayerType]) -> dict[int, PagedLayer]:
    """The layers of a table by their index in the cache, whose types are given in order."""
    buffers, each = table.pool.buffers, len(table.pool.buffers) // max(len(types), 1)
    return {
        i: PagedLayer(type, table, buffers[each * n : each * (n + 1)], state, 0)
        for n, ((i, type), state) in enumerate(zip(types.items(), table.states, strict=True))
    }


def make_paged(
    cache: CacheType,
    page_size: int | None,
    pages: int | None,
    device: torch.device,
    *,
    allowed: Sequence[int] | None = None,
    coded: bool = False,
) -> PagedCache:
    """Make an empty paged cache of a type whose dims are numbers; `pages` is by default what all sequences need at their longest.

    Raises RunError for a page size that is no power of two, or not `allowed`, or a number of pages that is none.
    """
    if allowed is not None and page_size not in allowed:
        raise RunError(
            f"make_cache: page_size is {page_size!r}, the kernels of this target read pages of {', '.join(map(str, allowed))}",
            help=f"make_cache(..., page_size={allowed[0]})",
        )
    if type(page_size) is not int or page_size < 1 or page_size & (page_size - 1):
        raise RunError(
            f"make_cache: page_size is {page_size!r}, expected a power of two",
            help="make_cache(..., page_size=16)" + (", or leave out pages" if page_size is None else ""),
        )
    if pages is not None and (type(pages) is not int or pages < 1):
        raise RunError(f"make_cache: pages is {pages!r}, expected a positive int")
    layers: dict[int, PagedLayer] = {}
    groups: dict[tuple[int | None, Size, Size], dict[int, CacheLayerType]] = {}
    for i, layer in enumerate(cache.layers):
        groups.setdefault((layer.window, layer.batch, layer.max_seq), {})[i] = layer
    for (window, batch, max_seq), types in groups.items():
        assert isinstance(batch, int)
        assert isinstance(max_seq, int)
        columns = -(-max_seq // page_size)
        count = batch * columns if pages is None else pages
        pool = Pool(page_size, _buffers(types.values(), count, page_size, device, coded), count)
        # One object for all layers: they know by it that they go through the same lengths.
        empty = SequenceLengths((0,) * batch, device)
        states = [LayerState(empty, {}) for _ in types]
        rows: list[list[int]] = [[] for _ in range(batch)]
        table = PageTable(pool, window, states, rows, [0] * batch, columns, device)
        layers |= _layers_of(table, types)
    return PagedCache(cache, [layers[i] for i in range(len(cache.layers))])


def _buffers(
    types: Iterable[CacheLayerType], pages: int, page_size: int, device: torch.device, coded: bool
) -> list[torch.Tensor]:
    """Those of all layers, one after the other."""
    return [
        part
        for layer in types
        for part in buffers((layer.kv_heads, pages, page_size, layer.head_size), layer.dtype, coded, device)
    ]
