# SPDX-License-Identifier: Apache-2.0
"""A cache as a captured call sees it: where tokens lie and how many there are is in memory that stays where it is; the host knows neither."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NoReturn

import torch

from nnfront.errors import RunError
from nnfront.state.cache import Cache
from nnfront.state.layer import CacheLayer, Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.use import LayerState


class CapturedLayer(CacheLayer):
    """A layer that kernels append to by themselves. What would need to know on the host how many tokens there are raises RunError."""

    __slots__ = ("_storage",)

    def __init__(self, layer: CacheLayer, lengths: SequenceLengths) -> None:
        super().__init__(layer.type, LayerState(lengths, layer._state.use), 0, {})
        self._storage = layer.storage

    @property
    def storage(self) -> Storage:
        return self._storage

    def take(self, seq: int) -> None:
        """Count more tokens on the device; the real layer has found places for them."""
        self._state.lengths = self._state.lengths.grow(0, self.batch, seq)

    def append(self, *parts: torch.Tensor) -> None:
        self._refuse()

    def stored(self, index: int) -> torch.Tensor:
        self._refuse()

    def key_positions(self) -> torch.Tensor:
        self._refuse()

    @property
    def slot_order(self) -> Hashable:
        self._refuse()

    def keeps(self, row: int, length: int) -> bool:
        self._refuse()

    def release(self) -> None:
        self._refuse()

    def part(self, first: int, count: int) -> CapturedLayer:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RunError("a kernel asks the host how many tokens a cache holds")


def still(cache: Cache, counts: torch.Tensor, longest: int) -> tuple[CapturedLayer, ...]:
    """The layers of a cache whose lengths are what `counts`, int32 [batch], holds when the work is done; `longest` bounds them."""
    lengths = SequenceLengths((longest,) * cache.batch, counts.device)
    lengths.equal = None  # on the host nothing is known to be equal
    lengths.remember("counts", lambda: counts)
    return tuple(CapturedLayer(layer, lengths) for layer in cache)
