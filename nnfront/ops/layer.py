# SPDX-License-Identifier: Apache-2.0
"""What ops need of a layer of a cache at run time: the protocol that the storages of `nnfront.state` implement, and what stands in for them."""

from __future__ import annotations

from typing import Protocol

import torch


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


def by_position(bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a bias [batch or 1, ..., positions] says of keys at these positions [batch, keys], -1 where there is none: [batch, ..., keys]."""
    index = positions.clamp(min=0)[:, None, None, :]
    batch = len(positions)
    return bias.expand(batch, *bias.shape[1:]).gather(3, index.expand(batch, *bias.shape[1:3], -1))
