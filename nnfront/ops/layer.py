# SPDX-License-Identifier: Apache-2.0
"""What ops and kernels need of a layer of a cache at run time: the protocols that the storages of `nnfront.state` implement, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch

Value = TypeVar("Value")


class LayerLike(Protocol):
    """What the references of ops need. A token's buffer of type [*lead, last] is read as [batch, *lead, stored, last]."""

    @property
    def window(self) -> int | None:
        """How many last positions attention sees, None for all."""

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next `seq` tokens of each sequence, counted from 0: int64 [batch, seq]."""

    def last_positions(self, seq: int) -> torch.Tensor:
        """Positions of the last `seq` tokens of each sequence: int64 [batch, seq]. Raises RunError if what they see is there no more."""

    def append(self, *parts: torch.Tensor) -> None:
        """Store `seq` more tokens of each sequence: for each per-token buffer a tensor [batch, seq, *shape]. Visible from then on."""

    def stored(self, index: int) -> torch.Tensor:
        """The tokens of a per-token buffer: [batch, *lead, stored, last]."""

    def key_positions(self) -> torch.Tensor:
        """Position of the token in each slot of `stored`: int64 [batch, stored], -1 for an empty one."""

    def read(self, name: str) -> torch.Tensor:
        """A per-sequence buffer: [batch, *shape]. It keeps its elements when the layer is written."""

    def write(self, name: str, value: torch.Tensor, seq: int) -> None:
        """The content of a per-sequence buffer after `seq` more tokens: [batch, *shape]."""


class LengthsLike(Protocol):
    """How many tokens each sequence has; `equal` is the number if all have as many."""

    longest: int
    equal: int | None

    def counts(self) -> torch.Tensor:
        """int32 [batch]."""

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next tokens: int64 [batch, seq]."""

    def starts(self, seq: int) -> torch.Tensor:
        """Where each sequence begins among the next tokens of all, and where the last one ends: int32 [batch + 1]."""

    def remember(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` made for this key the first time."""


class StorageLike(Protocol):
    """Where kernels find the tokens of a layer: each per-token buffer [batch, *lead, slots, last], or [pages, *lead, page_size, last]."""

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """One for each per-token buffer, in their order."""

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """Of buffers in 8 bits the scale of each token: float32, their shape but for the last axis. Else none."""

    @property
    def pages(self) -> torch.Tensor | None:
        """The pages of each sequence, int32 [batch, pages at most], -1 where there is none; None without pages."""


class KernelLayerLike(Protocol):
    """What kernels need that write and read tokens by themselves."""

    @property
    def window(self) -> int | None:
        """As of `LayerLike`."""

    @property
    def max_seq(self) -> int:
        """How many tokens a sequence may have."""

    @property
    def lengths(self) -> LengthsLike:
        """How many each has now."""

    def reserve(self, seq: int) -> StorageLike:
        """Find places for `seq` more tokens of each sequence, which the caller stores, at their positions or on their pages; return where."""


def by_position(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a bias [batch or 1, ..., positions] says of keys at these positions [batch, keys], -1 where there is none: [batch, ..., keys]."""
    index = positions.clamp(min=0)[:, None, None, :]
    batch = len(positions)
    return bias.expand(batch, *bias.shape[1:]).gather(3, index.expand(batch, *bias.shape[1:3], -1))
