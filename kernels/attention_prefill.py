# SPDX-License-Identifier: Apache-2.0
"""Attention of many queries for each sequence, without a matrix of scores in memory (`attention.py` has the formulas).

Shapes: q [tokens, heads, size], adjacent along size, sequences one after the other: sequence b is q[starts[b] : starts[b +
1]]; starts [batch + 1] int32; y [tokens, heads, value size]. Keys and values are either
  * those of the same tokens: [tokens, kv_heads, size], or
  * a cache (`cache.py`), contiguous or paged, of the dtype of q or in 8 bits, that holds before[b] earlier tokens of
    sequence b and then these: the chunk after `before` is appended first. before [batch] int32, without it 0.
bias [batch, heads, longest, positions], with a stride of 0 where it is the same for all: of the dtype of q or float32, added to scores, or bool.
Query t of a sequence is at position before[b] + t. With causal=False it sees all keys instead; a window needs causal.

The heads of a group and their queries are the rows of one tile: row r is query r // shared, head r % shared. Steps that no
mask cuts run without one. Sums are in the order of the keys: repeatable bit for bit.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import prefill_shape
from nnfront_kernels.attention import (
    DTYPES,
    Scores,
    attend_step,
    bias_rows_of,
    finish,
    padded,
    refusal,
    require_queries,
    require_tokens,
    result,
    shared_bytes,
)
from nnfront_kernels.attention_fp8 import attend_codes, joined, narrowed
from nnfront_kernels.cache import moved, page_of_step, pointers, require_cache, require_counts, stored_tokens
from nnfront_kernels.common import Config, Kernel, KernelError, Plan, launcher, strides, taking
from nnfront_kernels.prefill_shape import PrefillShape
from nnfront_kernels.remembered import remembered
from nnfront_kernels.tiles import cdiv


def reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int | None = None,
    before: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    causal: bool = True,
    compute: torch.dtype = torch.float32,
    **given: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, query by query. `longest` changes nothing."""
    y = torch.zeros(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=q.device)
    scores = Scores(**given)
    for sequence, (first, end) in enumerate(pairwise(starts.tolist())):
        earlier = 0 if before is None else int(before[sequence])
        if keys.ndim == 3:
            k, v = keys[first:end].transpose(0, 1), values[first:end].transpose(0, 1)
        else:
            length = earlier + end - first
            k = stored_tokens(keys, key_scales, pages, sequence, length, compute)
            v = stored_tokens(values, value_scales, pages, sequence, length, compute)
        for t in range(first, end):
            place = (sequence, t - first)
            y[t] = scores.row(q[t].to(compute), k, v, earlier + t - first, place, causal=causal)
    return y


example = prefill_shape.example

# Rows x keys of a step, for heads of up to block_k. Chosen so that nothing spills; not yet measured.
CONFIGS = {
    "sm_80": (Config(128, 32, 128, 8, 2), Config(64, 64, 64, 4, 3), Config(64, 32, 256, 8, 2)),
    "sm_90": (Config(128, 64, 128, 8, 3), Config(128, 64, 64, 4, 3), Config(64, 32, 256, 8, 2)),
    "sm_100": (Config(128, 64, 128, 8, 3), Config(128, 64, 64, 8, 3), Config(64, 32, 256, 8, 2)),
}


def choose(shape: PrefillShape, dtype: str, arch: str) -> Config:
    """The narrowest config that holds a head. With a window a warp of more than 16 rows would spill, in 8 bits a larger step."""
    size = max(shape.size, shape.value_size)
    config = min((c for c in KERNEL.configs[arch] if c.block_k >= size), key=lambda config: config.block_k)
    if shape.fp8:
        config = replace(config, block_n=min(config.block_n, 4096 // config.block_k), num_stages=2)
    least = config.block_m // 16 if shape.fp8 or shape.window else 1
    return replace(config, num_warps=max(config.num_warps, least))


@triton.jit(do_not_specialize=["stride_pages"])
def attention_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    pages_ptr,
    base_ptr,
    starts_ptr,
    before_ptr,
    sinks_ptr,
    bias_ptr,
    y_ptr,
    stride_qt, stride_qh,
    stride_pages,
    stride_kp, stride_kh, stride_ks,
    stride_vp, stride_vh, stride_vs,
    stride_ksp, stride_ksh,
    stride_vsp, stride_vsh,
    stride_bb, stride_bh, stride_bt,
    stride_yt, stride_yh,
    scale,
    soft_cap,
    SHARED: tl.constexpr,  # query heads of a key head
    CACHED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 is none
    CAPPED: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    keys_ptr = moved(keys_ptr, base_ptr, 0)
    values_ptr = moved(values_ptr, base_ptr, 1)
    key_scales_ptr = moved(key_scales_ptr, base_ptr, 2)
    value_scales_ptr = moved(value_scales_ptr, base_ptr, 3)
    # The tiles that see most keys start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts_ptr + sequence)
    seq = tl.load(starts_ptr + sequence + 1) - first_token
    if first_row < seq * SHARED:
        before = 0
        if before_ptr is not None:
            before = tl.load(before_ptr + sequence)
        lane = first_row + tl.arange(0, BLOCK_M)
        t, head = lane // SHARED, kv_head * SHARED + lane % SHARED
        inside_m = t < seq
        token = (first_token + t).to(tl.int64)
        dk, dv = tl.arange(0, BLOCK_DK)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        q_rows = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
        q = tl.load(q_rows + dk, mask=inside_m[:, None] & (dk < SIZE_K), other=0.0)
        k_head = keys_ptr + kv_head.to(tl.int64) * stride_kh
        v_head = values_ptr + kv_head.to(tl.int64) * stride_vh
        if not CACHED:
            k_head += first_token.to(tl.int64) * stride_ks
            v_head += first_token.to(tl.int64) * stride_vs

        # Keys start .. end are seen by some row, full_start .. full_end by every row.
        first = before + first_row // SHARED
        last = before + tl.minimum((first_row + BLOCK_M - 1) // SHARED, seq - 1)
        position, length = before + t, before + seq
        end = last + 1 if CAUSAL else length
        high = position if CAUSAL else tl.zeros((BLOCK_M,), dtype=tl.int32) + length - 1
        full_end = (first + 1 if CAUSAL else length) // BLOCK_N * BLOCK_N
        start = tl.maximum(first + 1 - WINDOW, 0) if WINDOW else 0
        low = position + 1 - WINDOW if WINDOW else tl.zeros((BLOCK_M,), dtype=tl.int32)
        step = start // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(last + 1 - WINDOW, 0), BLOCK_N) * BLOCK_N if WINDOW else 0
        full_start = tl.minimum(full_start, tl.maximum(full_end, step))
        full_end = tl.maximum(full_end, full_start)

        bias_rows = bias_rows_of(bias_ptr, sequence, head, t, stride_bb, stride_bh, stride_bt)
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if key_scales_ptr is None:
            acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
        else:
            k_scales = key_scales_ptr + kv_head.to(tl.int64) * stride_ksh
            v_scales = value_scales_ptr + kv_head.to(tl.int64) * stride_vsh
            q_even, q_odd, unit = narrowed(q, BLOCK_M, BLOCK_DK)
            acc_even = tl.zeros((BLOCK_M, BLOCK_DV // 2), dtype=tl.float32)
            acc_odd = tl.zeros((BLOCK_M, BLOCK_DV // 2), dtype=tl.float32)
        # Steps that the window cuts, those that nothing cuts, and those that the diagonal or the end cuts.
        for part in tl.static_range(0 if WINDOW else 1, 3):
            begin = step if part == 0 else full_start if part == 1 else full_end
            stop = full_start if part == 0 else full_end if part == 1 else end
            page = page_of_step(pages_ptr, stride_pages, sequence, begin, stop, PAGE, BLOCK_N)
            for at in range(begin, stop, BLOCK_N):
                next_page = page_of_step(pages_ptr, stride_pages, sequence, at + BLOCK_N, stop, PAGE, BLOCK_N)
                if key_scales_ptr is None:
                    acc, largest, total = attend_step(
                        q, acc, largest, total, at, start, end, low, high, page, k_head, v_head,
                        stride_kp, stride_ks, stride_vp, stride_vs, scale, soft_cap, CAPPED, SIZE_K, SIZE_V,
                        BLOCK_DK, BLOCK_DV, BLOCK_N, PAGE, part != 1, bias_rows, inside_m,
                    )  # fmt: skip
                else:
                    acc_even, acc_odd, largest, total = attend_codes(
                        q_even, q_odd, acc_even, acc_odd, largest, total, at, start, end, low, high, page, k_head,
                        v_head, k_scales, v_scales, stride_kp, stride_ks, stride_vp, stride_vs,
                        stride_ksp, stride_vsp, scale * unit, soft_cap, CAPPED, SIZE_K, SIZE_V, BLOCK_DK, BLOCK_DV,
                        BLOCK_N, PAGE, part != 1, PTX, bias_rows, inside_m,
                    )  # fmt: skip
                page = next_page
        if key_scales_ptr is not None:
            acc = joined(acc_even, acc_odd, BLOCK_M, BLOCK_DV)
        y = finish(acc, largest, total, sinks_ptr, head, inside_m)
        y_rows = y_ptr + (token * stride_yt + head * stride_yh)[:, None]
        tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside_m[:, None] & (dv < SIZE_V))


@taking(DTYPES)
def accepts(shape: PrefillShape, dtype: str, arch: str) -> str | None:
    reason = refusal(shape.batch, (shape.size, shape.value_size or shape.size))
    if shape.window and not shape.causal:
        return reason or "a window needs causal attention"
    return reason


@remembered
def plan(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    before: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **given: Any,
) -> Plan:
    """Attend: y [tokens, heads, value size].

    Options: longest, must be given: no sequence has more queries, those beyond are not computed; before and pages, of a
    cache; key_scales and value_scales, of one in 8 bits; base; causal; out; and those of `attention.Scores`.
    """
    require_queries(q, "tokens")
    tokens, heads, size = q.shape
    batch = starts.shape[0] - 1
    require_counts("starts", starts, batch + 1)
    cached = keys.ndim == 4
    if cached:
        require_cache(keys, values, pages, batch, q.dtype, key_scales, value_scales)
    else:
        require_tokens(keys, values, tokens, q.dtype)
        if any(x is not None for x in (before, pages, key_scales, value_scales, base)):
            raise KernelError(
                "before, pages, scales and base are for a cache, and keys are [tokens, kv_heads, size]"
            )
        keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (keys, values))
    if before is not None:
        require_counts("before", before, batch)
    kv_heads, slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    if keys.shape[3] != size:
        raise KernelError(f"keys must have heads of {size} as q, got {keys.shape[3]}")
    scores = Scores(**given)
    scores.check(heads, kv_heads)
    page = 0 if pages is None else slots
    fp8 = key_scales is not None
    positions = longest if scores.bias is None else scores.bias.shape[3]
    window = scores.window or 0
    shape = PrefillShape(batch, longest, heads, kv_heads, size, value_size, 0, page, window, causal, fp8)
    arch, config = KERNEL.settle(shape, q, arch, config)
    out = result(out, (tokens, heads, value_size), q)
    there = pointers(keys, values, pages, key_scales, value_scales, base=base, codes=torch.uint16)
    if not cached:
        there |= {"stride_kp": 0, "stride_vp": 0}
    return Plan(
        kernel=attention_prefill_kernel,
        grid=(cdiv(longest * (heads // kv_heads), config.block_m), kv_heads, batch),
        arguments={
            "q_ptr": q,
            **there,
            "starts_ptr": starts,
            "before_ptr": before,
            **scores.arguments(q, (batch, heads, longest), positions),
            "y_ptr": out,
            **strides("q", q, "th"),
            **strides("y", out, "th"),
        },
        constants={
            "SHARED": heads // kv_heads,
            "CACHED": cached,
            "CAUSAL": causal,
            **scores.constants(),
            "SIZE_K": size,
            "SIZE_V": value_size,
            "PAGE": page,
            **config.blocks("mn"),
            "BLOCK_DK": padded(size),
            "BLOCK_DV": padded(value_size),
            "PTX": not triton.knobs.runtime.interpret,
        },
        config=config,
        output=out,
    )


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=shared_bytes,
    shape_for=lambda shape, config: replace(shape, size=config.block_k),
    typical=PrefillShape(4, 4096, 32, 8, 128),
)
