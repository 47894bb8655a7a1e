# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt, a block of its tokens after the other: what that takes besides its result depends on the block, not on how much came before.

A block that sees more than NEAR keys attends to them in pieces of so many, of which torch lays keys and values out anew, and each piece gives its result with the logarithm of the sum
that it is divided by; results are added in proportion to these sums (FlashAttention-2, arXiv 2307.08691, section 3.1). Keys in front of the block need no mask.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from nnfront.backends.cpu.attention_memory import BLOCK, NEAR
from nnfront.state.lengths import SequenceLengths


def in_blocks(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, memory: SequenceLengths, scale: float | None
) -> torch.Tensor:
    """Attend causally, the last query to all keys: q [batch, seq, heads, size], keys and values [batch, groups, stored, size].

    `memory` keeps the masks for the next layer.
    """
    batch, seq, heads, size = q.shape
    groups, stored = keys.shape[1:3]
    shared, before = heads // groups, stored - seq
    y = q.new_empty((batch, seq, heads, values.shape[3]))
    for first in range(0, seq, BLOCK):
        count = min(BLOCK, seq - first)
        seen = before + first + count
        is_far = seen > NEAR and values.shape[3] == size
        masked = count if is_far else min(stored, NEAR) if values.shape[3] == size else stored
        mask = memory.remember(
            ("block", count, masked, shared, q.dtype), partial(_block_mask, count, masked, shared, q.dtype)
        )
        query = q.narrow(1, first, count).view(batch, count, groups, shared, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, groups, shared * count, size)
        if is_far:
            part = _in_pieces(query, keys, values, seen, mask, scale)
        else:
            near, own = keys.narrow(2, 0, seen), values.narrow(2, 0, seen)
            part = attend(query, near, own, mask[:, masked - seen :], scale=scale)
        part = part.view(batch, groups, shared, count, -1).permute(0, 3, 1, 2, 4)
        y.narrow(1, first, count).view(part.shape).copy_(part)
    return y


def _in_pieces(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: int,
    mask: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attend to the first `seen` keys, the last of them under a mask: query [batch, groups, rows, size], mask [rows, own]."""
    past = seen - mask.shape[1]
    ends = [*range(NEAR, past, NEAR), past, seen]
    total: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    for begin, end in zip([0, *ends], ends, strict=False):
        part, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            keys.narrow(2, begin, end - begin),
            values.narrow(2, begin, end - begin),
            attn_mask=mask[None, None] if end == seen else None,
            scale=scale,
        )
        if total is None or sums is None:
            total, sums = part.float(), logs
            continue
        both = torch.logaddexp(sums, logs)
        total.mul_((sums - both).exp_().unsqueeze(-1))
        total.addcmul_(part.float(), (logs - both).exp_().unsqueeze(-1))
        sums = both
    assert total is not None
    return total.to(query.dtype)


def _block_mask(count: int, stored: int, shared: int, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask of the last `count` of `stored` tokens, for each head of a group: [shared * count, stored].

    Its last columns are the mask of a block that sees fewer.
    """
    hidden = torch.ones(count, stored, dtype=torch.bool).triu_(stored - count + 1)
    return torch.zeros(count, stored, dtype=dtype).masked_fill_(hidden, -torch.inf).repeat(shared, 1)
