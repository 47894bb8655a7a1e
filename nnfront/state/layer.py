# SPDX-License-Identifier: Apache-2.0
"""One layer of a key/value cache: what `nnfront.ops.attention` wants of it, and the layer that keeps its tokens in a ring of slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch

from nnfront.backends.device import CPU
from nnfront.errors import RunError
from nnfront.lower import CacheLayerType
from nnfront.state.lengths import SequenceLengths
from nnfront.state.quantize import Parts, buffers, decode, encode

# Keys, values and their positions, while a chunk of tokens attends that turns a ring over.
Chunk: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Storage:
    """Where kernels find the tokens of a layer: keys and values [batch, kv_heads, max_seq, head_size], or [pages, kv_heads, page_size,
    head_size] with the pages of each sequence, int32 [batch, pages at most], -1 where there is none. Codes have scales for each token
    and head: float32 [batch or pages, kv_heads, max_seq or page_size].
    """

    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All that there are."""
        every = (self.keys, self.values, self.pages, self.key_scales, self.value_scales)
        return [tensor for tensor in every if tensor is not None]

    @staticmethod
    def of(parts: Parts, pages: torch.Tensor | None = None) -> Storage:
        """Name the buffers of a layer."""
        if len(parts) == 2:
            return Storage(*parts, pages)
        keys, values = (part.view(torch.float8_e4m3fn) for part in parts[:2])
        return Storage(keys, values, pages, *(part.squeeze(-1) for part in parts[2:]))


class CacheLayer(ABC):
    """One layer of a cache, for `batch` sequences in a row of those that its state knows."""

    __slots__ = ("_first", "_state", "batch", "max_seq", "type", "window")

    def __init__(self, type: CacheLayerType, state: LayerState, first: int) -> None:
        assert isinstance(type.batch, int)
        assert isinstance(type.max_seq, int)
        self.type = type
        self.batch: int = type.batch
        self.max_seq: int = type.max_seq
        self.window = type.window
        self._state = state
        self._first = first

    @property
    def lengths(self) -> SequenceLengths:
        """How many tokens each sequence has."""
        lengths = self._state.lengths
        return lengths if len(lengths.values) == self.batch else lengths.part(self._first, self.batch)

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next `seq` tokens of each sequence: int64 [batch, seq]."""
        # A copy, as the lengths remember theirs and a method may return it.
        return self.lengths.positions(seq).clone()

    @abstractmethod
    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store more tokens: k and v [batch, seq, kv_heads, head_size].

        Raises RunError, before anything is written, if they do not fit.
        """

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """Where kernels find the tokens; it stays where it is."""

    @abstractmethod
    def take(self, seq: int) -> None:
        """Find places for `seq` more tokens of each sequence and count them. The token at position p is at p, or on its page.

        Raises RunError, with nothing changed, if they do not fit.
        """

    def reserve(self, seq: int) -> Storage:
        """Find places for `seq` more tokens of each sequence, which the caller stores; return where. Raises RunError as `take` does."""
        self.take(seq)
        return self.storage

    @property
    def has_room_for_one(self) -> bool:
        """Whether `reserve_one` finds a place."""
        return False

    def reserve_one(self) -> Storage | None:
        """Find a place for one more token of each sequence, which the caller stores as it is: the token at position p is at p % capacity of
        buffers that have this capacity, and all that they hold is within the layer's window. Else None, with nothing changed.
        """
        return None

    @abstractmethod
    def keys(self) -> torch.Tensor:
        """Keys of the stored tokens: [batch, kv_heads, stored, head_size]."""

    @abstractmethod
    def values(self) -> torch.Tensor:
        """Values of the stored tokens: [batch, kv_heads, stored, head_size]."""

    @abstractmethod
    def key_positions(self) -> torch.Tensor:
        """Position of the token in each slot: int64 [batch, stored], -1 for an empty slot."""

    @property
    @abstractmethod
    def slot_order(self) -> Hashable:
        """What, with the lengths, says which position lies in which slot of `keys()`."""

    @abstractmethod
    def keeps(self, row: int, length: int) -> bool:
        """Whether all that the next token would see is there, if a sequence were cut to `length` tokens."""

    @abstractmethod
    def release(self) -> None:
        """Give back what only the attention of the last appended tokens needed."""

    @abstractmethod
    def part(self, first: int, count: int) -> Self:
        """The same layer for some of its sequences."""

    def set_lengths(self, lengths: SequenceLengths) -> None:
        """Say how many tokens each sequence has from now on, never more than it had."""
        self.release()
        self._state.lengths = self._state.lengths.replaced(self._first, lengths)

    def _full(self, before: SequenceLengths, seq: int) -> RunError:
        return RunError(
            f"cache is full: 'max_seq' = {self.max_seq} holds {before.longest} tokens, {seq} more do not fit",
            help="make a cache with a larger max_seq, or call cache.reset()",
        )


class RingLayer(CacheLayer):
    """Buffers [batch, kv_heads, capacity, head_size] for keys and for values. The token at position p lies in slot p % capacity.

    Capacity is `max_seq`, or the layer's window if that is less, so a ring turns over only where older tokens can no longer be seen.
    Kernels that find tokens by themselves want them at their positions: for these it is `max_seq`.
    """

    __slots__ = ("_coded", "_parts", "capacity")

    def __init__(self, type: CacheLayerType, parts: Parts, state: LayerState, first: int) -> None:
        super().__init__(type, state, first)
        self.capacity: int = parts[0].shape[2]
        self._parts = parts
        self._coded = len(parts) > 2

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        state, seq = self._state, k.shape[1]
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise self._full(before, seq)
        self.release()
        if before.longest + seq <= self.capacity:
            self._write(before, k, v, seq)
        else:
            self._turn_over(before, k, v, seq)
        state.lengths = state.lengths.grow(self._first, self.batch, seq)

    def take(self, seq: int) -> None:
        assert self.capacity == self.max_seq
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise self._full(before, seq)
        self._state.lengths = self._state.lengths.grow(self._first, self.batch, seq)

    @property
    def has_room_for_one(self) -> bool:
        return not (self._coded or self._state.scratch or self.lengths.longest >= self.max_seq)

    def reserve_one(self) -> Storage | None:
        # What one token costs here is mostly the interpreter, between large products that leave nothing in the caches.
        if not self.has_room_for_one:
            return None
        state = self._state
        state.lengths = state.lengths.grow(self._first, self.batch, 1)
        return Storage(*self._parts)

    @property
    def storage(self) -> Storage:
        return Storage.of(self._parts)

    def keys(self) -> torch.Tensor:
        chunk = self._chunk
        return self._stored(0) if chunk is None else chunk[0]

    def values(self) -> torch.Tensor:
        chunk = self._chunk
        return self._stored(1) if chunk is None else chunk[1]

    def key_positions(self) -> torch.Tensor:
        chunk = self._chunk
        return self.lengths.stored(self.capacity) if chunk is None else chunk[2]

    def release(self) -> None:
        if self._chunk is not None:
            self._state.scratch.clear()

    @property
    def _chunk(self) -> Chunk | None:
        scratch = self._state.scratch
        return scratch.get(id(self)) if scratch else None

    @property
    def slot_order(self) -> Hashable:
        return self.capacity, self._chunk is not None

    def keeps(self, row: int, length: int) -> bool:
        now = self.lengths.values[row]
        return now <= self.capacity or length >= now - 1

    def _stored(self, index: int) -> torch.Tensor:
        """Keys (0) or values (1) in the slots that are in use."""
        used = min(self.lengths.longest, self.capacity)
        parts = tuple(part.narrow(2, 0, used) for part in self._parts)
        return decode(parts, index, getattr(torch, self.type.dtype))

    def _write(self, before: SequenceLengths, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Store tokens in slots that are free."""
        if before.equal is not None:
            for part, tokens in zip(self._parts, encode(k, v, self._coded), strict=True):
                part.narrow(2, before.equal, seq).copy_(tokens.transpose(1, 2))
        else:
            self._scatter(before.positions(seq), encode(k, v, self._coded))

    def _turn_over(self, before: SequenceLengths, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Store tokens over others. What the new ones see besides themselves is kept until the next append, or `release`."""
        positions, new = before.positions(seq), encode(k, v, self._coded)
        if seq > 1:
            keys, values = (
                torch.cat([self._stored(index), decode(new, index, k.dtype).transpose(1, 2)], 2)
                for index in range(2)
            )
            seen = before.remember(
                ("chunk", self.capacity, seq), lambda: torch.cat([before.stored(self.capacity), positions], 1)
            )
            # Only the layer that is at work needs one, so the layers share one place for it.
            self._state.scratch.clear()
            self._state.scratch[id(self)] = keys, values, seen
        keep = min(seq, self.capacity)
        self._scatter(positions[:, seq - keep :], tuple(part[:, seq - keep :] for part in new))

    def _scatter(self, positions: torch.Tensor, new: Parts) -> None:
        slots = positions % self.capacity
        rows = torch.arange(self.batch)[:, None]
        for part, tokens in zip(self._parts, new, strict=True):
            part[rows, :, slots] = tokens

    def part(self, first: int, count: int) -> RingLayer:
        parts = tuple(part.narrow(0, first, count) for part in self._parts)
        return RingLayer(replace(self.type, batch=count), parts, self._state, self._first + first)

    def copied(self, sequences: torch.Tensor, state: LayerState) -> RingLayer:
        """A layer of its own for some of the sequences."""
        parts = tuple(part.index_select(0, sequences) for part in self._parts)
        return RingLayer(replace(self.type, batch=len(sequences)), parts, state, 0)

    @property
    def nbytes(self) -> int:
        """Size of its buffers in bytes."""
        return sum(part.nbytes for part in self._parts)


class LayerState:
    """What all views of a layer share: its lengths. `scratch` is shared by all layers: the chunk of the one that has one, by its id."""

    __slots__ = ("lengths", "scratch")

    def __init__(self, lengths: SequenceLengths, scratch: dict[int, Chunk]) -> None:
        self.lengths = lengths
        self.scratch = scratch


def make_layer(
    type: CacheLayerType,
    scratch: dict[int, Chunk],
    device: torch.device = CPU,
    *,
    turns: bool = True,
    coded: bool = False,
) -> RingLayer:
    """Make an empty layer; `turns` says that a window may make it a ring, `coded` that it stores codes. Layers of one cache share `scratch`."""
    assert isinstance(type.batch, int)
    assert isinstance(type.max_seq, int)
    capacity = type.max_seq if type.window is None or not turns else min(type.window, type.max_seq)
    shape = (type.batch, type.kv_heads, capacity, type.head_size)
    parts = buffers(shape, type.dtype, coded, device)
    return RingLayer(type, parts, LayerState(SequenceLengths((0,) * type.batch, device), scratch), 0)
