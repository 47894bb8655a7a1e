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

from nnfront.dims import Dim, describe_facts, evaluate, satisfies
from nnfront.errors import RunError
from nnfront.lower import CacheLayerType, CacheType
from nnfront.runtime.cache_layer import CacheLayer, Chunk, LayerState, make_layer
from nnfront.runtime.device import CPU
from nnfront.runtime.lengths import Lengths


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

    def clone(self) -> Cache:
        """A copy with buffers of its own."""
        scratch: dict[int, Chunk] = {}
        layers = [
            CacheLayer(x.type, x._keys.clone(), x._values.clone(), LayerState(x.lengths, scratch), 0)
            for x in self._layers
        ]
        return Cache(self.type, layers)

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


def make_cache(type: CacheType, sizes: Mapping[str, int], device: torch.device = CPU) -> Cache:
    """Make an empty cache of `type`, with a number for each of its dims by name."""
    scratch: dict[int, Chunk] = {}
    made: dict[CacheLayerType, CacheLayerType] = {}
    layers = []
    for layer in type.layers:
        if layer not in made:
            made[layer] = replace(
                layer, batch=evaluate(layer.batch, sizes), max_seq=evaluate(layer.max_seq, sizes)
            )
        layers.append(make_layer(made[layer], scratch, device))
    return Cache(CacheType(tuple(layer.type for layer in layers)), layers)


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


def cache_sizes(cache: CacheType, given: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """Check the dims of a cache: all that the weights do not bind, each inside its range."""
    symbols = {
        s.name: s
        for layer in cache.layers
        for size in (layer.batch, layer.max_seq)
        if isinstance(size, Dim)
        for s in size.symbols
    }
    needed = [name for name in symbols if name not in known]
    missing = [name for name in needed if name not in given]
    if missing:
        raise RunError(
            f"make_cache needs {', '.join(repr(n) for n in missing)}",
            help=f"make_cache({', '.join(f'{n}=...' for n in needed)})",
        )
    for name, number in given.items():
        if name not in needed:
            raise RunError(
                f"make_cache: {name!r} is not a dim of the cache",
                help=f"make_cache({', '.join(f'{n}=...' for n in needed)})",
            )
        if type(number) is not int or satisfies(number, symbols[name]) is False:
            raise RunError(
                f"make_cache: {name!r} is {number!r}, expected {describe_facts(*symbols[name].facts)}"
            )
    return {**known, **given}
