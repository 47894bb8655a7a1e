# SPDX-License-Identifier: Apache-2.0
"""The paged cache: sequences take pages from a pool when they need them, and may share them.

A page that several sequences hold is copied when one of them writes to it. Pages that lie wholly behind a window go back to the pool.
Caches that were forked from each other share their pool and belong to one caller together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nnfront.dims import Size
from nnfront.errors import RunError
from nnfront.lower import StateLayerType, StateType
from nnfront.state.cache import Cache
from nnfront.state.fixed import FixedStorage, Saved, full, make_fixed
from nnfront.state.layer import CacheLayer, Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.page_pool import Pool
from nnfront.state.page_table import PageTable, View
from nnfront.state.quantize import Parts, allocate, decode, encode
from nnfront.state.ring import RingLayer, make_layer
from nnfront.state.use import LayerState, Use


class PagedLayer(CacheLayer):
    """One layer, its tokens in buffers [*lead, pages, page_size, last] of the pool: there, gathered pages need no second copy."""

    __slots__ = ("_parts", "_storage", "table")

    def __init__(
        self,
        type: StateLayerType,
        table: PageTable,
        parts: Parts,
        state: LayerState,
        first: int,
        fixed: Mapping[str, FixedStorage],
    ) -> None:
        super().__init__(type, state, first, fixed)
        self.table = table
        self._parts = parts
        self._storage = Storage.of(self.placed, self.page_table)

    @property
    def page_table(self) -> torch.Tensor:
        """The pages of each sequence, in the order of its tokens: int32 [batch, pages at most], -1 where there is none."""
        return self.table.pages_tensor.narrow(0, self._first, self.batch)

    @property
    def placed(self) -> Parts:
        return self._parts.map(lambda part: part.movedim(-3, 0))

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def table_key(self) -> Hashable:
        return self.table.stamp, self._first

    def take(self, seq: int) -> None:
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise full(before, seq, self.max_seq)
        self.table.reserve(before, self._first, self.batch, seq)
        self._state.lengths = self._state.lengths.grow(self._first, self.batch, seq)

    def has_capacity(self, seq: int) -> bool:
        return self.lengths.longest + seq <= self.max_seq

    def reserve_tokens(self, seq: int) -> Storage | None:
        return self.reserve(seq) if self.has_capacity(seq) else None

    def append(self, *parts: torch.Tensor) -> None:
        before, seq = self.lengths, parts[0].shape[1]
        self.take(seq)
        slots = self.table.slots(before, self._first, self.batch, seq)
        for pages, new in zip(self._parts.all, encode(parts, bool(self._parts.scales)).all, strict=True):
            pages.flatten(-3, -2).movedim(-2, 0)[slots] = new

    def stored(self, index: int) -> torch.Tensor:
        view = self._view
        return decode(self._parts, index, self.type.per_token[index].dtype, lambda part: _read(part, view))

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
        type, fixed = replace(self.type, batch=count), self._fixed_part(first, count)
        return PagedLayer(type, self.table, self._parts, self._state, self._first + first, fixed)


def _read(pages: torch.Tensor, view: View) -> torch.Tensor:
    """Gather [*lead, pages, page_size, last] into [sequences, *lead, stored, last]; no copy if they lie in order."""
    if view.index is None:
        assert view.first is not None
        size = pages.shape[-2]
        return pages.flatten(-3, -2).narrow(-2, view.first * size, view.stored).unsqueeze(0)
    return pages[..., view.index, :, :].flatten(-3, -2).narrow(-2, 0, view.stored).movedim(-3, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The pages of the first `length` tokens of a sequence, which are not given back as long as this is there. Other sequences can begin with them."""

    length: int
    tables: tuple[PageTable, ...]

    def cut(self, length: int) -> Held:
        """The same of fewer tokens: the pages of the others are given back."""
        for table in self.tables:
            table.cut(0, SequenceLengths((length,), table.pages_tensor.device))
        return replace(self, length=length)

    def with_windows_of(self, other: Held) -> Held:
        """The same, but where tokens are dropped behind a window the pages that the other holds, and its length: it may have been before these were dropped."""
        both = zip(self.tables, other.tables, strict=True)
        return Held(other.length, tuple(mine if mine.window is None else theirs for mine, theirs in both))


class PagedCache(Cache):
    """A cache whose sequences share a pool of pages; layers with another window have a pool of their own, of as many pages."""

    __slots__ = ("_readers", "tables")

    def __init__(self, type: StateType, layers: Sequence[CacheLayer], use: Use) -> None:
        super().__init__(type, layers, use)
        self._readers = {layer.table: layer for layer in self._paged}
        self.tables: tuple[PageTable, ...] = tuple(self._readers)

    def page_tables(self) -> dict[Hashable, torch.Tensor]:
        return {layer.table_key: layer.page_table for layer in self._readers.values()}

    @property
    def _paged(self) -> Iterator[PagedLayer]:
        """The layers that keep something of tokens."""
        return (layer for layer in self._layers if isinstance(layer, PagedLayer))

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
        pools = sum(buffer.nbytes for table in self.tables for buffer in table.pool.buffers)
        return pools + sum(storage.nbytes for layer in self._layers for storage in layer.fixed.values())

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
        every_length = self._lengths_of(sequences)
        chosen = torch.tensor(sequences, dtype=torch.int64, device=self._lengths.device)
        layers: dict[int, CacheLayer] = {}
        for table in self.tables:
            mine = {
                i: layer
                for i, layer in enumerate(self._layers)
                if isinstance(layer, PagedLayer) and layer.table is table
            }
            states = [LayerState(every_length[i], use) for i in mine]
            first = next(iter(mine.values()))._first
            new = copy(table, [first + i for i in sequences], states)
            for (i, layer), state, parts in zip(mine.items(), states, new.pool.layers, strict=True):
                fixed = {name: each.copied(chosen, state.lengths, use) for name, each in layer.fixed.items()}
                type = replace(layer.type, batch=len(sequences))
                layers[i] = PagedLayer(type, new, parts, state, 0, fixed)
        for i, other in enumerate(self._layers):
            if isinstance(other, RingLayer):
                layers[i] = other.copied(chosen, every_length[i], use)
        return self._with([layers[i] for i in range(len(self))], use)

    def hold(self, length: int, *, only_windows: bool = False) -> Held:
        """Hold the pages of the first tokens of the only sequence; only those of layers that drop some behind a window, if that is all that is wanted.

        Of what layers keep of whole sequences it holds nothing: that is `states`.
        """
        assert self.batch == 1
        held = [layer.table.fork((layer._first,), ()) for layer in self._readers.values()]
        for table in held:
            is_wanted = table.window is not None or not only_windows
            table.cut(0, self._lengths.like((length if is_wanted else 0,)))
        return Held(length, tuple(held))

    def begin_with(self, held: Held) -> None:
        """Have the only sequence begin with pages that are held, of a cache that shares its pool, instead of its own tokens.

        What layers keep of the whole sequence is not that of these tokens until `go_on_from` says it.
        """
        assert self.batch == 1
        for (table, layer), pages in zip(self._readers.items(), held.tables, strict=True):
            table.put(layer._first, pages)
        self._set(self._lengths.like((held.length,)))

    def _settle(self) -> None:
        for table in self.tables:
            if table.window is not None:
                table.pool.settle()

    def _save(self) -> Iterator[Saved]:
        tables = {layer.table: (layer._first, layer.batch) for layer in self._paged}
        return (table.save(first, count) for table, (first, count) in tables.items())

    def _set(self, lengths: SequenceLengths) -> None:
        super()._set(lengths)
        for table in self.tables:
            table.cut(next(self._paged)._first, lengths)

    def __repr__(self) -> str:
        pages = f"{self.free_pages} of {self.pages} pages of {self.page_size} free"
        return f"{super().__repr__()[:-1]}, {pages}>"


def make_paged(
    cache: StateType,
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
    use = Use()
    layers: dict[int, CacheLayer] = {}
    groups: dict[tuple[int | None, Size, Size], dict[int, StateLayerType]] = {}
    for i, layer in enumerate(cache.layers):
        if layer.per_token:
            groups.setdefault((layer.window, layer.batch, layer.max_seq), {})[i] = layer
        else:
            layers[i] = make_layer(layer, use, device)
    for (window, batch, max_seq), types in groups.items():
        assert isinstance(batch, int)
        assert isinstance(max_seq, int)
        longest = -(-max_seq // page_size)
        # Pages of each sequence begin at 16 bytes, as kernels are compiled for.
        columns = -(-longest // 4) * 4
        count = batch * longest if pages is None else pages
        parts = [allocate(each.per_token, (), (count, page_size), coded, device) for each in types.values()]
        # One object for all layers: they know by it that they go through the same lengths.
        empty = SequenceLengths((0,) * batch, device)
        states = [LayerState(empty, use) for _ in types]
        rows: list[list[int]] = [[] for _ in range(batch)]
        table = PageTable(Pool(page_size, parts, count), window, states, rows, [0] * batch, columns, device)
        for (i, each), state, stored in zip(types.items(), states, parts, strict=True):
            layers[i] = PagedLayer(each, table, stored, state, 0, make_fixed(each, empty, use))
    made = PagedCache(cache, [layers[i] for i in range(len(cache.layers))], use)
    made.reset()  # gives all layers the same lengths
    return made
