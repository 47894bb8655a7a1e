# SPDX-License-Identifier: Apache-2.0
"""How the kernels of CUDA are asked what they allocate: without a GPU, and with a launcher that launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.memory.allocations import Operand
from nnfront.memory.layout import Layer
from nnfront.state.layer import Storage
from nnfront.state.lengths import SequenceLengths
from nnfront.state.quantize import Parts


@contextmanager
def launching_nothing(target: str) -> Iterator[None]:
    """Inside of this kernels plan their launches for a target's architecture, and launch none."""
    common = kernel_module("common")
    with common.planning_for(arch_of(target)), common.launched_by(_nothing):
        yield


def _nothing(plan: Any) -> None:
    """A launcher that launches nothing."""


def without_data(operand: Operand) -> Any:
    """What stands in for an operand that is no tensor."""
    return LongLayer(operand) if isinstance(operand, Layer) else operand


class LongLayer:
    """A layer of a cache without data, as full as it may be for one more token: what kernels want of one."""

    def __init__(self, layer: Layer) -> None:
        self.window = layer.window
        self.max_seq = layer.capacity
        self.lengths = SequenceLengths((max(layer.capacity - 1, 0),) * layer.batch)
        buffers = (
            torch.empty(layer.tokens_shape(b), dtype=getattr(torch, b.dtype)) for b in layer.type.per_token
        )
        self.storage = Storage.of(Parts(tuple(buffers)))  # where its tokens would lie

    def reserve(self, seq: int) -> Storage:
        """Its place is there already."""
        self.lengths = self.lengths.grow(0, len(self.lengths.values), seq)
        return self.storage
