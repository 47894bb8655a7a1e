# SPDX-License-Identifier: Apache-2.0
"""Experts on CUDA: launches of `nnfront_kernels` that route tokens, multiply all experts at once and add up their shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.cuda.linear import in_rows
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower import Run
from nnfront.passes.weight_layouts import LAYOUTS

_OPTIONS = {"activation", "gated", "alpha", "limit", "up_offset"}
_SEGMENTS = "tokens sorted by expert on the device, one launch for all experts, shares added in order"


def _experts_accepts(run: Run, context: Context) -> str:
    x, gate_up, down, experts, *_ = run.inputs
    hidden, top_k = context.tensor(x).shape[1], context.tensor(experts).shape[1]
    count, size, _ = context.tensor(gate_up).shape
    if not all(isinstance(n, int) for n in (hidden, count, size, top_k)):
        return "sizes of the experts are not known"
    shaped, dtype = kernel_module("grouped_matmul").GroupedShape, context.tensor(x).dtype
    first = shaped(1, top_k, count, size, hidden, gated=run.attrs.get("gated", True), gather=True)
    second = shaped(1, top_k, count, hidden, context.tensor(down).shape[2], gather=False)
    return (
        asked("grouped_matmul", first, dtype, context)
        or asked("grouped_matmul", second, dtype, context)
        or asked("moe_routing", kernel_module("moe_routing").RoutingShape(1, top_k, count), "int32", context)
    )


def _interleaved(run: Run, context: Context) -> str:
    """Experts without a gate, or whose gate and up alternate as they are, or why they do not in a copy."""
    return _experts_accepts(run, context) or (
        ACCEPTED
        if "interleaved" in run.attrs or "gated" in run.attrs
        else "gate_up is no weight, or something else reads it as it is"
    )


def _experts(run: Run) -> Callable[..., Any]:
    routing, grouped, combine = map(kernel_module, ("moe_routing", "grouped_matmul", "moe_combine"))
    options = {"gated": True} | {name: run.attrs[name] for name in _OPTIONS & run.attrs.keys()}

    def triton_experts(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        count, size, hidden = gate_up.shape
        chosen = experts.to(torch.int32).contiguous()
        shape = grouped.GroupedShape(len(x), chosen.shape[1], count, size, hidden, options["gated"])
        config = grouped.choose(
            shape, str(x.dtype).removeprefix("torch."), kernel_module("common").arch_of(x.device)
        )
        slots = routing.launch(chosen, num_experts=count, block_m=config.block_m)
        hidden_rows = grouped.launch(in_rows(x), gate_up, slots, gather=True, bias=gate_up_bias, **options)
        shares = grouped.launch(hidden_rows, down, slots, scatter=True, bias=down_bias)
        y: torch.Tensor = combine.launch(shares, weights, chosen, num_experts=count)
        return y

    return triton_experts


_EXPERTS = Kernel("triton_experts", "experts", _experts, _SEGMENTS, _interleaved)
_PACKED = LAYOUTS["interleaved_experts"]
KERNELS = (replace(_EXPERTS, op=_PACKED.region, accepts=_experts_accepts, layout=_PACKED), _EXPERTS)
