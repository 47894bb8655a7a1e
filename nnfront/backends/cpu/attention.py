# SPDX-License-Identifier: Apache-2.0
"""Attention through torch's flash attention, where `decode_attention` does not take it: no matrix of scores, and no copies of keys and values for the heads
that share them.

Torch keeps one thread on each head of each sequence, and reads a shared key head once for each query head. With one query per
head (decoding) the query heads of a group are therefore given to it as the queries of one head: 8 groups of 4 heads of 64 at
2048 tokens take 0.43 ms instead of 1.9 in float32, 1.3 instead of 11 in bfloat16 (one thread).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from nnfront.backends.cpu.attention_blocks import in_blocks
from nnfront.backends.cpu.attention_kinds import no_scale_dtype, stored, to_all, with_cache, without_cache
from nnfront.backends.cpu.attention_memory import (
    BLOCK,
    FOLDED,
    as_op,
    cached_bytes,
    fused_bytes,
    general_bytes,
    mask_bytes,
    sdpa_fused_bytes,
)
from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.in_c import kernel
from nnfront.backends.cpu.tape_attention import write_attention
from nnfront.backends.kernel import Kernel
from nnfront.lower import Run, by_position
from nnfront.lower.reference import reference
from nnfront.memory.allocations import Workspace
from nnfront.state.layer import CacheLayer
from nnfront.state.lengths import SequenceLengths
from nnfront.state.paged import PagedLayer


def cached(run: Run) -> Callable[..., Any]:
    """Append to a layer of a cache and attend to what it holds."""
    scores, general = Scores.of(run), reference(as_op(run))  # soft caps and sinks of more than C takes
    scale, own_window, value_size = scores.scale, scores.window, run.attrs.get("value_size")
    is_causal = run.attrs.get("is_causal", True)

    def attention_cached(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: CacheLayer,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, CacheLayer]:
        plain = (k, v) if k is not None and v is not None and bias is None else None
        if scores.softcap is not None or sinks is not None or not is_causal:
            y = _block_by_block(general, q, k, v, layer, sinks, bias, is_causal)
            layer.attended()
            return y, layer
        seq = q.shape[1]
        if plain is not None and seq == 1 and len(q):
            seen = _append_token(*plain, layer, own_window)
            if seen is not None:
                return _folded(q, *seen, None, scale), layer
        if k is None:
            before = layer.lengths.back(seq)
            layer.last_positions(seq)  # which says so if they see what is gone
        else:
            before = layer.lengths
            layer.append(*(part for part in (k, v) if part is not None))
        if seq == 1 and len(q) > 1 and bias is None and isinstance(layer, PagedLayer):
            # Each sequence by itself: filled up to the longest, its sums would have another order, and a copy of its pages be made.
            rows = ((q.narrow(0, i, 1), layer.part(i, 1), before.part(i, 1)) for i in range(len(q)))
            y = torch.cat([attend_to(*row, None) for row in rows])
        else:
            y = attend_to(q, layer, before, bias)
        layer.attended()
        return y, layer

    def attend_to(
        q: torch.Tensor, layer: CacheLayer, before: SequenceLengths, bias: torch.Tensor | None
    ) -> torch.Tensor:
        keys = layer.stored(0)
        values = layer.stored(1) if value_size is None else keys[..., :value_size]
        if not q.numel():
            return q.new_empty((*q.shape[:3], values.shape[-1]))
        window = layer.window
        if own_window is not None:
            window = own_window if window is None else min(window, own_window)
        seq, stored = q.shape[1], keys.shape[2]
        sees_all = window is None or stored <= window
        if bias is None and before.equal is not None and seq > FOLDED and sees_all:
            return in_blocks(q, keys, values, before, scale)
        mask = None
        if before.equal is None or seq > 1 or not sees_all:
            mask = _mask(before, layer, seq, window, q.dtype)
        if bias is not None:
            mask = _with_bias(mask, by_position(bias, layer.key_positions()), q.dtype)
        if seq <= FOLDED if bias is None else seq == bias.shape[1] == 1:
            return _folded(q, keys, values, mask, scale)
        gqa = q.shape[2] != keys.shape[1]
        return attend(q.transpose(1, 2), keys, values, mask, scale=scale, enable_gqa=gqa).transpose(1, 2)

    return attention_cached


def _block_by_block(
    general: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: CacheLayer,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Append and attend a block of tokens after the other, so that there are never the scores of all; at once, if tokens see later ones, or others
    read what a ring has dropped meanwhile."""
    seq = q.shape[1]
    fits = layer.lengths.longest + seq <= layer.max_seq
    if k is None or seq <= BLOCK or layer.is_read_again or not (fits and is_causal):
        y, _ = general(q, k, v, layer, sinks, bias)
        return torch.as_tensor(y)
    parts = []
    for first in range(0, seq, BLOCK):
        q_part, k_part, v_part = (
            None if t is None else t.narrow(1, first, min(BLOCK, seq - first)) for t in (q, k, v)
        )
        of_part = bias
        if bias is not None and bias.shape[2] > 1:
            of_part = bias.narrow(2, first, min(BLOCK, seq - first))
        parts.append(general(q_part, k_part, v_part, layer, sinks, of_part)[0])
    return torch.cat(parts, 1)


def _append_token(
    k: torch.Tensor, v: torch.Tensor, layer: CacheLayer, window: int | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Store one more token of each sequence and return all keys and values [batch, kv_heads, stored, size], if each sequence has as many and
    a query with this window sees them all. Otherwise, with nothing changed, None.
    """
    n, storage = layer.lengths.equal, layer.storage
    if (
        n is None
        or storage.scales
        or storage.pages is not None
        or any(limit is not None and n >= limit for limit in (window, layer.window))
    ):
        return None
    if layer.reserve_tokens(1) is None:
        return None
    storage.keys.select(2, n).copy_(k.select(1, 0))
    storage.values.select(2, n).copy_(v.select(1, 0))
    return storage.keys.narrow(2, 0, n + 1), storage.values.narrow(2, 0, n + 1)


def _folded(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attend with the heads of a group and their queries as queries of one head: q [batch, seq, heads, size]; a mask has as many queries, or one for all."""
    batch, seq, heads, size = q.shape
    groups = keys.shape[1]
    query = q.transpose(1, 2).reshape(batch, groups, -1, size)
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, heads // groups, 1)
    y = attend(query, keys, values, mask, scale=scale)
    return y.reshape(batch, heads, seq, -1).transpose(1, 2).contiguous()


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: a bias, or what it hides, and a mask."""
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=dtype).masked_fill_(~bias, -torch.inf)
    return bias.to(dtype) if mask is None else bias.to(dtype) + mask


def _mask(
    before: SequenceLengths, layer: CacheLayer, seq: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """What is added to the scores of the tokens just appended: [batch or 1, 1, seq, stored], made once for all layers."""

    def make() -> torch.Tensor:
        queries, keys = before.positions(seq), layer.key_positions()
        if before.equal is not None:
            queries, keys = queries[:1], keys[:1]
        return _hidden(queries, keys, window, dtype)

    return before.remember(("mask", seq, layer.slot_order, window, dtype), make)


def _hidden(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """0 where a query sees a key, minus infinity elsewhere: [batch, 1, queries, keys] from positions [batch, ...], -1 an empty slot."""
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= key > query - window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def fused(run: Run) -> Callable[..., Any]:
    """Attend without a cache: q, k, v [batch, seq, heads, size]."""
    scores, is_causal = Scores.of(run), run.attrs.get("is_causal", True)
    scale, window = scores.scale, scores.window

    def attention_fused(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: None, sinks: None, bias: None = None
    ) -> torch.Tensor:
        seq, mask = q.shape[1], None
        is_hidden = is_causal and (window is None or window >= seq)
        if is_hidden and seq == k.shape[1] and seq > FOLDED and q.numel():
            return in_blocks(q, k.transpose(1, 2), v.transpose(1, 2), SequenceLengths((), q.device), scale)
        if window is not None and window < seq:
            steps = torch.arange(seq)[None]
            mask = _hidden(steps, steps, window, q.dtype)
        return _attend(q, k, v, mask, is_causal and mask is None, scale)

    return attention_fused


def sdpa(run: Run) -> Callable[..., Any]:
    """Attend under a mask that the caller gives: q, k, v [batch, seq, heads, size]."""
    scale, is_causal = run.attrs.get("scale"), run.attrs.get("is_causal", False)

    def sdpa_fused(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            if is_causal:
                seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
                mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        return _attend(q, k, v, mask, is_causal and mask is None, scale)

    return sdpa_fused


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:3], v.shape[3]))
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    gqa = q.shape[2] != k.shape[2]
    return attend(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=gqa).transpose(1, 2)


def cross(run: Run) -> Callable[..., tuple[torch.Tensor, CacheLayer]]:
    """Attend from q [batch, seq, heads, size] to all that a layer holds, such as what an encoder has stored: nothing is appended or copied."""
    scale, value_size = run.attrs.get("scale"), run.attrs.get("value_size")

    def cross_attention(
        q: torch.Tensor, k: None, v: None, layer: CacheLayer, sinks: None, bias: None = None
    ) -> tuple[torch.Tensor, CacheLayer]:
        keys = layer.stored(0)
        values = layer.stored(1) if value_size is None else keys[..., :value_size]
        if not q.numel() or not keys.numel():
            return q.new_zeros((*q.shape[:3], values.shape[3])), layer
        lengths, mask = layer.lengths, None
        if lengths.equal is None:
            key = ("stored", layer.slot_order, q.dtype)
            mask = lengths.remember(key, partial(_empty_slots, layer, q.dtype))
        return _folded(q, keys, values, mask, scale), layer

    return cross_attention


def _empty_slots(layer: CacheLayer, dtype: torch.dtype) -> torch.Tensor:
    """Minus infinity where a sequence has no token: [batch, 1, 1, stored]."""
    at = layer.key_positions()[:, None, None]
    return torch.zeros(at.shape, dtype=dtype).masked_fill_(at < 0, -torch.inf)


FLASH = "torch's flash attention: no matrix of scores"
KERNELS = (
    Kernel(
        "cross_attention",
        "attention",
        cross,
        "torch's attention to all that a layer holds",
        to_all,
        workspace=Workspace(lambda run, *operands: operands[0].size_bytes),
    ),
    kernel(
        "attention_cached",
        "attention",
        write_attention,
        cached,
        "one query for each group of heads: no copies of keys and values",
        with_cache,
        held=cached_bytes,
        remembered=mask_bytes,
    ),
    kernel(
        "attention_stored",
        "attention",
        write_attention,
        cached,
        "torch's attention over what a layer holds, under a bias if there is one",
        stored,
        held=general_bytes,
    ),
    Kernel("attention_fused", "attention", fused, FLASH, without_cache, workspace=Workspace(fused_bytes)),
    Kernel(
        "sdpa_fused",
        "scaled_dot_product_attention",
        sdpa,
        FLASH,
        no_scale_dtype,
        workspace=Workspace(sdpa_fused_bytes),
    ),
)
