# SPDX-License-Identifier: Apache-2.0
"""Run an op that treats rows apart from each other a few rows at a time, so that what it holds on the way stays in the cache.

A reference computes in float32 with several copies of its operand: for a large embedding those would be gigabytes. In blocks
they are megabytes, and the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from nnfront.ir import OPS
from nnfront.lower import Run

BLOCK_ELEMENTS = 1 << 20
"""Elements of an operand in one block: 4 MB in float32."""


def works_on_rows(run: Run, shape: Sequence[int]) -> bool:
    """Whether the instruction may run in blocks, given the shape of its first operand."""
    op = OPS.get(run.op)
    if op is None or not op.rowwise or len(shape) < 2:
        return False
    axis = op.full_attrs(run.attrs).get("axis")
    return axis is None or axis % len(shape) != 0


def run_in_blocks(
    call: Callable[..., Any], operands: Sequence[Any], keywords: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the results of `call`, made block by block; operands that are tensors all have the same number of rows."""
    rows = operands[0].shape[0]
    size = max(BLOCK_ELEMENTS // max(prod(operands[0].shape[1:]), 1), 1)
    results: list[torch.Tensor] = []
    for begin in range(0, max(rows, 1), size):
        block = [each[begin : begin + size] if isinstance(each, torch.Tensor) else each for each in operands]
        found = call(*block, **keywords)
        parts = found if isinstance(found, tuple) else (found,)
        if not results:
            results = [part.new_empty((rows, *part.shape[1:])) for part in parts]
        for result, part in zip(results, parts, strict=True):
            result[begin : begin + size] = part
    return results
