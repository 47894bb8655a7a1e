# SPDX-License-Identifier: Apache-2.0
"""A key/value cache as a method sees it while it is traced.

`cache[i]` is layer i; `op.attention(..., cache=cache[i])` appends to it and attends. The trace threads the written handles,
so a method need not return them. In eager execution the run-time cache stands in the same place with the same face.
"""

from __future__ import annotations

from collections.abc import Iterator

from nnfront.dims import Size
from nnfront.errors import TraceError
from nnfront.ir import StateLayerType, StateType, Var


class CacheLayer:
    """One layer: `handle` is the variable that holds its present state."""

    __slots__ = ("handle", "type")

    def __init__(self, type: StateLayerType, handle: Var) -> None:
        self.type = type
        self.handle = handle

    def __repr__(self) -> str:
        return "<one layer of a cache>"

    @property
    def window(self) -> int | None:
        """How many last positions attention sees, None for all."""
        return self.type.window

    @property
    def max_seq(self) -> Size:
        """How many positions there are at most: the last axis of a bias of attention."""
        return self.type.max_seq


class Cache:
    """All layers of a cache."""

    __slots__ = ("layers", "type")

    def __init__(self, type: StateType, layers: list[CacheLayer]) -> None:
        self.type = type
        self.layers = layers

    def __repr__(self) -> str:
        return f"<a cache of {len(self.layers)} layers>"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> CacheLayer:
        count = len(self.layers)
        if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
            raise TraceError(
                f"cache[{index!r}]: the cache has layers 0 to {count - 1}",
                help="index with an int; spec.Cache(layers, ...) says how many there are",
            )
        return self.layers[index]

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self.layers)
