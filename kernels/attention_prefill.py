# SPDX-License-Identifier: Apache-2.0
"""Attention of many queries for each sequence, without a matrix of scores in memory (`attention.py` has the formulas).

Shapes: q [tokens, heads, size], adjacent along size, sequences one after the other: sequence b is q[starts[b] : starts[b +
1]]; starts [batch + 1] int32; y [tokens, heads, value size]. Keys and values are either
  * those of the same tokens: [tokens, kv_heads, size], or
  * a cache (`cache.py`), contiguous or paged, that holds before[b] earlier tokens of sequence b and then these: the chunk
    after `before` is appended first. before [batch] int32, without it 0.
Query t of a sequence is at position before[b] + t. With causal=False it sees all keys instead; a window needs causal.

The heads of a group and their queries are the rows of one tile: row r is query r // shared, head r % shared. Steps that no
mask cuts run without one. Sums are in the order of the keys: repeatable bit for bit.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.attention import (
    LOG2E,
    SIZES,
    attend_step,
    finish,
    padded,
    require_options,
    row,
    shared_bytes,
)
from nnfront_kernels.cache import gathered, pointers, require_cache, require_counts
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
)
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class PrefillShape:
    """`seq` queries of each of `batch` sequences, after `before` tokens in a cache; page 0 is no table of pages."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    size: int
    value_size: int = 0  # 0 is size
    before: int = 0
    page: int = 0
    window: int = 0
    causal: bool = True


def reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int | None = None,
    before: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, query by query. `longest` changes nothing."""
    y = torch.zeros(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=q.device)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "causal": causal}
    bounds = starts.tolist()
    for sequence, (first, end) in enumerate(pairwise(bounds)):
        earlier = 0 if before is None else int(before[sequence])
        if keys.ndim == 3:
            k, v = keys[first:end].transpose(0, 1), values[first:end].transpose(0, 1)
        else:
            k, v = (gathered(t, pages, sequence, earlier + end - first) for t in (keys, values))
        for t in range(first, end):
            y[t] = row(q[t].to(compute), k, v, earlier + t - first, **options)
    return y


# Rows x keys of a step, for heads of up to block_k. Chosen so that nothing spills; not yet measured.
CONFIGS = {
    "sm_80": (Config(128, 32, 128, 8, 2), Config(64, 64, 64, 4, 3), Config(64, 32, 256, 8, 2)),
    "sm_90": (Config(128, 64, 128, 8, 3), Config(128, 64, 64, 4, 3), Config(64, 32, 256, 8, 2)),
    "sm_100": (Config(128, 64, 128, 8, 3), Config(128, 64, 64, 8, 3), Config(64, 32, 256, 8, 2)),
    "gfx942": (Config(64, 32, 128, 4, 2), Config(64, 64, 64, 4, 2), Config(32, 16, 256, 4, 2)),
}


def choose(shape: PrefillShape, dtype: str, arch: str) -> Config:
    """The narrowest config that holds a head."""
    size = max(shape.size, shape.value_size)
    held = [config for config in CONFIGS[arch] if config.block_k >= size]
    return min(held, key=lambda config: config.block_k)


@triton.jit(do_not_specialize=["stride_pages"])
def attention_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    starts_ptr,
    before_ptr,
    sinks_ptr,
    y_ptr,
    stride_qt,
    stride_qh,
    stride_pages,
    stride_kp,
    stride_kh,
    stride_ks,
    stride_vp,
    stride_vh,
    stride_vs,
    stride_yt,
    stride_yh,
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
):
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
        k_head, v_head = (
            keys_ptr + kv_head.to(tl.int64) * stride_kh,
            values_ptr + kv_head.to(tl.int64) * stride_vh,
        )
        if not CACHED:
            k_head += first_token.to(tl.int64) * stride_ks
            v_head += first_token.to(tl.int64) * stride_vs

        # Keys start .. end are seen by some row, full_start .. full_end by every row.
        first, last = (
            before + first_row // SHARED,
            before + tl.minimum((first_row + BLOCK_M - 1) // SHARED, seq - 1),
        )
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

        acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if WINDOW:
            for at in range(step, full_start, BLOCK_N):
                acc, largest, total = attend_step(
                    q, acc, largest, total, at, start, end, low, high, sequence, k_head, v_head, pages_ptr,
                    stride_pages, stride_kp, stride_ks, stride_vp, stride_vs, scale, soft_cap, CAPPED, SIZE_K, SIZE_V,
                    BLOCK_DK, BLOCK_DV, BLOCK_N, PAGE, True,
                )  # fmt: skip
        for at in range(full_start, full_end, BLOCK_N):
            acc, largest, total = attend_step(
                q, acc, largest, total, at, start, end, low, high, sequence, k_head, v_head, pages_ptr, stride_pages,
                stride_kp, stride_ks, stride_vp, stride_vs, scale, soft_cap, CAPPED, SIZE_K, SIZE_V, BLOCK_DK, BLOCK_DV,
                BLOCK_N, PAGE, False,
            )  # fmt: skip
        for at in range(full_end, end, BLOCK_N):
            acc, largest, total = attend_step(
                q, acc, largest, total, at, start, end, low, high, sequence, k_head, v_head, pages_ptr, stride_pages,
                stride_kp, stride_ks, stride_vp, stride_vs, scale, soft_cap, CAPPED, SIZE_K, SIZE_V, BLOCK_DK, BLOCK_DV,
                BLOCK_N, PAGE, True,
            )  # fmt: skip
        y = finish(acc, largest, total, sinks_ptr, head, inside_m)
        y_rows = y_ptr + (token * stride_yt + head * stride_yh)[:, None]
        tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside_m[:, None] & (dv < SIZE_V))


def accepts(shape: PrefillShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses."""
    if arch not in ARCHS:
        return f"arch must be one of {', '.join(ARCHS)}, got '{arch}'"
    if dtype not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got '{dtype}'"
    for size in (shape.size, shape.value_size or shape.size):
        if size not in SIZES:
            return f"the size of a head must be one of {', '.join(map(str, SIZES))}, got {size}"
    if shape.batch >= 2**16:
        return f"there must be less than 65536 sequences, got {shape.batch}"
    if shape.window and not shape.causal:
        return "a window needs causal attention"
    return None


def plan(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    before: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Check the arguments of `launch` and describe the launch."""
    if q.ndim != 3 or q.stride(2) != 1:
        raise KernelError(
            f"q must be [tokens, heads, size] with adjacent elements, got {list(q.shape)} with strides {list(q.stride())}"
        )
    tokens, heads, size = q.shape
    batch = starts.shape[0] - 1
    require_counts("starts", starts, batch + 1)
    cached = keys.ndim == 4
    if cached:
        require_cache(keys, values, pages, batch, q.dtype)
    else:
        _require_tokens(keys, values, tokens, q.dtype)
        if before is not None or pages is not None:
            raise KernelError("before and pages are for a cache, and keys are [tokens, kv_heads, size]")
        keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (keys, values))
    if before is not None:
        require_counts("before", before, batch)
    kv_heads, slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    if keys.shape[3] != size:
        raise KernelError(f"keys must have heads of {size} as q, got {keys.shape[3]}")
    require_options(heads, kv_heads, window, soft_cap, sinks)
    page = 0 if pages is None else slots
    shape = PrefillShape(batch, longest, heads, kv_heads, size, value_size, 0, page, window or 0, causal)
    arch = arch or arch_of(q.device)
    require(accepts(shape, dtype_name(q), arch), "attention_prefill")
    config = config or choose(shape, dtype_name(q), arch)
    if out is None:
        out = torch.empty(tokens, heads, value_size, dtype=q.dtype, device=q.device)
    if out.shape != (tokens, heads, value_size) or out.dtype != q.dtype or out.stride(2) != 1:
        raise KernelError(
            f"out must be {q.dtype} {[tokens, heads, value_size]} with adjacent elements, got {out.dtype} "
            f"{list(out.shape)} with strides {list(out.stride())}"
        )
    strides = pointers(keys, values, pages)
    if not cached:
        strides |= {"stride_kp": 0, "stride_vp": 0}
    scale = size**-0.5 if scale is None else scale
    return Plan(
        kernel=attention_prefill_kernel,
        grid=(cdiv(longest * (heads // kv_heads), config.block_m), kv_heads, batch),
        arguments={
            "q_ptr": q,
            **strides,
            "starts_ptr": starts,
            "before_ptr": before,
            "sinks_ptr": sinks,
            "y_ptr": out,
            "stride_qt": q.stride(0),
            "stride_qh": q.stride(1),
            "stride_yt": out.stride(0),
            "stride_yh": out.stride(1),
            "scale": scale * LOG2E,
            "soft_cap": (soft_cap or 1.0) * LOG2E,
        },
        constants={
            "SHARED": heads // kv_heads,
            "CACHED": cached,
            "CAUSAL": causal,
            "WINDOW": window or 0,
            "CAPPED": soft_cap is not None,
            "SIZE_K": size,
            "SIZE_V": value_size,
            "PAGE": page,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_DK": padded(size),
            "BLOCK_DV": padded(value_size),
        },
        config=config,
        output=out,
    )


def _require_tokens(keys: torch.Tensor, values: torch.Tensor, tokens: int, dtype: torch.dtype) -> None:
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim != 3 or tensor.shape[:2] != (tokens, keys.shape[1]) or tensor.stride(2) != 1:
            raise KernelError(
                f"{name} must be [{tokens}, kv_heads, size] with adjacent elements, or a cache, "
                f"got {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.dtype != dtype:
            raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")


def launch(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Attend: y [tokens, heads, value size].

    Options: longest, must be given: no sequence has more queries, those beyond are not computed; before and pages, of a
    cache; scale, 1 / sqrt(size) without; causal; window; soft_cap; sinks [heads]; out. Raises KernelError if an argument
    does not fit.
    """
    return plan(q, keys, values, starts, **options).launch()


def cost(shape: PrefillShape, dtype: str) -> Cost:
    """Two products for each pair of a query and a key that it sees; each tensor moved once."""
    total = shape.before + shape.seq
    pairs = sum(
        min(p + 1 if shape.causal else total, shape.window or total) for p in range(shape.before, total)
    )
    both = shape.size + (shape.value_size or shape.size)
    moved = (shape.seq * shape.heads + total * shape.kv_heads) * both
    return Cost(2 * shape.batch * shape.heads * pairs * both, 2 * shape.batch * moved + 4 * shape.batch)


def example(shape: PrefillShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values."""

    def make(*size: int, kind: str = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=getattr(torch, kind), device=device)

    tokens, total, values = shape.batch * shape.seq, shape.before + shape.seq, shape.value_size or shape.size
    options: dict[str, Any] = {"longest": shape.seq, "window": shape.window or None, "causal": shape.causal}
    rows: tuple[int, ...] = (tokens, shape.kv_heads)
    if shape.page:
        per = cdiv(total, shape.page)
        options["pages"] = make(shape.batch, per, kind="int32")
        rows = (shape.batch * per, shape.kv_heads, shape.page)
    elif shape.before:
        rows = (shape.batch, shape.kv_heads, total)
    if shape.before:
        options["before"] = make(shape.batch, kind="int32")
    q, starts = make(tokens, shape.heads, shape.size), make(shape.batch + 1, kind="int32")
    return (q, make(*rows, shape.size), make(*rows, values), starts), options


KERNEL = Kernel(
    name="attention_prefill",
    op="attention",
    accepts=accepts,
    choose=choose,
    configs=CONFIGS,
    shared_bytes=shared_bytes,
    plan=plan,
    launch=launch,
    reference=reference,
    cost=cost,
    example=example,
    dtypes=DTYPES,
    shape_for=lambda shape, config: replace(shape, size=config.block_k),
    typical=PrefillShape(4, 4096, 32, 8, 128),
)
