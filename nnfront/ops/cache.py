# SPDX-License-Identifier: Apache-2.0
"""Handles of key/value caches: taking a cache apart into its layers, and where the next tokens stand.

A handle is a value that is used up by the op that writes it, which gives back the written one. At run time a cache iterates
over its layers, and a layer is what `nnfront.ops.attention` says; joining gives a tuple of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nnfront.dims import Size, to_size
from nnfront.ir.op import op
from nnfront.ir.types import CacheLayerType, CacheType, TensorType, TupleType


@op(writes="cache", view="always", moves=True, scratch=False)
def cache_split(cache: CacheType) -> TupleType:
    """A handle for each layer. The cache's own handle is used up until `cache_join` makes another."""
    return TupleType(cache.layers)


@cache_split.reference
def _(cache: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(cache)


@op(writes="layers", view="always", moves=True, scratch=False)
def cache_join(*layers: CacheLayerType) -> CacheType:
    """The cache of these layers. Their handles are used up."""
    return CacheType(layers)


@cache_join.reference
def _(*layers: Any) -> tuple[Any, ...]:
    return layers


@op(moves=True)
def cache_positions(cache: CacheLayerType, seq: Size) -> TensorType:
    """The positions of the next `seq` tokens of each sequence, counted from 0: int64 [batch, seq]. Writes nothing."""
    return TensorType((cache.batch, seq), "int64")


@cache_positions.normalize
def _(cache: CacheLayerType, seq: Size | str) -> dict[str, Any]:
    return {"seq": to_size(seq)}


@cache_positions.reference
def _(cache: Any, seq: int) -> torch.Tensor:
    positions: torch.Tensor = cache.positions(seq)
    return positions
