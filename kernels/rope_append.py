# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys by their positions, and append keys and values to a cache, in one pass over a fused projection.

    a, b = x[i], x[i + pairs]                with interleaved: x[2 i], x[2 i + 1]              for i < pairs
    a', b' = a cos[p, i] - b sin[p, i], b cos[p, i] + a sin[p, i]               p = lengths[sequence] + t

Shapes: qkv [batch, seq, (heads + 2 kv_heads) * size], adjacent along the last axis: all queries, then all keys, then all
values; cos and sin [positions, pairs] of any float dtype; lengths [batch] int32, the tokens that were there before; q
[batch, seq, heads, size]. The cache is contiguous or paged (`cache.py`). Features from 2 * pairs on stay as they are.
Computed in float32 and rounded once. lengths are not changed.

Tokens beyond the capacity, or on a page of -1, are not stored. Positions beyond the tables are not rotated.

Source: RoFormer, arXiv 2104.09864, eq. 34.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import pointers, require_cache, require_counts, slots_of
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Cost,
    Kernel,
    KernelError,
    Plan,
    arch_of,
    dtype_name,
    require,
    require_matrix,
)
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class RopeShape:
    """`tokens` of each of `batch` sequences; page 0 is a contiguous cache."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    pairs: int
    interleaved: bool = False
    page: int = 0


def reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    interleaved: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`: (q, keys, values), the cache copied."""
    batch, seq, _ = qkv.shape
    kv_heads, slots, size = keys.shape[1:]
    pairs = cos.shape[1]
    x = qkv.unflatten(2, (-1, size))
    heads = x.shape[2] - 2 * kv_heads
    positions = lengths.long()[:, None] + torch.arange(seq, device=qkv.device)
    c, s = (table.to(compute)[positions][:, :, None] for table in (cos, sin))
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = x.clone()
    a, b = x[..., first].to(compute), x[..., second].to(compute)
    turned[..., first] = (a * c - b * s).to(x.dtype)
    turned[..., second] = (b * c + a * s).to(x.dtype)
    keys, values = keys.clone(), values.clone()
    for sequence in range(batch):
        for t, p in enumerate(positions[sequence].tolist()):
            page, slot = (sequence, p) if pages is None else (int(pages[sequence, p // slots]), p % slots)
            keys[page, :, slot] = turned[sequence, t, heads : heads + kv_heads]
            values[page, :, slot] = x[sequence, t, heads + kv_heads :]
    return turned[:, :, :heads], keys, values


# block_m heads of a token, 16 bytes for each thread where there are 64 pairs of 16 bits. Not yet measured.
CONFIGS = {arch.name: (Config(16, 1, 1, 128 // arch.warp_size, 1),) for arch in ARCHS.values()}


def choose(shape: RopeShape, dtype: str, arch: str) -> Config:
    """The one config of an arch."""
    return CONFIGS[arch][0]


@triton.jit(do_not_specialize=["SEQ", "CAPACITY", "POSITIONS", "stride_pages"])
def rope_append_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    lengths_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    SEQ,
    CAPACITY,
    POSITIONS,
    stride_xb,
    stride_xt,
    stride_cp,
    stride_np,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_pages,
    stride_kp,
    stride_kh,
    stride_ks,
    stride_vp,
    stride_vh,
    stride_vs,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,  # a power of two: pairs, or with INTERLEAVED half the head
    BLOCK_R: tl.constexpr,  # a power of two that holds what is not rotated, or 0
):
    sequence, t = tl.program_id(0) // SEQ, tl.program_id(0) % SEQ
    position = tl.load(lengths_ptr + sequence) + t
    page, slot = slots_of(pages_ptr, stride_pages, sequence, position, position < CAPACITY, PAGE)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    x_rows = qkv_ptr + sequence.to(tl.int64) * stride_xb + t.to(tl.int64) * stride_xt + (head * SIZE)[:, None]
    q_row = q_ptr + sequence.to(tl.int64) * stride_qb + t.to(tl.int64) * stride_qt
    q_rows = q_row + (head * stride_qh)[:, None]
    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    k_rows = keys_ptr + page * stride_kp + slot * stride_ks + (k_head.to(tl.int64) * stride_kh)[:, None]
    v_rows = values_ptr + page * stride_vp + slot * stride_vs + (v_head.to(tl.int64) * stride_vh)[:, None]
    is_q = (head < HEADS)[:, None]
    stored = tl.where(page >= 0, KV_HEADS, 0)
    is_k = ((k_head >= 0) & (k_head < stored))[:, None]
    is_v = ((v_head >= 0) & (v_head < stored))[:, None]
    inside = (v_head < KV_HEADS)[:, None]
    turns = (v_head < 0)[:, None]

    pair = tl.arange(0, BLOCK_P)
    real = pair < tl.where(position < POSITIONS, PAIRS, 0)
    cos = tl.load(cos_ptr + position.to(tl.int64) * stride_cp + pair, mask=real, other=1.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * stride_np + pair, mask=real, other=0.0)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    turns = turns & real[None, :]
    if INTERLEAVED:
        at = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.load(x_rows + at, mask=inside & (at < SIZE), other=0.0)
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_P, 2)))
        a, b = rotate(a, b, cos, sin, turns)
        y = tl.reshape(tl.join(a, b), (BLOCK_H, 2 * BLOCK_P))
        store(y, at, at < SIZE, q_rows, k_rows, v_rows, is_q, is_k, is_v)
    else:
        at = pair[None, :]
        a = tl.load(x_rows + at, mask=inside & (at < PAIRS), other=0.0)
        b = tl.load(x_rows + PAIRS + at, mask=inside & (at < PAIRS), other=0.0)
        a, b = rotate(a, b, cos, sin, turns)
        store(a, at, at < PAIRS, q_rows, k_rows, v_rows, is_q, is_k, is_v)
        store(b, PAIRS + at, at < PAIRS, q_rows, k_rows, v_rows, is_q, is_k, is_v)
        if BLOCK_R:
            at = 2 * PAIRS + tl.arange(0, BLOCK_R)[None, :]
            x = tl.load(x_rows + at, mask=inside & (at < SIZE), other=0.0)
            store(x, at, at < SIZE, q_rows, k_rows, v_rows, is_q, is_k, is_v)


@triton.jit
def rotate(a, b, cos, sin, turns):
    """The two halves of pairs after a turn, in their dtype; what does not turn keeps its bits."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (wide_a * cos - wide_b * sin).to(a.dtype)
    new_b = (wide_b * cos + wide_a * sin).to(a.dtype)
    return tl.where(turns, new_a, a), tl.where(turns, new_b, b)


@triton.jit
def store(y, at, inside, q_rows, k_rows, v_rows, is_q, is_k, is_v):
    tl.store(q_rows + at, y, mask=is_q & inside)
    tl.store(k_rows + at, y, mask=is_k & inside)
    tl.store(v_rows + at, y, mask=is_v & inside)


def accepts(shape: RopeShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses."""
    if arch not in ARCHS:
        return f"arch must be one of {', '.join(ARCHS)}, got '{arch}'"
    if dtype not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got '{dtype}'"
    if not 1 <= shape.pairs <= shape.size // 2:
        return f"1 to {shape.size // 2} pairs fit in a head of {shape.size}, got {shape.pairs}"
    if shape.batch * shape.tokens >= 2**31:
        return f"there must be less than 2^31 tokens, got {shape.batch * shape.tokens}"
    return None


def plan(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Check the arguments of `launch` and describe the launch."""
    if qkv.ndim != 3 or (qkv.shape[2] > 1 and qkv.stride(2) != 1):
        raise KernelError(
            f"qkv must be [batch, seq, width] with adjacent elements, got {list(qkv.shape)} with strides {list(qkv.stride())}"
        )
    batch, seq, width = qkv.shape
    capacity = require_cache(keys, values, pages, batch, qkv.dtype)
    kv_heads, slots, size = keys.shape[1:]
    heads = width // size - 2 * kv_heads
    if width % size or heads < 1 or values.shape[3] != size:
        raise KernelError(
            f"qkv must hold query heads and two times {kv_heads} heads of {size}, got a width of {width} "
            f"and values of {values.shape[3]}"
        )
    require_counts("lengths", lengths, batch)
    require_matrix("cos", cos, None, cos.shape[-1], None)
    require_matrix("sin", sin, cos.shape[0], cos.shape[1], None)
    pairs = cos.shape[1]
    shape = RopeShape(
        batch, seq, heads, kv_heads, size, pairs, interleaved, slots if pages is not None else 0
    )
    arch = arch or arch_of(qkv.device)
    require(accepts(shape, dtype_name(qkv), arch), "rope_append")
    config = config or choose(shape, dtype_name(qkv), arch)
    if out is None:
        out = torch.empty(batch, seq, heads, size, dtype=qkv.dtype, device=qkv.device)
    if out.shape != (batch, seq, heads, size) or out.dtype != qkv.dtype or out.stride(3) != 1:
        raise KernelError(
            f"out must be {qkv.dtype} {[batch, seq, heads, size]} with adjacent elements, got {out.dtype} "
            f"{list(out.shape)} with strides {list(out.stride())}"
        )
    rest = size - 2 * pairs
    return Plan(
        kernel=rope_append_kernel,
        grid=(batch * seq, cdiv(heads + 2 * kv_heads, config.block_m)),
        arguments={
            "qkv_ptr": qkv,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "lengths_ptr": lengths,
            "q_ptr": out,
            **pointers(keys, values, pages),
            "SEQ": seq,
            "CAPACITY": capacity,
            "POSITIONS": cos.shape[0],
            "stride_xb": qkv.stride(0),
            "stride_xt": qkv.stride(1),
            "stride_cp": cos.stride(0),
            "stride_np": sin.stride(0),
            **{f"stride_q{axis}": out.stride(index) for index, axis in enumerate("bth")},
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "PAIRS": pairs,
            "PAGE": slots if pages is not None else 0,
            "INTERLEAVED": interleaved,
            "BLOCK_H": config.block_m,
            "BLOCK_P": triton.next_power_of_2((size + 1) // 2 if interleaved else pairs),
            "BLOCK_R": triton.next_power_of_2(rest) if rest and not interleaved else 0,
        },
        config=config,
        output=out,
    )


def launch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Write to the cache and return q [batch, seq, heads, size].

    Options: pages, of a paged cache; interleaved; out, to write q to. Raises KernelError if an argument does not fit.
    """
    return plan(qkv, cos, sin, lengths, keys, values, **options).launch()


def cost(shape: RopeShape, dtype: str) -> Cost:
    """Six operations for each pair; qkv read and written once, and a row of both tables for each token."""
    tokens = shape.batch * shape.tokens
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    turned = tokens * (shape.heads + shape.kv_heads) * shape.pairs
    return Cost(
        6 * turned,
        tokens * (2 * width * (4 if dtype == "float32" else 2) + 8 * shape.pairs) + 4 * shape.batch,
    )


def example(shape: RopeShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values; room for twice as many tokens."""

    def make(*size: int, kind: str = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=getattr(torch, kind), device=device)

    room = 2 * shape.tokens
    tables = make(room, shape.pairs, kind="float32"), make(room, shape.pairs, kind="float32")
    qkv = make(shape.batch, shape.tokens, (shape.heads + 2 * shape.kv_heads) * shape.size)
    options: dict[str, Any] = {"interleaved": shape.interleaved}
    first, slots = shape.batch, room
    if shape.page:
        per = cdiv(room, shape.page)
        options["pages"] = make(shape.batch, per, kind="int32")
        first, slots = shape.batch * per, shape.page
    cache = (make(first, shape.kv_heads, slots, shape.size) for _ in range(2))
    return (qkv, *tables, make(shape.batch, kind="int32"), *cache), options


KERNEL = Kernel(
    name="rope_append",
    op="rope_append",
    accepts=accepts,
    choose=choose,
    configs=CONFIGS,
    shared_bytes=lambda config: 0,
    plan=plan,
    launch=launch,
    reference=reference,
    cost=cost,
    example=example,
    dtypes=DTYPES,
    typical=RopeShape(16, 256, 32, 8, 128, 64, page=64),
)
