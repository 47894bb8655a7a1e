# SPDX-License-Identifier: Apache-2.0
"""The contiguous key/value cache of a method: for each layer two buffers [batch, kv_heads, capacity, head_size].

A buffer is a ring: the token at position p lies in slot p % capacity. Capacity is `max_seq`, or the layer's window if that is less,
so a ring turns over only where older tokens can no longer be seen. Sequences of one batch may have different lengths; as long as
they have the same one, everything is a view: no masks, no gathers.

A cache belongs to one caller. Tokens are written in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from nnfront.dims import evaluate
from nnfront.errors import RunError
from nnfront.lower import CacheLayerType, CacheType
from nnfront.runtime.lengths import Lengths

# Keys, values and their positions, while a chunk of tokens attends that turns a ring over.
Chunk: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CacheLayer:
    """One layer of a cache, for `batch` sequences in a row of those that the buffers hold."""

    __slots__ = ("_first", "_keys", "_state", "_values", "batch", "capacity", "max_seq", "type", "window")

    def __init__(
        self, type: CacheLayerType, keys: torch.Tensor, values: torch.Tensor, state: _State, first: int
    ) -> None:
        assert isinstance(type.batch, int)
        assert isinstance(type.max_seq, int)
        self.type = type
        self.batch: int = type.batch
        self.max_seq: int = type.max_seq
        self.window = type.window
        self.capacity: int = keys.shape[2]
        self._keys = keys
        self._values = values
        self._state = state
        self._first = first

    @property
    def lengths(self) -> Lengths:
        """How many tokens each sequence has."""
        lengths = self._state.lengths
        return lengths if len(lengths.values) == self.batch else lengths.part(self._first, self.batch)

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next `seq` tokens of each sequence: int64 [batch, seq]."""
        # A copy, as the lengths remember theirs and a method may return it.
        return self.lengths.positions(seq).clone()

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store more tokens: k and v [batch, seq, kv_heads, head_size].

        Raises RunError, before anything is written, if they do not fit.
        """
        state, seq = self._state, k.shape[1]
        before = self.lengths
        if before.longest + seq > self.max_seq:
            raise RunError(
                f"cache is full: 'max_seq' = {self.max_seq} holds {before.longest} tokens, {seq} more do not fit",
                help="make a cache with a larger max_seq, or call cache.reset()",
            )
        self.release()
        if before.longest + seq <= self.capacity:
            self._write(before, k, v, seq)
        else:
            self._turn_over(before, k, v, seq)
        state.lengths = state.lengths.grow(self._first, self.batch, seq)

    def keys(self) -> torch.Tensor:
        """Keys of the stored tokens: [batch, kv_heads, stored, head_size]."""
        chunk = self._chunk
        return self._keys.narrow(2, 0, self._used()) if chunk is None else chunk[0]

    def values(self) -> torch.Tensor:
        """Values of the stored tokens: [batch, kv_heads, stored, head_size]."""
        chunk = self._chunk
        return self._values.narrow(2, 0, self._used()) if chunk is None else chunk[1]

    def key_positions(self) -> torch.Tensor:
        """Position of the token in each slot: int64 [batch, stored], -1 for an empty slot."""
        chunk = self._chunk
        return self.lengths.stored(self.capacity) if chunk is None else chunk[2]

    def release(self) -> None:
        """Give back what only the attention of the last appended tokens needed."""
        if self._chunk is not None:
            self._state.scratch.clear()

    @property
    def _chunk(self) -> Chunk | None:
        scratch = self._state.scratch
        return scratch.get(id(self)) if scratch else None

    @property
    def is_turned(self) -> bool:
        """Whether a token has been overwritten, so that slots are not in the order of positions."""
        return self.lengths.longest > self.capacity

    @property
    def has_chunk(self) -> bool:
        """Whether keys and values are those of the ring before the last append, followed by the appended ones."""
        return self._chunk is not None

    def _used(self) -> int:
        return min(self.lengths.longest, self.capacity)

    def _write(self, before: Lengths, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Store tokens in slots that are free."""
        if before.equal is not None:
            n = before.equal
            self._keys.narrow(2, n, seq).copy_(k.transpose(1, 2))
            self._values.narrow(2, n, seq).copy_(v.transpose(1, 2))
        else:
            self._scatter(before.positions(seq), k, v)

    def _turn_over(self, before: Lengths, k: torch.Tensor, v: torch.Tensor, seq: int) -> None:
        """Store tokens over others. What the new ones see besides themselves is kept until the next append, or `release`."""
        positions = before.positions(seq)
        if seq > 1:
            used = min(before.longest, self.capacity)
            keys = torch.cat([self._keys[:, :, :used], k.transpose(1, 2)], 2)
            values = torch.cat([self._values[:, :, :used], v.transpose(1, 2)], 2)
            seen = before.remember(
                ("chunk", self.capacity, seq), lambda: torch.cat([before.stored(self.capacity), positions], 1)
            )
            # Only the layer that is at work needs one, so the layers share one place for it.
            self._state.scratch.clear()
            self._state.scratch[id(self)] = keys, values, seen
        keep = min(seq, self.capacity)
        self._scatter(positions[:, seq - keep :], k[:, seq - keep :], v[:, seq - keep :])

    def _scatter(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = positions % self.capacity
        rows = torch.arange(self.batch)[:, None]
        self._keys[rows, :, slots] = k
        self._values[rows, :, slots] = v

    def part(self, first: int, count: int) -> CacheLayer:
        """The same layer for some of its sequences."""
        keys, values = (buffer.narrow(0, first, count) for buffer in (self._keys, self._values))
        return CacheLayer(replace(self.type, batch=count), keys, values, self._state, self._first + first)


class _State:
    """What all views of a layer share: its lengths. `scratch` is shared by all layers: the chunk of the one that has one, by its id."""

    __slots__ = ("lengths", "scratch")

    def __init__(self, lengths: Lengths, scratch: dict[int, Chunk]) -> None:
        self.lengths = lengths
        self.scratch = scratch


class Cache(Sequence[CacheLayer]):
    """All layers of a cache. Make one with `session.make_cache(...)`.

    `batch` sequences of up to `max_seq` tokens. Iterates over its layers.
    """

    __slots__ = ("_layers", "_states", "batch", "layout", "max_seq", "type")

    def __init__(self, type: CacheType, layers: Sequence[CacheLayer]) -> None:
        self.type = type
        self.layout = layout(type)
        self.batch: int = layers[0].batch if layers else 0
        self.max_seq: int = layers[0].max_seq if layers else 0
        self._layers = tuple(layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""
        return list(self._lengths.values)

    def length(self, sequence: int = 0) -> int:
        """How many tokens a sequence has."""
        return self._lengths.values[sequence]

    @property
    def _lengths(self) -> Lengths:
        return self._layers[0].lengths if self._layers else Lengths(())

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(layer._keys.nbytes + layer._values.nbytes for layer in self._layers)

    def rows(self, first: int, stop: int | None = None) -> Cache:
        """Some sequences in a row, `first` alone by default, as a cache that shares their storage and lengths.

        Raises RunError for sequences that the cache does not have.
        """
        stop = first + 1 if stop is None else stop
        if not 0 <= first < stop <= self.batch:
            raise RunError(f"rows {first} to {stop} are not in a cache of {self.batch} sequences")
        layers = [layer.part(first, stop - first) for layer in self._layers]
        types: dict[int, CacheLayerType] = {}
        shared = tuple(
            types.setdefault(id(old), new.type) for old, new in zip(self.type.layers, layers, strict=True)
        )
        return Cache(CacheType(shared), layers)

    def reset(self) -> None:
        """Forget all tokens."""
        self._set(Lengths((0,) * self.batch))

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens of each sequence.

        Raises RunError if a window has dropped tokens that the sequence would see again.
        """
        self._cut(Lengths(tuple(min(n, length) for n in self._lengths.values)))

    def mark(self) -> Lengths:
        """What `restore` goes back to."""
        return self._lengths

    def restore(self, mark: Lengths) -> None:
        """Forget what was appended after `mark`, in every layer; for a call that failed half way.

        If a window's tokens have been overwritten meanwhile, nothing can be kept: the cache is reset.
        """
        try:
            self._cut(mark)
        except RunError:
            self.reset()

    def _cut(self, lengths: Lengths) -> None:
        for layer in self._layers:
            for now, wanted in zip(layer.lengths.values, lengths.values, strict=True):
                if now > layer.capacity and wanted < now - 1:
                    raise RunError(
                        f"the cache cannot be cut to {wanted} tokens: it has {now}, and a window keeps only the last {layer.capacity}",
                        help="call cache.reset() and give the tokens again",
                    )
        self._set(lengths)

    def _set(self, lengths: Lengths) -> None:
        for layer in self._layers:
            layer.release()
            state, first = layer._state, layer._first
            old = state.lengths.values
            state.lengths = Lengths(old[:first] + lengths.values + old[first + layer.batch :])

    def __repr__(self) -> str:
        return (
            f"<Cache {len(self)} layers, batch {self.batch}, max_seq {self.max_seq}, lengths {self.lengths}>"
        )


def make_cache(type: CacheType, sizes: Mapping[str, int]) -> Cache:
    """Make an empty cache of `type`, with a number for each of its dims by name."""
    scratch: dict[int, Chunk] = {}
    made: dict[CacheLayerType, CacheLayerType] = {}
    layers = []
    for layer in type.layers:
        if layer not in made:
            made[layer] = replace(
                layer, batch=evaluate(layer.batch, sizes), max_seq=evaluate(layer.max_seq, sizes)
            )
        layers.append(_make_layer(made[layer], scratch))
    return Cache(CacheType(tuple(layer.type for layer in layers)), layers)


def _make_layer(type: CacheLayerType, scratch: dict[int, Chunk]) -> CacheLayer:
    assert isinstance(type.batch, int)
    assert isinstance(type.max_seq, int)
    capacity = type.max_seq if type.window is None else min(type.window, type.max_seq)
    shape = (type.batch, type.kv_heads, capacity, type.head_size)
    # Zeroed, as attention multiplies empty slots by 0 and 0 times what happens to lie in memory may be NaN.
    keys, values = (torch.zeros(shape, dtype=getattr(torch, type.dtype)) for _ in range(2))
    return CacheLayer(type, keys, values, _State(Lengths((0,) * type.batch), scratch), 0)


Layout: TypeAlias = tuple[tuple[int, int, str, int | None], ...]


def layout(type: CacheType) -> Layout:
    """What a cache must have in common with another to be used in its place: heads, head size, dtype and window of each layer."""
    return _interned(tuple((x.kv_heads, x.head_size, x.dtype, x.window) for x in type.layers))


@lru_cache(maxsize=1024)
def _interned(value: Layout) -> Layout:
    return value


def describe(value: Layout) -> str:
    """A layout in words."""
    parts = []
    for heads, size, dtype, window in dict.fromkeys(value):
        count = value.count((heads, size, dtype, window))
        seen = "" if window is None else f", window {window}"
        parts.append(f"{count} layers of {heads} heads of {size} {dtype}{seen}")
    return "; ".join(parts) or "no layers"
