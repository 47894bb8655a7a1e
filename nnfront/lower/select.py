# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call: a table. The first rule of an op that applies decides; without one the op's torch reference runs."""

from __future__ import annotations

from nnfront.lower.frame import Frame
from nnfront.lower.program import Block


def select(block: Block, frame: Frame, target: str) -> Block:
    """Return the block with the kernels of `target`."""
    return block
