# SPDX-License-Identifier: Apache-2.0
"""Tensors and cache layers as far as memory is concerned: sizes, strides, bytes. No data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nnfront import dtypes


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor as far as memory is concerned: sizes and strides in elements, dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.item

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return dtypes.size_bytes(self.dtype)

    @property
    def is_half(self) -> bool:
        """Whether it is computed with in float32."""
        return self.dtype in ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a cache, with room for `capacity` tokens of each sequence."""

    batch: int
    kv_heads: int
    capacity: int
    head_size: int
    dtype: str
    window: int | None

    @property
    def size_bytes(self) -> int:
        """Bytes of both buffers."""
        return 2 * self.batch * self.kv_heads * self.capacity * self.head_size * dtypes.size_bytes(self.dtype)


def contiguous(shape: Sequence[int], dtype: str) -> Layout:
    """Return the layout of a tensor whose last axis is the densest and which has no gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(tuple(shape), tuple(reversed(strides)), dtypes.check(dtype))
