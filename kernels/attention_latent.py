# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache of latents: one row of a token is its key for all heads, and the row's first elements are its value.

Formulas as in `attention.py`. Shapes: q [batch, seq, heads, size], adjacent along size; latents [batch, 1, capacity, size], or paged
[pages, 1, page, size] with a table as in `cache.py`; lengths [batch] int32, the tokens in the cache with those of q, which are the last; y
[batch, seq, heads, value_size]. A length of 0 gives 0. bias, of the dtype of q or bool, adds to scores or says which keys are seen besides:
[batch, heads, seq, positions], with a stride of 0 where it is the same for all. Slots that no query sees are not read: their pages may be -1.

The heads of a few tokens are the rows of one tile, and a step of latents is loaded once: as keys, in two products (the values, and what else
a key has), and as values. Blocks share a sequence as in `attention_decode.py`.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the products of keys and values absorbed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.attention import (
    DTYPES,
    Scores,
    add_values,
    bias_rows_of,
    finish,
    limited,
    padded,
    result,
)
from nnfront_kernels.attention_parts import needed, parts, sum_parts
from nnfront_kernels.cache import (
    example_cache,
    moved,
    page_of_step,
    require_base,
    require_cache,
    require_counts,
    step_rows,
    stored_tokens,
)
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    KernelError,
    Plan,
    empties,
    launcher,
    strides,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.split_k import Workspace
from nnfront_kernels.split_k import pointers as shared_pointers
from nnfront_kernels.tiles import bucket, cdiv

MOST_VALUES, MOST_REST = 512, 128


@dataclass(frozen=True)
class LatentShape:
    """`seq` queries of each of `batch` sequences, keys of `value_size` and `rest` elements. `longest` bounds the lengths; page 0 is a contiguous cache."""

    batch: int
    heads: int
    value_size: int
    rest: int
    longest: int
    seq: int = 1
    page: int = 0
    window: int = 0

    @property
    def size(self) -> int:
        """Elements of a key."""
        return self.value_size + self.rest


def reference(
    q: torch.Tensor,
    latents: torch.Tensor,
    lengths: torch.Tensor,
    *,
    value_size: int,
    pages: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    **given: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, query by query."""
    y = torch.zeros(*q.shape[:3], value_size, dtype=q.dtype, device=q.device)
    scores, seq = Scores(**given), q.shape[1]
    for sequence, length in enumerate(lengths.tolist()):
        stored = stored_tokens(latents, None, pages, sequence, length, compute)
        for t in range(seq) if length else ():
            own, values = q[sequence, t].to(compute), stored[..., :value_size]
            y[sequence, t] = scores.row(own, stored, values, length - seq + t, (sequence, t))
    return y


# Rows (heads of tokens) x latents of a step. 64 rows, with which sm_90 would multiply by wgmma, spill: their sums are 128 registers of
# each of 256 threads. Not yet measured.
CONFIGS = (Config(16, 32, 1, 4, 3), Config(32, 32, 1, 8, 3))


def choose(shape: LatentShape, dtype: str, arch: str) -> Config:
    """The tile with the fewest rows that hold all heads of all queries, else the last, and as many blocks for a sequence as fill the GPU twice."""
    rows = shape.heads * bucket(shape.seq)
    config = next((c for c in KERNEL.configs[arch] if c.block_m >= rows), KERNEL.configs[arch][-1])
    blocks = bucket(shape.batch) * cdiv(rows, config.block_m)
    return replace(config, split_k=parts(blocks, config.block_n, shape.longest, shape.window, ARCHS[arch]))


def shared_bytes(config: Config) -> int:
    """Shared memory of the pipelined latents, of queries and weights at their largest, and of barriers."""
    most = MOST_VALUES + MOST_REST // 2
    return 2048 + 2 * (
        most * (config.num_stages * config.block_n + config.block_m) + config.block_m * config.block_n
    )


@triton.jit(do_not_specialize=["SEQ", "stride_pages"])
def attention_latent_kernel(
    q_ptr,
    latents_ptr,
    pages_ptr,
    base_ptr,
    lengths_ptr,
    sinks_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,  # float32
    arrived_ptr,
    SEQ,
    stride_qb, stride_qt, stride_qh,
    stride_pages,
    stride_lp, stride_ls,
    stride_bb, stride_bh, stride_bt,
    stride_yb, stride_yt, stride_yh,
    scale,
    soft_cap,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 is none
    CAPPED: tl.constexpr,
    SIZE_V: tl.constexpr,
    REST: tl.constexpr,  # elements of a key that are no values
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    latents_ptr = moved(latents_ptr, base_ptr, 0)
    # Blocks that read the same latents follow one another, those that see most of them first.
    split, sequence = tl.program_id(1), tl.program_id(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    length = tl.load(lengths_ptr + sequence)
    before = length - SEQ
    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t, head = lane // HEADS, lane % HEADS
    inside_m = t < SEQ
    position = before + t
    low = position + 1 - WINDOW if WINDOW else tl.zeros((BLOCK_M,), dtype=tl.int32)
    # What some row of the tile sees.
    start = tl.maximum(before + tile * BLOCK_M // HEADS + 1 - WINDOW, 0) if WINDOW else 0
    stop = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, SEQ - 1) + 1
    # This block's steps: an equal part of those.
    skipped = start // BLOCK_N
    steps = tl.cdiv(stop, BLOCK_N) - skipped
    depth = tl.maximum(tl.cdiv(steps, SPLITS), 1)
    active = tl.maximum(tl.cdiv(steps, depth), 1)  # blocks that have steps: others leave no part
    first = (skipped + split * depth) * BLOCK_N
    end = tl.minimum(first + depth * BLOCK_N, stop)

    dv, dr = tl.arange(0, BLOCK_DV)[None, :], tl.arange(0, BLOCK_DR)[None, :]
    at_row = sequence.to(tl.int64) * stride_qb + t.to(tl.int64) * stride_qt + head * stride_qh
    q_rows = q_ptr + at_row[:, None]
    q = tl.load(q_rows + dv, mask=inside_m[:, None] & (dv < SIZE_V), other=0.0)
    q_rest = tl.load(q_rows + SIZE_V + dr, mask=inside_m[:, None] & (dr < REST), other=0.0)
    bias_rows = bias_rows_of(bias_ptr, sequence, head, t, stride_bb, stride_bh, stride_bt)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    page = page_of_step(pages_ptr, stride_pages, sequence, first, end, PAGE, BLOCK_N)
    for step in range(first, end, BLOCK_N):
        next_page = page_of_step(pages_ptr, stride_pages, sequence, step + BLOCK_N, end, PAGE, BLOCK_N)
        at = step + tl.arange(0, BLOCK_N)
        held = ((at >= start) & (at < end))[:, None]
        rows = step_rows(latents_ptr, page, step, stride_lp, stride_ls, PAGE, BLOCK_N)[:, None]
        values = tl.load(rows + dv, mask=held & (dv < SIZE_V), other=0.0)
        rest = tl.load(rows + SIZE_V + dr, mask=held & (dr < REST), other=0.0)
        z = tl.dot(q, values.T, input_precision="ieee")
        z = tl.dot(q_rest, rest.T, z, input_precision="ieee") * scale
        z = limited(z, at, low, position, soft_cap, CAPPED, True, bias_rows, inside_m, held)
        acc, largest, total = add_values(acc, largest, total, z, values)
        page = next_page
    y_rows = (
        y_ptr + (sequence.to(tl.int64) * stride_yb + t.to(tl.int64) * stride_yt + head * stride_yh)[:, None]
    )
    inside = inside_m[:, None] & (dv < SIZE_V)
    if SPLITS == 1:
        y = finish(acc, largest, total, sinks_ptr, head, inside_m)
        tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif split < active:
        group = sequence * tl.num_programs(0) + tile
        acc, largest, total, last = sum_parts(
            acc, largest, total, partial_ptr, arrived_ptr, group, split, active, SPLITS, BLOCK_M, BLOCK_DV
        )
        if last:
            y = finish(acc, largest, total, sinks_ptr, head, inside_m)
            tl.store(y_rows + dv, y.to(y_ptr.dtype.element_ty), mask=inside)


@taking(DTYPES)
def accepts(shape: LatentShape, dtype: str, arch: str) -> str | None:
    if not 16 <= shape.value_size <= MOST_VALUES:
        return f"values must have 16 to {MOST_VALUES} elements, got {shape.value_size}"
    if not 1 <= shape.rest <= MOST_REST:
        return f"keys must have 1 to {MOST_REST} elements besides the values, got {shape.rest}"
    return None if shape.batch < 2**16 else f"there must be less than 65536 sequences, got {shape.batch}"


def plan(
    q: torch.Tensor,
    latents: torch.Tensor,
    lengths: torch.Tensor,
    *,
    value_size: int,
    pages: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    longest: int | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **given: Any,
) -> Plan:
    """Attend: y [batch, seq, heads, value_size].

    Options: value_size, must be given; pages, of a paged cache; base; longest, a bound of the lengths that is lower than the capacity and only
    decides how many blocks share a sequence; out and workspace; and those of `attention.Scores`.
    """
    if q.ndim != 4 or q.stride(3) != 1:
        raise KernelError(
            f"q must be [batch, seq, heads, size] with adjacent elements, got {list(q.shape)} with strides {list(q.stride())}"
        )
    batch, seq, heads, size = q.shape
    capacity = require_cache(latents, latents, pages, batch, q.dtype)
    if latents.shape[1] != 1 or latents.shape[3] != size:
        raise KernelError(
            f"latents must be one head of {size} as q, got {latents.shape[1]} of {latents.shape[3]}"
        )
    require_counts("lengths", lengths, batch)
    require_base(base)
    scores = Scores(**given)
    scores.check(heads, 1)
    page, longest = 0 if pages is None else latents.shape[2], capacity if longest is None else longest
    shape = LatentShape(batch, heads, value_size, size - value_size, longest, seq, page, scores.window or 0)
    arch, config = KERNEL.settle(shape, q, arch, config)
    tiles = cdiv(seq * heads, config.block_m)
    out = result(out, (batch, seq, heads, value_size), q)
    return Plan(
        kernel=attention_latent_kernel,
        grid=(tiles, config.split_k, batch),
        arguments={
            "q_ptr": q,
            "latents_ptr": latents,
            "pages_ptr": pages,
            "base_ptr": base,
            "lengths_ptr": lengths,
            "y_ptr": out,
            **shared_pointers(workspace, needed(config, batch * tiles, value_size), q.device),
            "SEQ": seq,
            **strides("q", q, "bth"),
            "stride_pages": 0 if pages is None else pages.stride(0),
            "stride_lp": latents.stride(0),
            "stride_ls": latents.stride(2),
            **scores.arguments(q, (batch, heads, seq), longest),
            **strides("y", out, "bth"),
        },
        constants={
            "HEADS": heads,
            **scores.constants(),
            "SIZE_V": value_size,
            "REST": size - value_size,
            "PAGE": page,
            "SPLITS": config.split_k,
            **config.blocks("mn"),
            "BLOCK_DV": padded(value_size),
            "BLOCK_DR": padded(size - value_size),
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
    )


def example(shape: LatentShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    options: dict[str, Any] = {"value_size": shape.value_size, "window": shape.window or None}
    cache, there = example_cache(shape.batch, 1, shape.longest, (shape.size,), shape.page, dtype, device)
    q = make(shape.batch, shape.seq, shape.heads, shape.size)
    return (q, *cache, make(shape.batch, kind="int32")), options | there


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=LatentShape(32, 128, 512, 64, 8192, page=64))
