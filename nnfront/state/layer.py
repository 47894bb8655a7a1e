# SPDX-License-Identifier: Apache-2.0
"""One layer of a cache: what `nnfront.ops.layer` says that ops want of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self, TypeAlias

import torch

from nnfront.lower import StateLayerType
from nnfront.state.fixed import FixedStorage, Saved
from nnfront.state.lengths import SequenceLengths
from nnfront.state.quantize import Parts
from nnfront.state.use import LayerState

# What says which sequences of which layer these are: what its views share, the first sequence, how many.
Rows: TypeAlias = tuple[LayerState, int, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """Where kernels find the tokens of a layer: of each per-token buffer [*lead, last] a tensor [batch, *lead, max_seq, last], or
    [pages, *lead, page_size, last] with the pages of each sequence, int32 [batch, pages at most], -1 where there is none. In 8 bits there is
    a scale for each token: float32 [batch or pages, *lead, max_seq or page_size]. `base`, int64 [4], says how many times 16 bytes behind these
    tensors two buffers and their scales lie when a kernel reads it: zeros but in a captured call, which serves caches wherever they lie.
    """

    buffers: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...] = ()
    pages: torch.Tensor | None = None
    base: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        """What the first buffer holds."""
        return self.buffers[0]

    @property
    def values(self) -> torch.Tensor:
        """What the second buffer holds."""
        return self.buffers[1]

    def tensors(self) -> list[torch.Tensor]:
        """All that there are."""
        return [*self.buffers, *self.scales, *([] if self.pages is None else [self.pages])]

    @staticmethod
    def of(parts: Parts, pages: torch.Tensor | None = None, base: torch.Tensor | None = None) -> Storage:
        """Storage as kernels see it."""
        if base is None and parts.buffers:
            base = here(parts.buffers[0].device)
        if not parts.scales:
            return Storage(parts.buffers, (), pages, base)
        return Storage(
            tuple(part.view(torch.float8_e4m3fn) for part in parts.buffers),
            tuple(part.squeeze(-1) for part in parts.scales),
            pages,
            base,
        )


@cache
def here(device: torch.device) -> torch.Tensor:
    """The base of what lies where its tensors do."""
    return torch.zeros(4, dtype=torch.int64, device=device)


class CacheLayer(ABC):
    """One layer of a cache, for `batch` sequences in a row of those that its state knows.

    What it keeps of each token lies in one storage, which its class is (`ring`, `paged`); `fixed` are the buffers that it keeps of each sequence, by
    name. A layer that keeps nothing of tokens has the lengths of the first of these.
    """

    __slots__ = ("_first", "_state", "batch", "fixed", "max_seq", "type", "window")

    def __init__(
        self, type: StateLayerType, state: LayerState, first: int, fixed: Mapping[str, FixedStorage]
    ) -> None:
        assert isinstance(type.batch, int)
        assert isinstance(type.max_seq, int)
        self.type = type
        self.batch: int = type.batch
        self.max_seq: int = type.max_seq
        self.window = type.window
        self.fixed = fixed
        self._state = state
        self._first = first

    @property
    def lengths(self) -> SequenceLengths:
        """How many tokens each sequence has."""
        lengths = self._state.lengths
        return lengths if len(lengths.values) == self.batch else lengths.part(self._first, self.batch)

    @property
    def rows(self) -> Rows:
        """The same for another layer only if both are the same sequences of one."""
        return self._state, self._first, self.batch

    @property
    def is_read_again(self) -> bool:
        """Whether others in the call that goes on attend to what its last tokens saw."""
        return id(self) in self._state.use.shared

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next `seq` tokens of each sequence: int64 [batch, seq]."""
        # A copy, as the lengths remember theirs and a method may return it.
        return self.lengths.positions(seq).clone()

    def last_positions(self, seq: int) -> torch.Tensor:
        """Positions of the last `seq` tokens of each sequence: int64 [batch, seq]. Raises RunError if what they see is there no more."""
        return self.lengths.back(seq).positions(seq).clone()

    def read(self, name: str) -> torch.Tensor:
        """What it keeps of each sequence under a name: [batch, *shape]."""
        return self.fixed[name].read()

    def write(self, name: str, value: torch.Tensor, seq: int, *, take_over: bool = False) -> None:
        """Keep another value [batch, *shape], as it is after `seq` more tokens; with `take_over` nobody else sees it from now on.

        Raises RunError, before anything is written, if so many tokens do not fit.
        """
        self.fixed[name].write(value, seq, self.max_seq, take_over=take_over)

    @abstractmethod
    def append(self, *parts: torch.Tensor) -> None:
        """Store more tokens: for each buffer of a token [batch, seq, *shape].

        Raises RunError, before anything is written, if they do not fit.
        """

    @property
    @abstractmethod
    def placed(self) -> Parts:
        """Where the tokens lie, as they are stored: [batch or pages, *lead, max_seq or page_size, last]."""

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """The same as kernels find it; it stays where it is."""

    @property
    def table_key(self) -> Hashable:
        """The same for layers that read one table of pages, another as soon as that is written; None without pages."""
        return None

    @abstractmethod
    def take(self, seq: int) -> None:
        """Find places for `seq` more tokens of each sequence and count them. The token at position p is at p, or on its page.

        Raises RunError, with nothing changed, if they do not fit.
        """

    def advance(self, seq: int) -> None:
        """Count `seq` more tokens of each sequence in all that it keeps, which the caller writes where it lies. Raises RunError as `take` does."""
        if self.type.per_token:
            self.take(seq)
        for storage in self.fixed.values():
            storage.grow(seq, self.max_seq)

    def settled(self) -> list[torch.Tensor]:
        """What it keeps of each sequence, where a captured call reads and writes it."""
        return [storage.settled() for storage in self.fixed.values()]

    def reserve(self, seq: int) -> Storage:
        """Find places for `seq` more tokens of each sequence, which the caller stores; return where. Raises RunError as `take` does."""
        self.take(seq)
        return self.storage

    def has_capacity(self, seq: int) -> bool:
        """Whether `reserve_tokens` finds places."""
        return False

    def reserve_tokens(self, seq: int) -> Storage | None:
        """Find places for a few more tokens of each sequence, which the caller stores: the token at position p is at p % capacity of
        buffers that have this capacity, or on its page. None, with nothing changed, where a token would lie over one that another of them
        sees. Raises RunError if there are too few pages.
        """
        return None

    @abstractmethod
    def stored(self, index: int) -> torch.Tensor:
        """The tokens of a buffer: [batch, *lead, stored, last]."""

    @abstractmethod
    def key_positions(self) -> torch.Tensor:
        """Position of the token in each slot: int64 [batch, stored], -1 for an empty slot."""

    @property
    @abstractmethod
    def slot_order(self) -> Hashable:
        """What, with the lengths, says which position lies in which slot of `stored`."""

    @abstractmethod
    def keeps(self, row: int, length: int) -> bool:
        """Whether all that the next token would see is there, if a sequence were cut to `length` tokens."""

    def attended(self) -> None:
        """Give back what only the attention of the last appended tokens needed, unless a call goes on in which others may read it."""
        if self._state.use.journal is None:
            self.release()

    @abstractmethod
    def release(self) -> None:
        """Give back what only the attention of the last appended tokens needed."""

    @abstractmethod
    def part(self, first: int, count: int) -> Self:
        """The same layer for some of its sequences."""

    def set_lengths(self, lengths: SequenceLengths) -> None:
        """Say how many tokens each sequence has from now on."""
        self.release()
        self._state.cut(self._first, lengths)
        for storage in self.fixed.values():
            storage.set_lengths(lengths)

    def save(self) -> list[Saved]:
        """Copies of what cutting tokens off does not bring back."""
        return [storage.save() for storage in self.fixed.values()]

    def _fixed_part(self, first: int, count: int) -> dict[str, FixedStorage]:
        return {name: storage.part(first, count) for name, storage in self.fixed.items()}
