# SPDX-License-Identifier: Apache-2.0
"""The contiguous cache, and making a cache of either kind.

The contiguous one has buffers [batch, *lead, capacity, last] for what a layer keeps of tokens. Its sequences may have different lengths; as
long as they have the same one, everything is a view: no masks, no gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nnfront.backends.registry import backend_of
from nnfront.dims import evaluate
from nnfront.lower import StateLayerType, StateType
from nnfront.state.cache import Cache
from nnfront.state.paged import PagedCache, make_paged
from nnfront.state.quantize import is_quantized
from nnfront.state.ring import RingLayer, make_layer
from nnfront.state.use import Use


class ContiguousCache(Cache):
    """A cache whose sequences have a buffer each. A fork copies."""

    __slots__ = ()

    _layers: tuple[RingLayer, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def clone(self) -> ContiguousCache:
        return self._fork(tuple(range(self.batch)))

    def _fork(self, sequences: tuple[int, ...]) -> ContiguousCache:
        use = Use()
        chosen = torch.tensor(sequences, dtype=torch.int64, device=self._lengths.device)
        layers = [
            layer.copied(chosen, lengths, use)
            for layer, lengths in zip(self._layers, self._lengths_of(sequences), strict=True)
        ]
        return self._with(layers, use)


# What a cache may be, exactly.
CACHES = ContiguousCache, PagedCache


def make_cache(
    type: StateType,
    sizes: Mapping[str, int],
    target: str = "cpu",
    *,
    pages: int | None = None,
    page_size: int | None = None,
    stored_as: str | None = None,
) -> Cache:
    """Make an empty cache of `type` for programs of a target, with a number for each of its dims by name; a paged one if there is a page size.

    `stored_as`: "float8_e4m3fn" for codes of 8 bits. Raises RunError for pages that cannot be, and for another way to store.
    """
    made: dict[StateLayerType, StateLayerType] = {}
    for layer in type.layers:
        if layer not in made:
            batch, max_seq = evaluate(layer.batch, sizes), evaluate(layer.max_seq, sizes)
            made[layer] = replace(layer, batch=batch, max_seq=max_seq)
    types = StateType(tuple(made[layer] for layer in type.layers))
    backend, coded = backend_of(target), is_quantized(stored_as)
    device = backend.device(target)
    if page_size is not None or pages is not None:
        return make_paged(types, page_size, pages, device, allowed=backend.page_sizes(target), coded=coded)
    use = Use()
    layers = [
        make_layer(layer, use, device, turns=backend.ring_windows, coded=coded) for layer in types.layers
    ]
    cache = ContiguousCache(types, layers, use)
    cache.reset()  # gives all layers the same lengths, by which they share positions and masks
    return cache
