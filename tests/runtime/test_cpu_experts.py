# SPDX-License-Identifier: Apache-2.0
"""The experts of a feed-forward layer on a CPU against a loop over tokens in float64."""

import pytest
import torch
from torch.nn.functional import silu

from nnfront import ops
from nnfront.backends.cpu import linear as kernels
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure

resolve = resolver("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 40])
@pytest.mark.parametrize("by", ["few rows", "torch"])
def test_chosen_experts_agree_with_a_loop_in_float64(by, tokens, dtype, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(kernels, "SMALL_BATCH", None)
    x = torch.randn(tokens, 33).to(dtype)
    gate_up, down = torch.randn(5, 14, 33).to(dtype), torch.randn(5, 33, 7).to(dtype)
    chosen = torch.randint(-1, 6, (tokens, 3))  # -1 and 5 are no experts: they give nothing
    weights = torch.rand(tokens, 3).to(dtype)
    run = Run("moe_mlp_sorted", ops.moe_mlp.name, (), Structure(), {})
    y = resolve(run)(x, gate_up, down, chosen, weights)

    expected, sizes = torch.zeros(tokens, 33).double(), torch.zeros(tokens, 33).double()
    for token, experts in enumerate(chosen.tolist()):
        for slot, expert in enumerate(experts):
            if 0 <= expert < 5:
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                share = down[expert].double() @ (silu(gate) * up) * weights[token, slot].double()
                expected[token] += share
                sizes[token] += down[expert].double().abs() @ (silu(gate) * up).abs()
    assert y.dtype == dtype
    # Gate, up, their product and the result are rounded.
    assert ((y.double() - expected).abs() <= sizes * torch.finfo(dtype).eps * 4 + 1e-5).all()
