# SPDX-License-Identifier: Apache-2.0
"""What tokens cost besides products, in C: rope, storing them in the cache, attention, each token as it would attend alone.

Between products that leave nothing in the caches each call of torch costs several times what it does. Attention alone: 14 heads of 64 in 2 groups at
540 tokens take 66 us in torch's flash attention and 27 here, 32 heads in 8 groups 160 and 60 (2 threads, EPYC with AVX512_BF16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from nnfront.lower import Run
from nnfront.memory.layout import Layer
from nnfront.state.layer import CacheLayer, Storage

# Features of a key and a value that C has room for.
MOST_FEATURES = 4096


@dataclass(frozen=True)
class Scores:
    """What attention does with scores: as `op.attention` has it."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    value_size: int | None = None

    @classmethod
    def of(cls, run: Run) -> Scores:
        """Return that of an instruction: of the op or of a region."""
        return cls(*(run.attrs.get(name) for name in ("scale", "window", "softcap", "value_size")))

    def reals(self, size: int) -> tuple[float, float]:
        """The scale and the soft cap that C wants for queries of `size` features."""
        return float(size**-0.5 if self.scale is None else self.scale), float(self.softcap or 0.0)

    def seen(self, layer: CacheLayer | Layer) -> int:
        """How many tokens of a layer a query sees, 0 for all."""
        return min((limit for limit in (self.window, layer.window) if limit is not None), default=0)


def bias_sizes(shape: Sequence[int] | None, itemsize: int) -> tuple[int, int, int, int, int]:
    """What C wants to know of a bias [1 or batch, 1 or heads, 1 or tokens, positions]: positions, elements from a sequence, from a head and from a
    token to the next, bytes.
    """
    if shape is None:
        return 0, 0, 0, 0, 0
    batch, heads, seq, positions = shape
    each = seq * positions
    return positions, heads * each * (batch > 1), each * (heads > 1), positions * (seq > 1), itemsize


def are_tables(shape: tuple[int, ...], rows: int, size: int) -> bool:
    """Whether tables of this shape turn heads of `size` features, all rows alike or each by its own."""
    rotated = shape[-1]
    return 0 < rotated <= size and rotated % 2 == 0 and prod(shape) in (rotated, rows * rotated)


def places(storage: Storage, layer: CacheLayer) -> tuple[Any, ...]:
    """What C wants to know of a layer: pages, scales of keys and values, keys, values, lengths; tokens of a page or of a sequence, pages of a
    sequence at most, and of all. None is what there is not: values may be parts of the keys.
    """
    keys, values = (*storage.buffers, None)[:2]
    assert keys is not None
    key_scales, value_scales = (*storage.scales, None, None)[:2]
    columns, pool = (0, 0) if storage.pages is None else (storage.pages.shape[1], len(keys))
    scales_and_tokens = key_scales, value_scales, keys, values
    return storage.pages, *scales_and_tokens, layer.lengths.counts(), keys.shape[-2], columns, pool


PLACES = 9
"""How many these are; the last three are numbers."""
