# SPDX-License-Identifier: Apache-2.0
"""A layer whose tokens lie in a buffer for each sequence: contiguous, or in a ring of slots where a window lets it forget the oldest."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from nnfront.backends.device import CPU
from nnfront.errors import RunError
from nnfront.lower import StateLayerType
from nnfront.state.fixed import FixedStorage, Saved, full, make_fixed
from nnfront.state.layer import CacheLayer, Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.quantize import Parts, allocate, decode, encode
from nnfront.state.use import Chunk, LayerState, Use


class RingLayer(CacheLayer):
    """Buffers [batch, *lead, capacity, last] for what it keeps of tokens. The token at position p lies in slot p % capacity.

    Capacity is `max_seq`, or the layer's window if that is less, so a ring turns over only where older tokens can no longer be seen.
    Kernels that find tokens by themselves want them at their positions: for these it is `max_seq`.
    """

    __slots__ = ("_parts", "_storage", "capacity")

    def __init__(
        self,
        type: StateLayerType,
        parts: Parts,
        capacity: int,
        state: LayerState,
        first: int,
        fixed: Mapping[str, FixedStorage],
    ) -> None:
        super().__init__(type, state, first, fixed)
        self.capacity = capacity
        self._parts = parts
        self._storage = Storage.of(parts)

    def append(self, *parts: torch.Tensor) -> None:
        state, seq = self._state, parts[0].shape[1]
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise full(before, seq, self.max_seq)
        self.release()
        if before.longest + seq <= self.capacity:
            self._write(before, parts, seq)
        else:
            self._wrap_around(before, parts, seq)
        state.lengths = state.lengths.grow(self._first, self.batch, seq)

    def take(self, seq: int) -> None:
        assert self.capacity == self.max_seq
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise full(before, seq, self.max_seq)
        self._state.lengths = self._state.lengths.grow(self._first, self.batch, seq)

    def has_capacity(self, seq: int) -> bool:
        # What one token costs here is mostly the interpreter, between large products that leave nothing in the caches.
        longest = self.lengths.longest
        if longest + seq <= self.capacity:
            return not self._state.use.chunks
        return seq == 1 and not (longest >= self.max_seq or self._state.use.chunks or self._overwrites)

    @property
    def _overwrites(self) -> bool:
        """Whether one more token lies over what a failed call has to bring back: not the first one, over what its query no longer sees."""
        journal = self._state.use.journal
        return journal is not None and journal.lengths is not self.lengths

    def reserve_tokens(self, seq: int) -> Storage | None:
        if not self.has_capacity(seq):
            return None
        state = self._state
        state.lengths = state.lengths.grow(self._first, self.batch, seq)
        return self._storage

    @property
    def placed(self) -> Parts:
        return self._parts

    @property
    def storage(self) -> Storage:
        return self._storage

    def stored(self, index: int) -> torch.Tensor:
        chunk = self._chunk
        return self._kept(index) if chunk is None else chunk[0][index]

    def key_positions(self) -> torch.Tensor:
        chunk = self._chunk
        return self.lengths.stored(self.capacity) if chunk is None else chunk[1]

    def release(self) -> None:
        self._state.use.chunks.pop(id(self), None)

    def last_positions(self, seq: int) -> torch.Tensor:
        if seq > 1 and self._chunk is None and self.lengths.longest > self.capacity:
            raise RunError(
                f"a layer with the window {self.window} is read again, but of the last {seq} tokens some see what it holds no more",
                details=["what they see besides was kept until the call that appended them was over"],
                help="let the method that appends read again, or give one token at a time",
            )
        return super().last_positions(seq)

    @property
    def _chunk(self) -> Chunk | None:
        return self._state.use.chunks.get(id(self))

    @property
    def slot_order(self) -> Hashable:
        return self.capacity, self._chunk is not None

    def keeps(self, row: int, length: int) -> bool:
        newest = self.lengths.values[row]
        if self._state.newest is not None:
            newest = max(newest, self._state.newest[self._first + row])
        return newest <= self.capacity or length - self.capacity + 1 >= newest - self.capacity

    def _kept(self, index: int) -> torch.Tensor:
        """A buffer's slots that are in use."""
        used = min(self.lengths.longest, self.capacity)
        return decode(
            self._parts, index, self.type.per_token[index].dtype, lambda part: part.narrow(-2, 0, used)
        )

    def _write(self, before: SequenceLengths, new: Sequence[torch.Tensor], seq: int) -> None:
        """Store tokens in slots that are free."""
        encoded = encode(new, bool(self._parts.scales))
        if before.equal is None:
            self._scatter(before.positions(seq), encoded)
            return
        for part, tokens in zip(self._parts.all, encoded.all, strict=True):
            part.narrow(-2, before.equal, seq).copy_(tokens.movedim(1, -2))

    def _wrap_around(self, before: SequenceLengths, new: Sequence[torch.Tensor], seq: int) -> None:
        """Store tokens over others. What the new ones see besides themselves is kept until the next append, or `release`."""
        positions, encoded = before.positions(seq), encode(new, bool(self._parts.scales))
        if seq > 1:
            tokens = tuple(
                torch.cat(
                    [self._kept(i), decode(encoded, i, buffer.dtype, lambda part: part.movedim(1, -2))], -2
                )
                for i, buffer in enumerate(self.type.per_token)
            )
            seen = before.remember(
                ("chunk", self.capacity, seq), lambda: torch.cat([before.stored(self.capacity), positions], 1)
            )
            self._state.use.keep(id(self), (tokens, seen))
        keep = min(seq, self.capacity)
        positions = positions[:, seq - keep :]
        if seq > 1 or self._overwrites:
            self._remember(positions)
        self._scatter(positions, encoded.map(lambda part: part[:, seq - keep :]))

    def _remember(self, positions: torch.Tensor) -> None:
        """Keep what lies in the slots of these positions, if a call may have to bring it back."""
        state, journal = self._state, self._state.use.journal
        if journal is None:
            return
        old, lengths, newest = self._gathered(positions), state.lengths, state.newest

        def undo() -> None:
            self._scatter(positions, old)
            state.lengths, state.newest = lengths, newest

        journal.entries.append(undo)

    def _slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(self.batch)[:, None], positions % self.capacity

    def _gathered(self, positions: torch.Tensor) -> Parts:
        slots = self._slots(positions)
        return self._parts.map(lambda part: part.movedim(-2, 1)[slots])

    def _scatter(self, positions: torch.Tensor, new: Parts) -> None:
        slots = self._slots(positions)
        for part, tokens in zip(self._parts.all, new.all, strict=True):
            part.movedim(-2, 1)[slots] = tokens

    def save(self) -> list[Saved]:
        state, before = self._state, self.lengths
        newest, rows = state.newest, slice(self._first, self._first + self.batch)
        if self.capacity == self.max_seq:
            cuts = state.cuts()
            tokens = Saved(
                0,
                lambda: None,
                lambda: list(map(min, cuts.lowest[rows], before.values)) == list(before.values),
            )
        else:
            copies = self._parts.map(torch.clone)

            def put_back() -> None:
                for part, copy in zip(self._parts.all, copies.all, strict=True):
                    part.copy_(copy)
                state.lengths, state.newest = state.lengths.replaced(self._first, before), newest

            tokens = Saved(copies.nbytes, put_back)
        return [*super().save(), tokens]

    def part(self, first: int, count: int) -> RingLayer:
        parts = self._parts.map(lambda part: part.narrow(0, first, count))
        type = replace(self.type, batch=count)
        fixed = self._fixed_part(first, count)
        return RingLayer(type, parts, self.capacity, self._state, self._first + first, fixed)

    def copied(self, sequences: torch.Tensor, lengths: SequenceLengths, use: Use) -> RingLayer:
        """A layer of its own for some of the sequences."""
        parts = self._parts.map(lambda part: part.index_select(0, sequences))
        fixed = {name: storage.copied(sequences, lengths, use) for name, storage in self.fixed.items()}
        type = replace(self.type, batch=len(sequences))
        state = _state_of(type, lengths, use, fixed)
        if type.per_token and self._state.newest is not None:
            state.newest = tuple(self._state.newest[self._first + i] for i in sequences.tolist())
        return RingLayer(type, parts, self.capacity, state, 0, fixed)

    @property
    def nbytes(self) -> int:
        """Size of its buffers in bytes."""
        return self._parts.nbytes + sum(storage.nbytes for storage in self.fixed.values())


def _state_of(
    type: StateLayerType, lengths: SequenceLengths, use: Use, fixed: Mapping[str, FixedStorage]
) -> LayerState:
    """The state of a layer's tokens; of one that keeps none, that of its first buffer."""
    return LayerState(lengths, use) if type.per_token else next(iter(fixed.values())).state


def make_layer(
    type: StateLayerType,
    use: Use | None = None,
    device: torch.device = CPU,
    *,
    turns: bool = True,
    coded: bool = False,
) -> RingLayer:
    """Make an empty layer; `turns` says that a window may make it a ring, `coded` that it stores tokens in 8 bits. Layers of one cache share `use`."""
    assert isinstance(type.batch, int)
    assert isinstance(type.max_seq, int)
    capacity = type.max_seq if type.window is None or not turns else min(type.window, type.max_seq)
    parts = allocate(type.per_token, (type.batch,), (capacity,), coded, device)
    use, lengths = use or Use(), SequenceLengths((0,) * type.batch, device)
    fixed = make_fixed(type, lengths, use)
    return RingLayer(type, parts, capacity, _state_of(type, lengths, use, fixed), 0, fixed)
