# SPDX-License-Identifier: Apache-2.0
"""Tensors and cache layers as far as memory is concerned: sizes, strides, bytes. No data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nnfront import dtypes
from nnfront.ir import Buffer, StateLayerType


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
    def is_contiguous(self) -> bool:
        """Whether it is as `contiguous` makes it, where that makes a difference."""
        strides = zip(self.shape, self.strides, contiguous(self.shape, self.dtype).strides, strict=True)
        return not self.count or all(size == 1 or found == dense for size, found, dense in strides)

    @property
    def is_half(self) -> bool:
        """Whether it is computed with in float32."""
        return self.dtype in ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a contiguous cache, with room for `capacity` tokens of each sequence."""

    type: StateLayerType
    batch: int
    capacity: int

    @property
    def window(self) -> int | None:
        """How many last positions attention sees, None for all."""
        return self.type.window

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one sequence."""
        return sum(map(_bytes, self.type.per_token))

    @property
    def sequence_bytes(self) -> int:
        """Bytes of what is kept of one sequence, however long it is."""
        return sum(map(_bytes, self.type.per_sequence))

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.batch * (self.capacity * self.token_bytes + self.sequence_bytes)

    def tokens_shape(self, buffer: Buffer) -> tuple[int, ...]:
        """How a token's buffer lies in memory: [batch, *lead, capacity, last]."""
        return self.batch, *buffer.shape[:-1], self.capacity, buffer.shape[-1]


def _bytes(buffer: Buffer) -> int:
    return prod(buffer.shape) * dtypes.size_bytes(buffer.dtype)


def contiguous(shape: Sequence[int], dtype: str) -> Layout:
    """Return the layout of a tensor whose last axis is the densest and which has no gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(tuple(shape), tuple(reversed(strides)), dtypes.check(dtype))
