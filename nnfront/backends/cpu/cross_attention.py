# SPDX-License-Identifier: Apache-2.0
"""Attention to all that a layer of a cache holds, such as what an encoder has stored, through torch's flash attention: nothing is appended or copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from nnfront.backends.cpu.attention_kinds import softmax_only, stored
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.state.layer import CacheLayer


def _is_to_all(run: Run, context: Context) -> str:
    """Accept queries of what has been stored before, without order."""
    if run.attrs.get("is_causal", True):
        return "it is causal"
    if not context.is_none(run.inputs[1]):
        return "it appends"
    if not all(context.is_none(slot) for slot in run.inputs[5:]):
        return "it has a bias"
    return stored(run, context) or softmax_only(run, context) or ACCEPTED


def _cross_attention(run: Run) -> Callable[..., tuple[torch.Tensor, CacheLayer]]:
    """Attend from q [batch, seq, heads, size]; the queries of a group of heads are those of one head."""
    scale, value_size = run.attrs.get("scale"), run.attrs.get("value_size")

    def cross_attention(
        q: torch.Tensor, k: None, v: None, layer: CacheLayer, sinks: None, bias: None = None
    ) -> tuple[torch.Tensor, CacheLayer]:
        keys = layer.stored(0)
        values = layer.stored(1) if value_size is None else keys[..., :value_size]
        batch, seq, heads, size = q.shape
        if not q.numel() or not keys.numel():
            return q.new_zeros((batch, seq, heads, values.shape[3])), layer
        lengths, groups = layer.lengths, keys.shape[1]
        mask = None
        if lengths.equal is None:
            mask = lengths.remember(
                ("stored", layer.slot_order, q.dtype), partial(_empty_slots, layer, q.dtype)
            )
        query = q.reshape(batch, seq, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, groups, heads // groups * seq, size)
        y = attend(query, keys, values, mask, scale=scale).view(batch, heads, seq, values.shape[3])
        return y.transpose(1, 2), layer

    return cross_attention


def _empty_slots(layer: CacheLayer, dtype: torch.dtype) -> torch.Tensor:
    """Minus infinity where a sequence has no token: [batch, 1, 1, stored]."""
    at = layer.key_positions()[:, None, None]
    return torch.zeros(at.shape, dtype=dtype).masked_fill_(at < 0, -torch.inf)


KERNELS = (
    Kernel(
        "cross_attention",
        "attention",
        _cross_attention,
        "torch's attention to all that a layer holds",
        _is_to_all,
        workspace=Workspace(lambda run, *operands: operands[0].size_bytes),
    ),
)
