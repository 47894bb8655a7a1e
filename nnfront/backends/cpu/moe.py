# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on a CPU: one product for each expert that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu.activations import ACTIVATIONS
from nnfront.backends.cpu.linear import linear_bfloat16
from nnfront.backends.kernel import Kernel
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layout


def sorted_by_expert(multiply: Callable[[Run], Callable[..., Any]], run: Run) -> Callable[..., Any]:
    """One product for each expert that was chosen, over the tokens that chose it; shares are added in the order of the choices."""
    activate, linear = ACTIVATIONS[run.attrs.get("activation", "silu")], multiply(run)

    def moe_mlp_sorted(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        tokens, top_k = experts.shape
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        shares = x.new_zeros(tokens * top_k, x.shape[1], dtype=wide)
        chosen, order = experts.reshape(-1).sort(stable=True)
        first = 0
        for expert, count in enumerate(torch.bincount(chosen.clamp(-1, len(gate_up)) + 1).tolist(), -1):
            slots, first = order[first : first + count], first + count
            if count and 0 <= expert < len(gate_up):
                gate, up = linear(x[slots // top_k], gate_up[expert], None).chunk(2, -1)
                shares[slots] = linear(activate(gate).mul_(up), down[expert], None).to(wide)
        return shares.view(tokens, top_k, x.shape[1]).mul_(weights.to(wide).unsqueeze(-1)).sum(1).to(x.dtype)

    return moe_mlp_sorted


def _moe_mlp_sorted_bytes(
    run: Run, x: Layout, gate_up: Layout, down: Layout, experts: Layout, weights: Layout
) -> int:
    """All shares in float32, the order of the slots, and what one expert takes, to which all tokens may go."""
    slots, hidden, size = experts.count, x.shape[-1], down.shape[-1]
    one_expert = slots * (x.item * (hidden + 2 * size + hidden) + (4 * hidden if x.is_half else 0))
    return slots * (4 * hidden + 3 * 8) + one_expert


def _linear(run: Run) -> Callable[..., Any]:
    """Few tokens of an expert in bfloat16 in the kernel for them."""
    of_bfloat16 = linear_bfloat16(run)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return (of_bfloat16 if x.dtype == torch.bfloat16 else F.linear)(x, weight, bias)

    return linear


KERNELS = (
    Kernel(
        "moe_mlp_sorted",
        "moe_mlp",
        partial(sorted_by_expert, _linear),
        "the experts that were chosen, each with its tokens at once",
        workspace=Workspace(_moe_mlp_sorted_bytes),
        reads_back=True,
    ),
)
