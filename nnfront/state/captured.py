# SPDX-License-Identifier: Apache-2.0
"""A cache as a captured call sees it: all that changes from call to call lies in memory that stays where it is, and the host knows none of it.

Lengths, tables of pages, where tokens lie and what is kept of whole sequences are read there. Kernels append tokens by themselves, or torch does at positions
that it computes of the lengths; it reads as many slots as the longest sequence may have, those that are empty as zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import repeat
from typing import NoReturn

import torch

from nnfront.errors import RunError
from nnfront.state.cache import Cache
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

    def _shifted(self, seq: int) -> torch.Tensor:
        return torch.add(self.counts(), self.tokens, alpha=seq // self.width)

    def starts(self, seq: int) -> torch.Tensor:
        if self.width == 1:
            return super().starts(seq)
        return self.remember(("starts", seq), lambda: torch.nn.functional.pad(self.tokens, (1, 0)))


class CapturedState(FixedStorage):
    """What a layer keeps of each sequence under a name, in rows that stay where they are: they are written when the call has done all else.

    With a base, int64 [1], they lie so many times 16 bytes behind `rows` when a graph is replayed, and kernels that read it have written them already.
    """

    __slots__ = ("_value", "base", "rows")

    def __init__(self, rows: torch.Tensor, lengths: SequenceLengths, base: torch.Tensor | None) -> None:
        super().__init__(FixedState(rows, lengths, Use()), 0, len(rows))
        self.rows = rows
        self.base = base
        self._value = rows

    def read(self) -> torch.Tensor:
        return self._value

    def write(self, value: torch.Tensor, seq: int, max_seq: int, *, take_over: bool = False) -> None:
        self._value = value

    def keep(self) -> None:
        """Write what was written last to the rows."""
        if self._value is not self.rows:
            if self.base is not None:
                raise RunError("a kernel has not written a state where the one before it lies")
            with torch.inference_mode():
                self.rows.copy_(self._value)


class CapturedLayer(CacheLayer):
    """A layer for one capture. What would need to know on the host how many tokens there are raises RunError."""

    __slots__ = ("_base", "_pages", "_placed", "states")

    def __init__(
        self,
        layer: CacheLayer,
        lengths: SequenceLengths,
        pages: torch.Tensor | None,
        base: torch.Tensor | None = None,
    ) -> None:
        own: Iterable[torch.Tensor | None] = (
            repeat(None) if base is None else [*torch.split(base[4:], 1)][::2]
        )
        fixed = {
            name: CapturedState(each.settled(), lengths, at)
            for (name, each), at in zip(layer.fixed.items(), own, strict=False)
        }
        type = replace(layer.type, batch=len(lengths.values))
        super().__init__(type, LayerState(lengths, Use()), 0, fixed)
        self.states = (*fixed.values(),)
        self._placed = layer.placed
        self._pages = pages
        self._base = None if base is None else base[:4]

    @property
    def placed(self) -> Parts:
        return self._placed

    @property
    def storage(self) -> Storage:
        return Storage.of(self._placed, self._pages, self._base)

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
        rows, slots = self._rows_and_slots(before.positions(seq))
        for part, new in zip(self._placed.all, encode(parts, bool(self._placed.scales)).all, strict=True):
            part.movedim(-2, 1)[rows, slots] = new

    def _rows_and_slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pages is None:
            return torch.arange(self.batch, device=positions.device)[:, None], positions
        size = self._placed.all[0].shape[-2]
        return self._pages.long().gather(1, positions // size), positions % size

    def stored(self, index: int) -> torch.Tensor:
        bound = self._bound

        def view(part: torch.Tensor) -> torch.Tensor:
            if self._pages is not None:
                columns = self._pages[:, : -(-bound // part.shape[-2])].long().clamp_(min=0)
                part = part[columns].movedim(1, -3).flatten(-3, -2)
            return part.narrow(-2, 0, bound)

        found = decode(self._placed, index, self.type.per_token[index].dtype, view)
        is_empty = self.key_positions() < 0
        # What lies there may be NaN, and attention multiplies it by 0.
        return found.masked_fill(is_empty.view(self.batch, *[1] * (found.ndim - 3), bound, 1), 0)

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


def still(
    cache: Cache,
    lengths: DeviceLengths,
    tables: Mapping[object, torch.Tensor],
    bases: torch.Tensor | None = None,
) -> tuple[CapturedLayer, ...]:
    """The layers of a cache whose lengths are what `lengths` says when the work is done. `tables`, [rows, pages at most], are to be read in the place of
    its tables of pages, by their keys. There may be more rows than the cache has sequences. `bases` are those of the layers, int64 [layers, 4
    and more]: that of tokens (`Storage`), and then every other one that of a whole state.
    """
    own = [None] * len(cache) if bases is None else bases.unbind()
    return tuple(
        CapturedLayer(layer, lengths, tables.get(layer.table_key), base)
        for layer, base in zip(cache, own, strict=True)
    )
