# SPDX-License-Identifier: Apache-2.0
"""Attention of one query for each sequence over a cache (`attention.py` has the formulas).

Shapes: q [batch, heads, size], adjacent along size; keys and values as in `cache.py`, contiguous or paged, of the dtype of q
or in 8 bits; lengths [batch] int32, the tokens in the cache with the query's own, which is the last; y [batch, heads, value size]. A length of 0 gives 0.
bias [batch, heads, 1, positions], with a stride of 0 where it is the same for all: of the dtype of q or float32, added to scores, or bool.
Query head h reads key head h // (heads / kv_heads). Slots from the length on, or before the window, are not read: their
pages may be -1.

With the key and the value of a new token the launch also rotates, and stores it as the last of its sequence (`attention_append.py`).

The heads of a group are the rows of one tile, so keys are read once for all of them. Several blocks share a sequence:
each takes an equal part of its steps and writes what it has, and the last to arrive adds the parts in order, so the result
is the same bit for bit however blocks are scheduled. How many is a function of the shape alone (`choose`). It does not
depend on lengths: a captured graph stays right as sequences grow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import decode_shape
from nnfront_kernels.attention import (
    DTYPES,
    Scores,
    attend_step,
    bias_rows_of,
    finish,
    padded,
    refusal,
    require_queries,
    result,
    shared_bytes,
)
from nnfront_kernels.attention_append import new_token, rotated_rows, store_token
from nnfront_kernels.attention_fp8 import attend_codes, joined, narrowed
from nnfront_kernels.attention_parts import needed, parts, sum_parts
from nnfront_kernels.cache import moved, page_of_step, pointers, require_cache, require_counts
from nnfront_kernels.common import ARCHS, Config, Kernel, KernelError, Plan, launcher, strides, taking
from nnfront_kernels.decode_shape import DecodeShape
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.rope import row_of
from nnfront_kernels.split_k import Workspace
from nnfront_kernels.split_k import pointers as shared_pointers
from nnfront_kernels.tiles import bucket, cdiv

reference, example = decode_shape.reference, decode_shape.example

# Rows (heads of a group) x keys of a step, for heads of up to block_k. The compiler uses one stage for
# reading the table of pages. By arithmetic, not yet measured.
CONFIGS = tuple(Config(16, n, k, 4, 4, split_k=8) for n, k in ((64, 128), (128, 64), (32, 256)))


def choose(shape: DecodeShape, dtype: str, arch: str) -> Config:
    """The narrowest config that holds a head, and as many blocks for a sequence as fill the GPU twice."""
    size = max(shape.size, shape.value_size)
    held = [config for config in KERNEL.configs[arch] if config.block_k >= size]
    config = min(held, key=lambda config: config.block_k)
    blocks = bucket(shape.batch) * shape.kv_heads * cdiv(shape.heads // shape.kv_heads, config.block_m)
    return replace(config, split_k=parts(blocks, config.block_n, shape.longest, shape.window, ARCHS[arch]))


@triton.jit(do_not_specialize=["stride_pages", "capacity"])
def attention_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    pages_ptr,
    base_ptr,
    lengths_ptr,
    new_k_ptr,
    new_v_ptr,
    cos_ptr,
    sin_ptr,
    sinks_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,  # float32
    arrived_ptr,
    stride_qb, stride_qh,
    stride_new_kb, stride_new_kh,
    stride_new_vb, stride_new_vh,
    stride_cb,
    stride_sb,
    capacity,
    stride_pages,
    stride_kp, stride_kh, stride_ks,
    stride_vp, stride_vh, stride_vs,
    stride_ksp, stride_ksh,
    stride_vsp, stride_vsh,
    stride_bb, stride_bh, stride_bt,
    stride_yb, stride_yh,
    scale,
    soft_cap,
    SHARED: tl.constexpr,  # query heads of a key head
    TILES: tl.constexpr,  # of a key head
    WINDOW: tl.constexpr,  # 0 is none
    CAPPED: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAIRS: tl.constexpr,  # of the new token, 0 rotates nothing
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    keys_ptr = moved(keys_ptr, base_ptr, 0)
    values_ptr = moved(values_ptr, base_ptr, 1)
    key_scales_ptr = moved(key_scales_ptr, base_ptr, 2)
    value_scales_ptr = moved(value_scales_ptr, base_ptr, 3)
    split, sequence = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    length = tl.load(lengths_ptr + sequence)
    start = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    # This block's steps: an equal part of those between the start and the length.
    skipped = start // BLOCK_N
    steps = tl.cdiv(length, BLOCK_N) - skipped
    depth = tl.maximum(tl.cdiv(steps, SPLITS), 1)
    active = tl.maximum(tl.cdiv(steps, depth), 1)  # blocks that have steps: others leave no part
    first = (skipped + split * depth) * BLOCK_N
    end = tl.minimum(first + depth * BLOCK_N, length)

    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = lane < SHARED
    head = kv_head * SHARED + lane
    dk, dv = tl.arange(0, BLOCK_DK)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    q_rows = q_ptr + sequence.to(tl.int64) * stride_qb + (head * stride_qh)[:, None]
    q = tl.load(q_rows + dk, mask=inside_m[:, None] & (dk < SIZE_K), other=0.0)
    low = tl.zeros((BLOCK_M,), dtype=tl.int32) + start
    high = tl.zeros((BLOCK_M,), dtype=tl.int32) + length - 1
    k_head = keys_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = values_ptr + kv_head.to(tl.int64) * stride_vh
    if new_k_ptr is not None:
        position, own_head = tl.maximum(length - 1, 0), kv_head.to(tl.int64)
        cos_row = cos_ptr + sequence.to(tl.int64) * stride_cb if PAIRS else None
        sin_row = sin_ptr + sequence.to(tl.int64) * stride_sb if PAIRS else None
        if PAIRS:
            q = rotated_rows(q, q_rows, inside_m[:, None], dk, cos_row, sin_row, PAIRS, SIZE_K, INTERLEAVED)
        if (first < length) & (end == length):
            store_token(
                row_of(new_k_ptr, sequence, own_head, stride_new_kb, stride_new_kh),
                row_of(new_v_ptr, sequence, own_head, stride_new_vb, stride_new_vh), k_head, v_head,
                key_scales_ptr + own_head * stride_ksh if key_scales_ptr is not None else None,
                value_scales_ptr + own_head * stride_vsh if value_scales_ptr is not None else None,
                pages_ptr, stride_pages, sequence, position, capacity, cos_row, sin_row, stride_kp, stride_ks, stride_vp,
                stride_vs, stride_ksp, stride_vsp, SIZE_K, SIZE_V, PAIRS, INTERLEAVED, PAGE, BLOCK_P, BLOCK_R, BLOCK_DV,
            )  # fmt: skip
    bias_rows = bias_rows_of(bias_ptr, sequence, head, head * 0, stride_bb, stride_bh, stride_bt)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    page = page_of_step(pages_ptr, stride_pages, sequence, first, end, PAGE, BLOCK_N)
    if key_scales_ptr is None:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
        for at in range(first, end, BLOCK_N):
            next_page = page_of_step(pages_ptr, stride_pages, sequence, at + BLOCK_N, end, PAGE, BLOCK_N)
            acc, largest, total = attend_step(
                q, acc, largest, total, at, start, end, low, high, page, k_head, v_head,
                stride_kp, stride_ks, stride_vp, stride_vs, scale, soft_cap, CAPPED, SIZE_K, SIZE_V, BLOCK_DK, BLOCK_DV,
                BLOCK_N, PAGE, True, bias_rows, inside_m,
            )  # fmt: skip
            page = next_page
    else:
        k_scales = key_scales_ptr + kv_head.to(tl.int64) * stride_ksh
        v_scales = value_scales_ptr + kv_head.to(tl.int64) * stride_vsh
        q_even, q_odd, unit = narrowed(q, BLOCK_M, BLOCK_DK)
        acc_even = tl.zeros((BLOCK_M, BLOCK_DV // 2), dtype=tl.float32)
        acc_odd = tl.zeros((BLOCK_M, BLOCK_DV // 2), dtype=tl.float32)
        for at in range(first, end, BLOCK_N):
            next_page = page_of_step(pages_ptr, stride_pages, sequence, at + BLOCK_N, end, PAGE, BLOCK_N)
            acc_even, acc_odd, largest, total = attend_codes(
                q_even, q_odd, acc_even, acc_odd, largest, total, at, start, end, low, high, page, k_head, v_head,
                k_scales, v_scales, stride_kp, stride_ks, stride_vp, stride_vs, stride_ksp,
                stride_vsp, scale * unit, soft_cap, CAPPED, SIZE_K, SIZE_V, BLOCK_DK, BLOCK_DV, BLOCK_N, PAGE, True,
                PTX, bias_rows, inside_m,
            )  # fmt: skip
            page = next_page
        acc = joined(acc_even, acc_odd, BLOCK_M, BLOCK_DV)
    let_next_start(PDL)
    y_rows = y_ptr + sequence.to(tl.int64) * stride_yb + (head * stride_yh)[:, None]
    inside = inside_m[:, None] & (dv < SIZE_V)
    if SPLITS == 1:
        y = finish(acc, largest, total, sinks_ptr, head, inside_m)
        tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif split < active:
        group = sequence * tl.num_programs(1) + tl.program_id(1)
        acc, largest, total, last = sum_parts(
            acc, largest, total, partial_ptr, arrived_ptr, group, split, active, SPLITS, BLOCK_M, BLOCK_DV
        )
        if last:
            y = finish(acc, largest, total, sinks_ptr, head, inside_m)
            tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside)


@taking(DTYPES)
def accepts(shape: DecodeShape, dtype: str, arch: str) -> str | None:
    return refusal(shape.batch, (shape.size, shape.value_size or shape.size))


@remembered
def plan(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    new_keys: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    longest: int | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **given: Any,
) -> Plan:
    """Attend: y [batch, heads, value size].

    Options: pages, of a paged cache; key_scales and value_scales, of one in 8 bits; base; new_keys [batch, kv_heads, size] and new_values of the query's own token, not yet in the cache,
    with cos and sin [batch or 1, 1, pairs] to rotate it and q by, and interleaved; longest, a bound of
    the lengths that is lower than the capacity and only decides how many blocks share a sequence; out and workspace; and those of `attention.Scores`.
    """
    require_queries(q, "batch")
    batch, heads, size = q.shape
    capacity = require_cache(keys, values, pages, batch, q.dtype, key_scales, value_scales, base)
    kv_heads, slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    if keys.shape[3] != size:
        raise KernelError(f"keys must have heads of {size} as q, got {keys.shape[3]}")
    require_counts("lengths", lengths, batch)
    scores = Scores(**given)
    scores.check(heads, kv_heads)
    page = 0 if pages is None else slots
    longest = capacity if longest is None else longest
    fp8 = key_scales is not None
    shape = DecodeShape(
        batch, heads, kv_heads, size, longest, page, scores.window or 0, value_size, fp8, new_keys is not None
    )
    arch, config = KERNEL.settle(shape, q, arch, config)
    out = result(out, (batch, heads, value_size), q)
    shared = heads // kv_heads
    tiles = cdiv(shared, config.block_m)
    appended, rotation = new_token(q, new_keys, new_values, cos, sin, (keys, values), interleaved=interleaved)
    return Plan(
        kernel=attention_decode_kernel,
        grid=(config.split_k, kv_heads * tiles, batch),
        arguments={
            "q_ptr": q,
            **pointers(keys, values, pages, key_scales, value_scales, base=base, codes=torch.uint16),
            "lengths_ptr": lengths,
            **appended,
            "capacity": capacity,
            **scores.arguments(q, (batch, heads, 1), longest),
            "y_ptr": out,
            **shared_pointers(workspace, needed(config, batch * kv_heads * tiles, value_size), q.device),
            **strides("q", q, "bh"),
            **strides("y", out, "bh"),
        },
        constants={
            "SHARED": shared,
            "TILES": tiles,
            **scores.constants(),
            "SIZE_K": size,
            "SIZE_V": value_size,
            "PAGE": page,
            "SPLITS": config.split_k,
            **config.blocks("mn"),
            "BLOCK_DK": padded(size),
            "BLOCK_DV": padded(value_size),
            **rotation,
            "PTX": not triton.knobs.runtime.interpret,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
    )


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=shared_bytes,
    shape_for=lambda shape, config: replace(shape, size=config.block_k),
    typical=DecodeShape(32, 32, 8, 128, 8192, page=64),
)
