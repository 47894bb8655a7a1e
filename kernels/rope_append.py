# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys as `rope.py` does, and append keys and values to a cache, in one launch.

Shapes: q [batch, seq, heads, size], k [batch, seq, kv_heads, size] and v [batch, seq, kv_heads, value size], each with
strides of its own, adjacent along the last axis: views into a fused projection will do. cos and sin as in `rope.py`, a row
for each token, or None: then nothing is rotated, and q is returned as it is. lengths [batch] int32 are the tokens that were
there before; token t of a sequence is stored as its token lengths[sequence] + t. The cache is contiguous or paged
(`cache.py`), of the dtype of q or in 8 bits. Computed in float32 and rounded once. lengths are not changed.

Tokens beyond the capacity, or on a page of -1, are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import rope
from nnfront_kernels.cache import (
    example_cache,
    moved,
    pointers,
    require_cache,
    require_counts,
    rounded,
    slots_of,
)
from nnfront_kernels.common import Config, Kernel, KernelError, Plan, empties, launcher, strides
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.rope import RopeShape, blocks, require_angles, require_heads, rotated, row_of, turn
from nnfront_kernels.tiles import cdiv

CONFIGS, DTYPES, accepts = rope.CONFIGS, rope.DTYPES, rope.accepts


@dataclass(frozen=True)
class AppendShape(RopeShape):
    """The tokens are also stored, with values of `value_size`, 0 is size. page 0 is a contiguous cache."""

    page: int = 0
    value_size: int = 0
    fp8: bool = False  # the cache is in 8 bits


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    interleaved: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """The definition, in float32 or in `compute`: (q, keys, values), the cache copied, and in 8 bits both scales."""
    wide_k = k.to(compute)
    if cos is not None and sin is not None:
        q = rotated(q, cos, sin, interleaved, compute).to(q.dtype)
        wide_k = rotated(k, cos, sin, interleaved, compute)
    scaled = key_scales is not None and value_scales is not None
    stored = [x.clone() for x in (keys, values, *((key_scales, value_scales) if scaled else ()))]
    made = [wide_k.to(k.dtype), v]
    if scaled:
        made = [part for pair in zip(rounded(wide_k), rounded(v), strict=True) for part in pair]
    slots = keys.shape[2]
    for sequence, before in enumerate(lengths.tolist()):
        for t in range(k.shape[1]):
            if before + t < 0:
                continue
            row, slot = divmod(before + t, slots)
            page = sequence if row == 0 else -1
            if pages is not None:
                page = int(pages[sequence, row]) if row < pages.shape[1] else -1
            if page >= 0:
                for where, what in zip(stored, made, strict=True):
                    where[page, :, slot] = what[sequence, t]
    return q, *stored


@triton.jit(do_not_specialize=["SEQ", "CAPACITY", "stride_pages"])
def rope_append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    lengths_ptr,
    y_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    pages_ptr,
    base_ptr,
    SEQ,
    CAPACITY,
    stride_xqb, stride_xqt, stride_xqh,
    stride_xkb, stride_xkt, stride_xkh,
    stride_xvb, stride_xvt, stride_xvh,
    stride_cb, stride_ct,
    stride_sb, stride_st,
    stride_yb, stride_yt, stride_yh,
    stride_pages,
    stride_kp, stride_kh, stride_ks,
    stride_vp, stride_vh, stride_vs,
    stride_ksp, stride_ksh,
    stride_vsp, stride_vsh,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_V: tl.constexpr,
    PAIRS: tl.constexpr,  # 0 rotates nothing
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    keys_ptr = moved(keys_ptr, base_ptr, 0)
    values_ptr = moved(values_ptr, base_ptr, 1)
    key_scales_ptr = moved(key_scales_ptr, base_ptr, 2)
    value_scales_ptr = moved(value_scales_ptr, base_ptr, 3)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H if PAIRS else 0
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    sequence, t, block = tl.program_id(0) // SEQ, tl.program_id(0) % SEQ, tl.program_id(1)
    lane = tl.arange(0, BLOCK_H)[:, None]
    cos_row = row_of(cos_ptr, sequence, t, stride_cb, stride_ct) if PAIRS else None
    sin_row = row_of(sin_ptr, sequence, t, stride_sb, stride_st) if PAIRS else None
    if block < Q_BLOCKS:
        head = block * BLOCK_H + lane
        x_rows = row_of(q_ptr, sequence, t, stride_xqb, stride_xqt) + head * stride_xqh
        y_rows = row_of(y_ptr, sequence, t, stride_yb, stride_yt) + head * stride_yh
        turn(
            x_rows, y_rows, None, head < HEADS, cos_row, sin_row, SIZE, PAIRS, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R
        )  # fmt: skip
    else:
        position = tl.load(lengths_ptr + sequence) + t
        page, slot = slots_of(pages_ptr, stride_pages, sequence, position, position < CAPACITY, PAGE)
        if page >= 0:
            if block < Q_BLOCKS + KV_BLOCKS:
                head = (block - Q_BLOCKS) * BLOCK_H + lane
                x_rows = row_of(k_ptr, sequence, t, stride_xkb, stride_xkt) + head * stride_xkh
                y_rows = row_of(keys_ptr, page, slot, stride_kp, stride_ks) + head.to(tl.int64) * stride_kh
                turn(
                    x_rows, y_rows,
                    scales_of(key_scales_ptr, page, slot, head, stride_ksp, stride_ksh)
                    if key_scales_ptr is not None else None,
                    head < KV_HEADS, cos_row, sin_row, SIZE, PAIRS, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R
                )  # fmt: skip
            else:
                head = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + lane
                x_rows = row_of(v_ptr, sequence, t, stride_xvb, stride_xvt) + head * stride_xvh
                y_rows = row_of(values_ptr, page, slot, stride_vp, stride_vs) + head.to(tl.int64) * stride_vh
                turn(
                    x_rows, y_rows,
                    scales_of(value_scales_ptr, page, slot, head, stride_vsp, stride_vsh)
                    if value_scales_ptr is not None else None,
                    head < KV_HEADS, None, None, SIZE_V, 0, False, BLOCK_H, 1, BLOCK_V
                )  # fmt: skip


@triton.jit
def scales_of(scales_ptr, page, slot, head, stride_p, stride_h):
    return scales_ptr + page * stride_p + slot + head.to(tl.int64) * stride_h


@remembered
def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Write to the cache and return the rotated q [batch, seq, heads, size], or without a rotation q itself.

    Options: pages, of a paged cache; key_scales and value_scales, of one in 8 bits; base; interleaved; out, to write q to, which
    may be q itself.
    """
    require_heads("q", q, ("batch", "seq", "heads", "size"), q.dtype)
    batch, seq, heads, size = q.shape
    capacity = require_cache(keys, values, pages, batch, q.dtype, key_scales, value_scales)
    kv_heads, slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    require_heads("k", k, (batch, seq, kv_heads, size), q.dtype)
    require_heads("v", v, (batch, seq, kv_heads, value_size), q.dtype)
    if keys.shape[3] != size:
        raise KernelError(f"keys must have heads of {size} as k, got {keys.shape[3]}")
    require_counts("lengths", lengths, batch)
    if cos is None or sin is None:
        if cos is not sin or out is not None:
            raise KernelError("without a rotation there is neither cos nor sin, and q is not written to out")
        pairs, out = 0, q
    else:
        cos, sin = require_angles(cos, sin, batch, seq)
        pairs = cos.shape[2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        require_heads("out", out, q.shape, q.dtype)
    page = slots if pages is not None else 0
    fp8 = key_scales is not None
    shape = AppendShape(batch, seq, heads, kv_heads, size, pairs, interleaved, page, value_size, fp8)
    arch, config = KERNEL.settle(shape, q, arch, config)
    kv_blocks = cdiv(kv_heads, config.block_m)
    return Plan(
        kernel=rope_append_kernel,
        grid=(batch * seq, (cdiv(heads, config.block_m) if pairs else 0) + 2 * kv_blocks),
        arguments={
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "lengths_ptr": lengths,
            "y_ptr": out,
            **pointers(keys, values, pages, key_scales, value_scales, base=base),
            "SEQ": seq,
            "CAPACITY": capacity,
            **strides("xq", q, "bth"),
            **strides("xk", k, "bth"),
            **strides("xv", v, "bth"),
            **strides("c", q if cos is None else cos, "bt"),
            **strides("s", q if sin is None else sin, "bt"),
            **strides("y", out, "bth"),
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "SIZE_V": value_size,
            "PAIRS": pairs,
            "PAGE": page,
            "INTERLEAVED": interleaved,
            **blocks(size, pairs, interleaved, config),
            "BLOCK_V": triton.next_power_of_2(value_size),
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
    )


def example(shape: AppendShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values: views into a fused projection, float32 tables, and room
    for twice as many tokens.
    """
    make = empties(dtype, device)
    value_size, room = shape.value_size or shape.size, 2 * shape.tokens
    widths = (shape.heads * shape.size, shape.kv_heads * shape.size, shape.kv_heads * value_size)
    fused = make(shape.batch, shape.tokens, sum(widths)).split(widths, 2)
    sizes = (shape.size, shape.size, value_size)
    q, k, v = (x.unflatten(2, (-1, size)) for x, size in zip(fused, sizes, strict=True))
    tables = [
        make(shape.batch, shape.tokens, shape.pairs, kind="float32") if shape.pairs else None
        for _ in range(2)
    ]
    options: dict[str, Any] = {"interleaved": shape.interleaved}
    kind = "float8_e4m3fn" if shape.fp8 else dtype
    cache, there = example_cache(shape.batch, shape.kv_heads, room, sizes[1:], shape.page, kind, device)
    return (q, k, v, *tables, make(shape.batch, kind="int32"), *cache), options | there


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    typical=AppendShape(16, 256, 32, 8, 128, 64, page=64),
)
