# SPDX-License-Identifier: Apache-2.0
"""One matmul for each expert of a mixture, in one launch: each tile of rows meets the weight of its own expert.

Shapes: w [E, N, K], y [rows, N] or, gated, [rows, N // 2], in 16 bits; bias [E, N]; activation, gated, its limits, and scale as in
`epilogue.py`. The rows and their order come from `moe_routing.py`, where a slot is one choice of one token:

    gather    x is [T, K] and a slot reads its token's row; else x is [T * top_k, K] in the order of the experts
    scatter   y is [T * top_k, N] in the order of the slots; else in the order of the experts

so a feed-forward layer is a gated launch with gather, a plain one with scatter, and a weighted sum (`moe_combine.py`).
Each row of y is written by one block, and sums are float32 in a fixed order: repeatable bit for bit. Rows of choices that
the routing left out are not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    KernelError,
    Plan,
    is_divisible,
    launcher,
    require_matrix,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.epilogue import Gate, finish_tile, halves
from nnfront_kernels.moe_routing import Routing, most_tiles
from nnfront_kernels.tiles import bucket, cdiv, shared_bytes
from nnfront_kernels.walk import tile_at

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class GroupedShape:
    """T tokens, each sent to top_k of the experts, whose weights are [n, k]. `block_m`: of the routing, 0 for any."""

    tokens: int
    top_k: int
    experts: int
    n: int
    k: int
    gated: bool = False
    gather: bool = True
    aligned: bool = True
    block_m: int = 0


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: bool = False,
    bias: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    **epilogue: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`. Takes what `launch` takes; rows that are not written are zero."""
    epi = Gate(**epilogue)
    y = x.new_zeros(routing.slots.numel(), epi.columns(w.shape[1]), dtype=epi.out_dtype or x.dtype)
    for expert, first, rows in routing.tiles.T.tolist():
        position = torch.arange(first, first + rows, device=x.device)
        slots = routing.slots[position].long()
        product = x[slots // routing.top_k if gather else position].to(compute) @ w[expert].to(compute).T
        own = Gate(**epilogue, bias=None if bias is None else bias[expert])
        y[slots if scatter else position] = own.reference(product, x.dtype)
    return y


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_80": (
        Config(16, 64, 128, 4, 3),
        Config(32, 64, 128, 4, 3),
        Config(64, 128, 32, 4, 4),
        Config(128, 128, 64, 8, 3),
    ),
    **dict.fromkeys(
        ("sm_90", "sm_100"),
        (
            Config(16, 64, 128, 4, 4),
            Config(32, 64, 128, 4, 4),
            Config(64, 128, 64, 4, 4),
            Config(128, 128, 64, 8, 4),
            Config(128, 256, 64, 8, 4),
        ),
    ),
}
# Where a row does not start at a multiple of 16 elements, loads are two bytes wide and addresses take the registers.
UNALIGNED = tuple(Config(rows, 32, 32, 4, 2) for rows in (16, 32, 64, 128))


def choose(shape: GroupedShape, dtype: str, arch: str) -> Config:
    """The fewest rows that hold an expert's share of the slots, and the widest tile that still fills the GPU.

    Where the routing is made already, its block_m. Depends on the number of slots only through `tiles.bucket`.
    """
    slots = shape.tokens * shape.top_k
    share = bucket(cdiv(slots, max(min(shape.experts, slots), 1)))
    candidates = KERNEL.configs[arch] if shape.aligned else UNALIGNED
    rows = shape.block_m or next(
        (c.block_m for c in candidates if c.block_m >= share), candidates[-1].block_m
    )
    fitting = [c for c in candidates if c.block_m == rows]

    def blocks(config: Config) -> int:
        return min(shape.experts, bucket(slots)) * cdiv(share, rows) * cdiv(shape.n, config.block_n)

    return next((c for c in reversed(fitting) if blocks(c) >= 2 * ARCHS[arch].num_sms), fitting[0])


@triton.jit(do_not_specialize=["NUM_TILES"])
def grouped_matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    slots_ptr,
    tiles_ptr,  # [3, NUM_TILES]: expert, first position, rows
    scale,
    NUM_TILES,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_be,
    stride_ym,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    # Tiles of one expert are neighbours: blocks that run together share its weight in L2.
    tile, pid_n = tile_at(tl.program_id(0), NUM_TILES, tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tl.load(tiles_ptr + 2 * NUM_TILES + tile)
    if rows == 0:
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    lane = tl.arange(0, BLOCK_M)
    inside_m = lane < rows
    position = tl.load(tiles_ptr + NUM_TILES + tile) + lane
    x_row = position
    y_row = position
    if GATHER or SCATTER:
        slot = tl.load(slots_ptr + position, mask=inside_m, other=0)
        if GATHER:
            x_row = slot // TOP_K
        if SCATTER:
            y_row = slot

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    inside_n = offs_n < N
    w_ptr += expert * stride_we
    x_ptrs = x_ptr + (x_row.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[:, None] + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=inside_m[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=inside_n[:, None], other=0.0)
        else:
            inside_k = (offs_k < K - k)[None, :]
            x = tl.load(x_ptrs, mask=inside_m[:, None] & inside_k, other=0.0)
            w = tl.load(w_ptrs, mask=inside_n[:, None] & inside_k, other=0.0)
        acc = tl.dot(x, w.T, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    if bias_ptr is not None:
        bias_ptr += expert * stride_be
    y_rows = y_ptr + (y_row.to(tl.int64) * stride_ym)[:, None]
    first_n = pid_n * BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        half = finish_tile(
            acc, bias_ptr, scale, first_n, N, ACTIVATION, True, BLOCK_M, BLOCK_N, ALPHA, LIMIT, OFFSET
        )
        store_rows(half, y_rows, inside_m, first_n // 2, N // 2, HALF)
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        left = finish_tile(left, bias_ptr, scale, first_n, N, ACTIVATION, False, BLOCK_M, HALF)
        store_rows(left, y_rows, inside_m, first_n, N, HALF)
        right = finish_tile(right, bias_ptr, scale, first_n + HALF, N, ACTIVATION, False, BLOCK_M, HALF)
        store_rows(right, y_rows, inside_m, first_n + HALF, N, HALF)


@triton.jit
def store_rows(tile, y_rows, inside_m, first_column, num_columns, COLUMNS: tl.constexpr):
    """Cast and write a tile to rows that need not be neighbours."""
    offs_c = first_column + tl.arange(0, COLUMNS)
    inside = inside_m[:, None] & (offs_c < num_columns)[None, :]
    tl.store(y_rows + offs_c[None, :], tile.to(y_rows.dtype.element_ty), mask=inside)


@taking(DTYPES)
def accepts(shape: GroupedShape, dtype: str, arch: str) -> str | None:
    if shape.experts < 1:
        return f"there must be at least 1 expert, got {shape.experts}"
    return None


def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    scatter: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **epilogue: Any,
) -> Plan:
    """Compute y: [T * top_k, N] or, gated, [T * top_k, N // 2].

    Options: gather, scatter, bias [E, N], activation, gated, alpha, limit, up_offset, scale, out_dtype, out.
    """
    epi = Gate(**epilogue)
    tokens, top_k = routing.experts.shape
    if w.ndim != 3 or (w.shape[2] > 1 and w.stride(2) != 1):
        raise KernelError(f"w must be [E, N, K] with adjacent rows' elements, got {list(w.shape)}")
    num_experts, n, k = w.shape
    require_matrix("x", x, tokens if gather else tokens * top_k, k, w.dtype)
    if bias is not None:
        require_matrix("bias", bias, num_experts, n, None)
    if epi.residual is not None:
        raise KernelError("a residual is added after the weighted sum, not to each expert's share")
    epi.check(tokens * top_k, n)
    loads = {"x_ptr": x, "w_ptr": w, "K": k, "stride_xm": x.stride(0), "stride_we": w.stride(0), "stride_wn": w.stride(1)}  # fmt: skip
    aligned = all(map(is_divisible, loads.values()))
    shape = GroupedShape(tokens, top_k, num_experts, n, k, epi.gated, gather, aligned, routing.block_m)
    arch, config = KERNEL.settle(shape, x, arch, config)
    num_tiles = most_tiles(tokens, top_k, num_experts, routing.block_m)
    if config.block_m != routing.block_m or routing.tiles.shape != (3, num_tiles):
        raise KernelError(
            f"the routing must be for {num_experts} experts and tiles of {config.block_m} rows, got tiles of "
            f"{routing.block_m} rows and a table of {list(routing.tiles.shape)}"
        )
    columns = epi.columns(n)
    if out is None:
        out = torch.empty(tokens * top_k, columns, dtype=epi.out_dtype or x.dtype, device=x.device)
    require_matrix("out", out, tokens * top_k, columns, epi.out_dtype or x.dtype)
    return Plan(
        kernel=grouped_matmul_kernel,
        grid=(num_tiles * cdiv(n, config.block_n),),
        arguments={
            **loads,
            "y_ptr": out,
            "bias_ptr": bias,
            "slots_ptr": routing.slots,
            "tiles_ptr": routing.tiles,
            "scale": epi.scale,
            "NUM_TILES": num_tiles,
            "N": n,
            "stride_be": 0 if bias is None else bias.stride(0),
            "stride_ym": out.stride(0),
        },
        constants={
            "TOP_K": top_k,
            "GATHER": gather,
            "SCATTER": scatter,
            **config.blocks("mnk"),
            "GROUP_M": 8,
            "EVEN_K": k % config.block_k == 0,
            **epi.constants(),
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        divisible=tuple(loads) if aligned else (),
    )


def example(shape: GroupedShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values. The routing fits what choose picks on sm_90."""
    kind = getattr(torch, dtype)
    block_m = shape.block_m or choose(shape, dtype, "sm_90").block_m
    tiles = most_tiles(shape.tokens, shape.top_k, shape.experts, block_m)
    slots = shape.tokens * shape.top_k

    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    routing = Routing(ints(slots), ints(3, tiles), ints(shape.tokens, shape.top_k), block_m)
    x = torch.empty(shape.tokens if shape.gather else slots, shape.k, dtype=kind, device=device)
    w = torch.empty(shape.experts, shape.n, shape.k, dtype=kind, device=device)
    return (x, w, routing), {"gather": shape.gather, "scatter": not shape.gather, "gated": shape.gated}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    fallbacks=UNALIGNED,
    shared_bytes=partial(shared_bytes, x_bits=16, w_bits=16),
    shape_for=lambda shape, config: replace(shape, block_m=config.block_m),
    typical=GroupedShape(4096, 8, 128, 1536, 2048, gated=True),
)
