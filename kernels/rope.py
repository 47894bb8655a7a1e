# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys by the positions of their tokens, in one launch.

    a, b = x[i], x[i + pairs]                with interleaved: x[2 i], x[2 i + 1]              for i < pairs
    a', b' = a cos[t, i] - b sin[t, i], b cos[t, i] + a sin[t, i]

Shapes: q [batch, seq, heads, size] and k [batch, seq, kv_heads, size], each with strides of its own, adjacent along size:
views into a fused projection will do. cos and sin hold a row for each token: [batch, seq, pairs], or [1, seq, pairs] or
[seq, pairs] for all sequences, of any float dtype, adjacent along pairs. Features from 2 * pairs on stay as they are.
Computed in float32 and rounded once.

`rope_append.py` does the same and also stores keys and values in a cache.

Source: RoFormer, arXiv 2104.09864, eq. 34.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import WARP, Config, Kernel, KernelError, Plan, empties, launcher, strides, taking
from nnfront_kernels.quantize_fp8 import encode
from nnfront_kernels.quantized import FP8_SMALLEST
from nnfront_kernels.remembered import remembered
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")
SMALLEST = tl.constexpr(FP8_SMALLEST)


@dataclass(frozen=True)
class RopeShape:
    """`tokens` of each of `batch` sequences; 0 pairs are no rotation."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    pairs: int
    interleaved: bool = False


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, compute: torch.dtype
) -> torch.Tensor:
    """The definition for x [batch, seq, heads, size], in `compute` and not rounded."""
    pairs = cos.shape[-1]
    c, s = (table.to(compute).unsqueeze(-2) for table in (cos, sin))
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = x.to(compute, copy=True)
    a, b = x[..., first].to(compute), x[..., second].to(compute)
    turned[..., first] = a * c - b * s
    turned[..., second] = b * c + a * s
    return turned


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`: (q, k)."""
    turned_q, turned_k = (rotated(x, cos, sin, interleaved, compute).to(x.dtype) for x in (q, k))
    return turned_q, turned_k


# block_m heads of a token, 16 bytes for each thread where there are 64 pairs of 16 bits. Not yet measured.
CONFIGS = (Config(16, 1, 1, 128 // WARP, 1),)


@triton.jit(do_not_specialize=["SEQ"])
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    new_q_ptr,
    new_k_ptr,
    SEQ,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_cb, stride_ct,
    stride_sb, stride_st,
    stride_nqb, stride_nqt, stride_nqh,
    stride_nkb, stride_nkt, stride_nkh,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    sequence, t, block = tl.program_id(0) // SEQ, tl.program_id(0) % SEQ, tl.program_id(1)
    cos_row = row_of(cos_ptr, sequence, t, stride_cb, stride_ct)
    sin_row = row_of(sin_ptr, sequence, t, stride_sb, stride_st)
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = head < HEADS
        x_rows = row_of(q_ptr, sequence, t, stride_qb, stride_qt) + head * stride_qh
        y_rows = row_of(new_q_ptr, sequence, t, stride_nqb, stride_nqt) + head * stride_nqh
    else:
        head = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = head < KV_HEADS
        x_rows = row_of(k_ptr, sequence, t, stride_kb, stride_kt) + head * stride_kh
        y_rows = row_of(new_k_ptr, sequence, t, stride_nkb, stride_nkt) + head * stride_nkh
    turn(x_rows, y_rows, None, inside, cos_row, sin_row, SIZE, PAIRS, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R)


@triton.jit
def row_of(ptr, sequence, t, stride_b, stride_t):
    return ptr + sequence.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t


@triton.jit
def turn(
    x_rows,  # [BLOCK_H, 1]
    y_rows,  # [BLOCK_H, 1]
    scale_rows,  # [BLOCK_H, 1] with y in codes of 8 bits, else None
    inside,  # [BLOCK_H, 1]
    cos_row,
    sin_row,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # 0 copies
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,  # a power of two: pairs, or with INTERLEAVED half the head
    BLOCK_R: tl.constexpr,  # a power of two that holds what is not rotated, or 0
):
    """Store heads of a token with their first pairs rotated."""
    largest = tl.zeros((BLOCK_H, 1), dtype=tl.int32)
    if PAIRS:
        pair = tl.arange(0, BLOCK_P)[None, :]
        real = pair < PAIRS
        cos = tl.load(cos_row + pair, mask=real, other=1.0).to(tl.float32)
        sin = tl.load(sin_row + pair, mask=real, other=0.0).to(tl.float32)
        if INTERLEAVED:
            at = tl.arange(0, 2 * BLOCK_P)[None, :]
            x = tl.load(x_rows + at, mask=inside & (at < SIZE), other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_P, 2)))
            new_a, new_b = tl.where(real, a * cos - b * sin, a), tl.where(real, b * cos + a * sin, b)
            y = tl.reshape(tl.join(new_a, new_b), (BLOCK_H, 2 * BLOCK_P))
            largest = larger(largest, y)
        else:
            a = tl.load(x_rows + pair, mask=inside & real, other=0.0).to(tl.float32)
            b = tl.load(x_rows + PAIRS + pair, mask=inside & real, other=0.0).to(tl.float32)
            new_a, new_b = a * cos - b * sin, b * cos + a * sin
            largest = larger(larger(largest, new_a), new_b)
    if BLOCK_R:
        at_rest = 2 * PAIRS + tl.arange(0, BLOCK_R)[None, :]
        rest = tl.load(x_rows + at_rest, mask=inside & (at_rest < SIZE), other=0.0)
        largest = larger(largest, rest)
    inverse = None
    if scale_rows is not None:
        full = tl.full((BLOCK_H, 1), 448.0, dtype=tl.float32)  # the largest code
        size = largest.to(tl.float32, bitcast=True)
        size = tl.where(size < SMALLEST, full, size)
        tl.store(scale_rows, tl.div_rn(size, full), mask=inside)
        inverse = tl.div_rn(full, size)
    if PAIRS:
        if INTERLEAVED:
            put(y_rows + at, y, inverse, inside & (at < SIZE))
        else:
            put(y_rows + pair, new_a, inverse, inside & real)
            put(y_rows + PAIRS + pair, new_b, inverse, inside & real)
    if BLOCK_R:
        put(y_rows + at_rest, rest, inverse, inside & (at_rest < SIZE))


@triton.jit
def larger(largest, y):
    """The largest magnitudes so far as bits of float32, which are in the order of the numbers, NaN above all."""
    size = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(largest, tl.max(size, axis=1)[:, None])


@triton.jit
def put(ptrs, y, inverse, mask):
    """Store y, or with `inverse` the codes of y times that."""
    if inverse is None:
        tl.store(ptrs, y.to(ptrs.dtype.element_ty), mask=mask)
    else:
        z = y.to(tl.float32) * inverse
        limited = tl.minimum(tl.maximum(z, -448.0), 448.0)
        tl.store(ptrs, encode(tl.where(z == z, limited, z)), mask=mask)


def blocks(size: int, pairs: int, interleaved: bool, config: Config) -> dict[str, int]:
    """The constants of `turn` that are sizes of blocks."""
    rest = size - 2 * pairs
    return {
        "BLOCK_H": config.block_m,
        "BLOCK_P": triton.next_power_of_2((size + 1) // 2 if interleaved else max(pairs, 1)),
        "BLOCK_R": triton.next_power_of_2(rest) if rest and not (interleaved and pairs) else 0,
    }


@taking(DTYPES)
def accepts(shape: RopeShape, dtype: str, arch: str) -> str | None:
    if not 0 <= shape.pairs <= shape.size // 2:
        return f"at most {shape.size // 2} pairs fit in a head of {shape.size}, got {shape.pairs}"
    if shape.batch * shape.tokens >= 2**31:
        return f"there must be less than 2^31 tokens, got {shape.batch * shape.tokens}"
    return None


def require_heads(name: str, tensor: torch.Tensor, shape: Sequence[int | str], dtype: torch.dtype) -> None:
    """Raise KernelError unless this is [batch, seq, heads, size] of that shape, adjacent along size; a word is any number."""
    fits = tensor.ndim == 4 and all(
        isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or (tensor.shape[3] > 1 and tensor.stride(3) != 1):
        raise KernelError(
            f"{name} must be {dtype} [{', '.join(map(str, shape))}] with adjacent elements, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def require_angles(
    cos: torch.Tensor, sin: torch.Tensor, batch: int, seq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as [batch, seq, pairs], the batch expanded. Raise KernelError unless they have a row for each token."""
    made = []
    for name, table in (("cos", cos), ("sin", sin)):
        wide = table[None] if table.ndim == 2 else table
        fits = wide.ndim == 3 and wide.shape[0] in (1, batch) and wide.shape[1:] == (seq, cos.shape[-1])
        if not fits or (wide.shape[2] > 1 and wide.stride(2) != 1):
            raise KernelError(
                f"{name} must be [{batch} or 1, {seq}, {cos.shape[-1]}] with adjacent elements, "
                f"got {list(table.shape)} with strides {list(table.stride())}"
            )
        made.append(wide.expand(batch, -1, -1))
    return made[0], made[1]


@remembered
def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Rotate: (q, k), new and dense unless `out` and `out_k` say where to write; they may be q and k themselves. The other option is interleaved."""
    require_heads("q", q, ("batch", "seq", "heads", "size"), q.dtype)
    batch, seq, heads, size = q.shape
    require_heads("k", k, (batch, seq, "kv_heads", size), q.dtype)
    kv_heads = k.shape[2]
    cos, sin = require_angles(cos, sin, batch, seq)
    shape = RopeShape(batch, seq, heads, kv_heads, size, cos.shape[2], interleaved)
    arch, config = KERNEL.settle(shape, q, arch, config)
    out, out_k = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if to is None else to
        for x, to in ((q, out), (k, out_k))
    )
    require_heads("out", out, q.shape, q.dtype)
    require_heads("out_k", out_k, k.shape, q.dtype)
    return Plan(
        kernel=rope_kernel,
        grid=(batch * seq, cdiv(heads, config.block_m) + cdiv(kv_heads, config.block_m)),
        arguments={
            "q_ptr": q,
            "k_ptr": k,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "new_q_ptr": out,
            "new_k_ptr": out_k,
            "SEQ": seq,
            **strides("q", q, "bth"),
            **strides("k", k, "bth"),
            **strides("c", cos, "bt"),
            **strides("s", sin, "bt"),
            **strides("nq", out, "bth"),
            **strides("nk", out_k, "bth"),
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "PAIRS": shape.pairs,
            "INTERLEAVED": interleaved,
            **blocks(size, shape.pairs, interleaved, config),
        },
        config=config,
        output=out,
        also=("new_k_ptr",),
    )


def example(shape: RopeShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values: views into a fused projection, and float32 tables."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    make, tokens = empties(dtype, device), (shape.batch, shape.tokens)
    q, k, _ = make(*tokens, sum(heads), shape.size).split(heads, 2)
    tables = (make(*tokens, shape.pairs, kind="float32") for _ in range(2))
    return (q, k, *tables), {"interleaved": shape.interleaved}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=RopeShape(16, 256, 32, 8, 128, 64))
