# SPDX-License-Identifier: Apache-2.0
"""A call that may be captured, and what of it a graph reads and writes: memory that stays where it is, filled before each replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from nnfront.backends.cuda.independent_rows import Rows
from nnfront.backends.device import sent
from nnfront.runtime.execute import Frame
from nnfront.state.cache import UNIT, Cache
from nnfront.state.lengths import SequenceLengths
from nnfront.state.page_table import GONE

Addresses: TypeAlias = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, by slot."""

    key: Hashable
    tensors: dict[int, torch.Tensor]
    caches: dict[int, Cache]
    lengths: dict[int, SequenceLengths]
    padding: Padding | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are counted as one: of padded ones all that are somebody's."""
        return self.padding.count if self.padding is not None and self.padding.where.axis else 1

    def rows(self, cache: Cache) -> int:
        """How many sequences a graph has for those of a cache."""
        return self.padding.rows if self.padding is not None and not self.padding.where.axis else cache.batch


@dataclass(frozen=True, slots=True)
class Padding:
    """`count` sequences, or tokens of one, in `rows` rows: tensors in the slots of `where` have them along its axis."""

    count: int
    rows: int
    where: Rows

    def padded(self, slot: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor for all rows."""
        found = [*shape]
        if slot in self.where.tensors:
            found[self.where.axis] = found[self.where.axis] // self.count * self.rows
        return tuple(found)

    def theirs(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        """The part of a result that is somebody's."""
        if slot not in self.where.tensors:
            return value
        return value.narrow(0, 0, value.shape[0] // self.rows * self.count)


@dataclass(slots=True)
class CapturedGraph:
    """Where it reads tensors, how many tokens caches hold, tables of pages and bases, what it writes, and the frame of all else that a result is
    made of. `counted`, `tables_read` and `based` are what lies in counts, tables and bases now. `counts` are int32 [2, rows]: the second row
    says how many tokens are counted as one, 0 for a row that is no sequence. `bases` are int64 [layers, 4 and more] (`still`): where caches lie, counted from the `anchors`,
    where those lay that were captured, which may be gone.
    """

    tensors: dict[int, torch.Tensor]
    counts: dict[int, torch.Tensor]
    tables: dict[int, list[torch.Tensor]]
    bases: dict[int, torch.Tensor]
    anchors: dict[int, Addresses]
    frame: Frame
    made: torch.Tensor | None = None
    replay: Callable[[], None] = lambda: None
    counted: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    tables_read: dict[int, list[tuple[Hashable, int]]] = field(default_factory=dict)
    based: dict[int, tuple[Addresses, int]] = field(default_factory=dict)

    def fill(self, call: Call) -> None:
        """Copy what has changed since the last call to where the graph reads it."""
        for slot, static in self.tensors.items():
            given = call.tensors[slot]
            _head(static, given).copy_(given, non_blocking=True)
        for slot, static in self.counts.items():
            found = call.lengths[slot].values
            if self.counted.get(slot) != (call.tokens, found):
                empty = (0,) * (static.shape[1] - len(found))
                lengths = [(*found, *empty), (*(call.tokens for _ in found), *empty)]
                static.copy_(sent(lengths, torch.int32, static.device), non_blocking=True)
        for slot, statics in self.tables.items():
            found_tables, read = call.caches[slot].page_tables(), self.tables_read.get(slot)
            keys = [(key, len(table)) for key, table in found_tables.items()]
            for i, table in enumerate(found_tables.values()):
                if read is None or read[i] != keys[i]:
                    _head(statics[i], table).copy_(table, non_blocking=True)
                    if len(table) < len(statics[i]):
                        statics[i][len(table) :].fill_(GONE)
            self.tables_read[slot] = keys
        for slot, static in self.bases.items():
            cache = call.caches[slot]
            addresses, nobodys = based = cache.addresses, call.rows(cache) - cache.batch
            if self.based.get(slot) != based:
                found_bases = [
                    _base(*both, nobodys, static.shape[1])
                    for both in zip(addresses, self.anchors[slot], strict=True)
                ]
                static.copy_(sent(found_bases, torch.int64, static.device), non_blocking=True)
                self.based[slot] = based

    def grown(self, call: Call, growth: dict[int, int]) -> None:
        """Note what the graph has added to the lengths."""
        for slot, count in growth.items():
            grown = tuple(n + count * call.tokens for n in call.lengths[slot].values)
            self.counted[slot] = call.tokens, grown


def _base(
    addresses: tuple[int | None, ...], anchors: tuple[int | None, ...], nobodys: int, width: int
) -> list[int]:
    """A layer's bases, behind that of each state how many rows are nobody's, and zeros up to a width."""
    units = [
        nobodys if now is None or then is None else (now - then) // UNIT
        for now, then in zip(addresses, anchors, strict=True)
    ]
    return units + [0] * (width - len(units))


def _head(static: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that another one fills."""
    return static if static.shape == given.shape else static[tuple(map(slice, given.shape))]
