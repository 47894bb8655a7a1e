# SPDX-License-Identifier: Apache-2.0
"""A cache as a captured call sees it: all that changes from call to call lies in memory that stays where it is, and the host knows none of it.

Lengths, tables of pages and where a cache lies are read there. Kernels find by themselves what they read and write. For torch rows are copied: tokens and whole states
from where they lie when it reads them, and back when it has written some, so what was captured is of no cache more than of another. It gets as many slots as the longest
sequence may have, those that are empty as zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import NoReturn

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.errors import RunError
from nnfront.state.cache import Cache, bases_of_tokens
from nnfront.state.fixed import FixedState, FixedStorage
from nnfront.state.layer import CacheLayer, Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.quantize import Parts, decode, encode
from nnfront.state.use import LayerState, Use


class DeviceLengths(SequenceLengths):
    """Lengths of which the host knows a bound; `counts` has them, int32 [rows]. Of each `width` tokens of a call as many are a sequence's as `tokens`
    says, int32 [rows]: all of them, or the first ones of the only sequence, or 0 of a row that is no sequence, which stays empty.
    """

    __slots__ = ("tokens", "width")

    def __init__(
        self, values: tuple[int, ...], counts: torch.Tensor | None, tokens: torch.Tensor, width: int
    ) -> None:
        super().__init__(values, tokens.device)
        self.equal = None
        self.tokens = tokens
        self.width = width
        if counts is not None:
            self.remember("counts", lambda: counts)

    def like(self, values: tuple[int, ...]) -> DeviceLengths:
        return DeviceLengths(values, None, self.tokens, self.width)

    def _shifted(self, counts: torch.Tensor, seq: int) -> torch.Tensor:
        return torch.add(counts, self.tokens, alpha=seq // self.width)

    def sequences(self) -> torch.Tensor:
        """The number of each row among the sequences: int64 [rows], -1 for one that is no sequence."""

        def make() -> torch.Tensor:
            return torch.arange(len(self.values), device=self.device).masked_fill_(self.tokens == 0, -1)

        return self.remember("sequences", make)

    def starts(self, seq: int) -> torch.Tensor:
        if self.width == 1:
            return super().starts(seq)
        return self.remember(("starts", seq), lambda: torch.nn.functional.pad(self.tokens, (1, 0)))


class CapturedState(FixedStorage):
    """What a layer keeps of each sequence under a name: so many times 16 bytes behind `rows` as `bases` says at `index`, when a graph is replayed.

    In place, a kernel that is told `base` reads it there and has written it already. Others get a copy, and what they wrote is put back when the call has done all else.
    """

    __slots__ = ("_bases", "_index", "_lengths", "_value", "is_in_place", "rows")

    def __init__(
        self, rows: torch.Tensor, lengths: DeviceLengths, bases: torch.Tensor, index: int, is_in_place: bool
    ) -> None:
        super().__init__(FixedState(rows, lengths, Use()), 0, len(rows))
        self.rows = rows
        self.is_in_place = is_in_place
        self._lengths = lengths
        self._bases, self._index = bases, index
        self._value = rows

    @property
    def base(self) -> torch.Tensor:
        """Where a kernel finds it, and how many rows of the graph are nobody's: int64 [2]."""
        return self._bases[self._index : self._index + 2]

    def read(self) -> torch.Tensor:
        if self._value is self.rows and not self.is_in_place:
            return self._copied().view(-1, *self.rows.shape[1:])
        return self._value

    def write(self, value: torch.Tensor, seq: int, max_seq: int, *, take_over: bool = False) -> None:
        self._value = value

    def keep(self) -> None:
        """Put back what was written last."""
        if self._value is self.rows:
            return
        if self.is_in_place:
            raise RunError("a kernel has not written a state where the one before it lies")
        self._copied(self._value)

    def _copied(self, value: torch.Tensor | None = None) -> torch.Tensor:
        width = prod(self.rows.shape[1:])
        rows = None if value is None else value.reshape(-1, width).contiguous()
        there = self.rows.view(-1, width)
        return copied(there, self._lengths.sequences(), self._bases, self._index, rows)


def copied(
    there: torch.Tensor, at: torch.Tensor, bases: torch.Tensor, index: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of a buffer, or these written to it: `nnfront_kernels.copy_rows` says more."""
    found: torch.Tensor = kernel_module("copy_rows").launch(there, at, rows, base=bases, index=index)
    return found


class CapturedLayer(CacheLayer):
    """A layer for one capture. What would need to know on the host how many tokens there are raises RunError."""

    __slots__ = ("_bases", "_begin", "_pages", "_placed", "states")

    def __init__(
        self,
        layer: CacheLayer,
        lengths: DeviceLengths,
        pages: torch.Tensor | None,
        bases: torch.Tensor,
        in_place: Collection[str] = (),
    ) -> None:
        first = bases_of_tokens(layer)
        fixed = {
            name: CapturedState(each.settled(), lengths, bases, first + 2 * i, name in in_place)
            for i, (name, each) in enumerate(layer.fixed.items())
        }
        type = replace(layer.type, batch=len(lengths.values))
        super().__init__(type, LayerState(lengths, Use()), 0, fixed)
        self.states = (*fixed.values(),)
        self._begin = lengths
        self._placed = layer.placed
        self._pages = pages
        self._bases = bases

    @property
    def placed(self) -> Parts:
        return self._placed

    @property
    def storage(self) -> Storage:
        return Storage.of(self._placed, self._pages, self._bases[:4])

    def take(self, seq: int) -> None:
        """Count more tokens on the device; the real layer has found places for them."""
        self._state.lengths = self._state.lengths.grow(0, self.batch, seq)

    def write(self, name: str, value: torch.Tensor, seq: int, *, take_over: bool = False) -> None:
        super().write(name, value, seq)
        if not self.type.per_token and name == next(iter(self.fixed)):
            self.take(seq)

    def append(self, *parts: torch.Tensor) -> None:
        before, seq = self.lengths, parts[0].shape[1]
        self.take(seq)
        new = encode(parts, bool(self._placed.scales))
        for i, (part, tokens) in enumerate(zip(self._placed.all, new.all, strict=True)):
            key = ("append", seq, self.slot_order, _form(part))
            at = before.remember(key, partial(self._at, before.positions(seq), part))
            copied(part, at.flatten(), self._bases, i, tokens.reshape(-1, part.shape[-1]).contiguous())

    def stored(self, index: int) -> torch.Tensor:
        of_buffer, dtype = slice(index, None, len(self._placed.buffers)), self.type.per_token[index].dtype
        found = (self._read(i) for i in range(len(self._placed.all))[of_buffer])
        return decode(Parts((next(found),), (*found,)), 0, dtype)

    def _read(self, index: int) -> torch.Tensor:
        """A tensor of tokens, or of scales: [batch, *lead, bound, last]."""
        part = self._placed.all[index]

        def make() -> torch.Tensor:
            return self._at(self.key_positions(), part).movedim(1, -1).contiguous()

        at = self.lengths.remember(("stored", self.slot_order, _form(part)), make)
        return copied(part, at.flatten(), self._bases, index).view(*at.shape, -1)

    def _at(self, positions: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Which rows of a tensor hold the tokens at positions [batch, seq]: [batch, seq, *lead], -1 for those that nobody has."""
        if self._pages is None:
            page, slot = self._begin.sequences()[:, None], positions
        else:
            size = part.shape[-2]
            page, slot = self._pages.gather(1, positions.clamp(min=0) // size).long(), positions % size
        lead, (outer, *strides, inner) = _form(part)
        at = page * outer + slot * inner
        is_there = (page >= 0) & (positions >= 0)
        for count, stride in zip(lead, strides, strict=True):
            at = at[..., None] + torch.arange(count, device=at.device) * stride
            is_there = is_there[..., None]
        return at.masked_fill(~is_there, -1)

    def key_positions(self) -> torch.Tensor:
        counts = self.lengths.counts()[:, None]
        slots = torch.arange(self._bound, device=counts.device).expand(self.batch, -1)
        is_empty = slots >= counts
        if self._pages is not None:
            is_empty = is_empty | (self._pages.gather(1, slots // self._placed.all[0].shape[-2]) < 0)
        return slots.masked_fill(is_empty, -1)

    @property
    def _bound(self) -> int:
        """How many tokens the longest sequence may have."""
        return min(self.lengths.longest, self.max_seq)

    @property
    def slot_order(self) -> Hashable:
        return None if self._pages is None else self._pages.data_ptr()

    def release(self) -> None:
        pass  # all that was appended stays

    def keeps(self, row: int, length: int) -> bool:
        self._refuse()

    def part(self, first: int, count: int) -> CapturedLayer:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RunError("a kernel asks the host how many tokens a cache holds")


def _form(part: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a tensor [batch or pages, *lead, slots, last] the sizes of `lead`, and how many rows there are from one to the next along each axis."""
    return (*part.shape[1:-2],), tuple(stride // part.shape[-1] for stride in part.stride()[:-1])


def still(
    cache: Cache,
    lengths: DeviceLengths,
    tables: Mapping[object, torch.Tensor],
    bases: torch.Tensor,
    in_place: Collection[tuple[int, str]] = (),
) -> tuple[CapturedLayer, ...]:
    """The layers of a cache whose lengths are what `lengths` says when the work is done. `tables`, [rows, pages at most], are to be read in the place of
    its tables of pages, by their keys. There may be more rows than the cache has sequences. `bases` say where it lies (`Cache.addresses`), int64 [layers, 4
    and more]. States `in_place` are those that one kernel reads and writes, by layer and name.
    """
    return tuple(
        CapturedLayer(
            layer, lengths, tables.get(layer.table_key), bases[i], {name for at, name in in_place if at == i}
        )
        for i, layer in enumerate(cache)
    )


def enumerate_copies(cache: Cache, in_place: Collection[tuple[int, str]], *, tokens: bool) -> None:
    """Launch all that copies rows of caches of this layout in captured calls: of states that are not `in_place`, and of `tokens` if torch has to do with any."""
    counts = torch.empty(cache.batch, dtype=torch.int32)
    lengths = DeviceLengths((cache.max_seq - 1,) * cache.batch, counts, counts, 1)
    bases = torch.empty(len(cache), max(map(len, cache.addresses)), dtype=torch.int64)
    layers = still(cache, lengths, cache.page_tables(), bases, in_place)
    of_a_kind = {(layer.type, *(state.is_in_place for state in layer.states)): layer for layer in layers}
    for layer in of_a_kind.values():
        for state in layer.states:
            if not state.is_in_place:
                state.write(state.read(), 1, cache.max_seq)
                state.keep()
        if tokens and layer.type.per_token:
            kept = [(buffer.shape, getattr(torch, buffer.dtype)) for buffer in layer.type.per_token]
            layer.append(*(torch.empty(cache.batch, 1, *shape, dtype=dtype) for shape, dtype in kept))
            for i in range(len(kept)):
                layer.stored(i)
