# SPDX-License-Identifier: Apache-2.0
"""Launch a plan twice on poisoned outputs, its blocks in both orders, and see that both results have the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from kernel_checks import Guarded
from kernel_memory import watched
from nnfront_kernels.common import Plan

POISONS = (0xFF, 0x5A)  # NaN in every float dtype; a plausible number


def launched_twice(
    outputs: Callable[[int], list[Guarded]], planned: Callable[[list[torch.Tensor]], Plan]
) -> list[torch.Tensor]:
    """Outputs of the launch, copied. `outputs(pattern)` makes the buffers, `planned(views)` the plan that writes to them.

    A workspace of partial results goes from the first launch to the second as it was left, with counts that must be zero.
    """
    results: list[list[torch.Tensor]] = []
    for backwards, pattern in enumerate(POISONS):
        buffers = outputs(pattern)
        plan = planned([buffer.view for buffer in buffers])
        partial, arrived = (plan.arguments.get(name) for name in ("partial_ptr", "arrived_ptr"))
        if partial is not None:
            partial.fill_(math.nan)
        with watched(plan.arguments, backwards=bool(backwards)):
            plan.launch()
        for buffer in buffers:
            buffer.check()
        assert arrived is None or not arrived.any(), "counts are not back to zero"
        results.append([buffer.view.clone() for buffer in buffers])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), (
            "two runs in different orders differ"
        )
    return results[0]
