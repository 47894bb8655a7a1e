# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) with w stored in 8 bits: w[n, k] = q[n, k] * scale[k // G, n], or scale[0, n] for a whole row.

Shapes: x [M, K] 16-bit, q [N, K] int8, scales of any float dtype, [K // G, N] with G 32, 64 or 128, or [1, N] for one
scale per row (then K is any multiple of 16); see `quantized.py`. Epilogue as in `epilogue.py`. The bytes become exact
16-bit numbers (-128..127 fits bfloat16's 8 significant bits); the scale is applied to the float32 product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import split_k
from nnfront_kernels.common import Config, Kernel, Plan, empties, launcher, require_matrix, row_stride, taking
from nnfront_kernels.dependent import fetch_rows, wait_for_earlier
from nnfront_kernels.quantized import GROUPS, dequantize_int8, require_scales
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import add_squares, norm_example, norm_refusal, weighted
from nnfront_kernels.split_k import depth, finish_product, part_of_block, plan_product
from nnfront_kernels.tiles import MatmulShape, smallest

DTYPES = ("float16", "bfloat16")


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`. Takes what `launch` takes."""
    return split_k.reference(x, dequantize_int8(w, scales, compute), compute=compute, **options)


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
# Where there are groups, block_k is the group: it is filled in by choose, and split_k too.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_80": (
        Config(16, 64, 128, 4, 4, registers=96),
        Config(32, 64, 128, 4, 4, registers=144),
        Config(64, 64, 128, 4, 3),
    ),
    **dict.fromkeys(
        ("sm_90", "sm_100"),
        (
            Config(16, 64, 128, 4, 4, registers=96),
            Config(32, 64, 128, 4, 4, registers=144),
            Config(64, 128, 128, 8, 4, registers=184),
            Config(128, 128, 128, 8, 3),
        ),
    ),
}


def shared_bytes(config: Config) -> int:
    """Every stage of x and of w, and one converted tile of w for wgmma."""
    pipeline = config.num_stages * config.block_k * (2 * config.block_m + config.block_n)
    return pipeline + (2 * config.block_k * config.block_n if config.block_m >= 64 else 0)


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The tile with the fewest rows that hold M, else the largest; K split by `tiles.splits`."""
    return smallest("matmul_int8", KERNEL.configs[arch], shape, arch, shared_bytes, 8, 136)


@triton.jit(do_not_specialize=["M"])
def matmul_int8_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    arrived_ptr,
    scale,
    norm_ptr,
    norm_eps,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_sg,
    stride_ym,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles above one another that share tiles of w in L2
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    FETCH: tl.constexpr,  # lines of each row of w that are fetched before earlier launches have ended
):
    num_steps = tl.cdiv(K, BLOCK_K)
    offs_m, offs_n, inside_m, inside_n, first, end = part_of_block(M, N, num_steps, BLOCK_M, BLOCK_N, GROUP_M)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[None, :] + offs_k[:, None]  # [BLOCK_K, BLOCK_N]
    fetch_rows(w_ptr, offs_n, stride_wn, N, first * BLOCK_K, K, FETCH)
    wait_for_earlier(PDL)
    # The scales of the next group are loaded one step early: Triton pipelines only what a dot reads.
    scales_ptrs = scales_ptr + offs_n
    at = (tl.minimum(first, num_steps - 1) if GROUPED else first * 0).to(tl.int64)
    scales = tl.load(scales_ptrs + at * stride_sg, mask=inside_n, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = None
    if norm_eps is not None:
        squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for step in range(first, end):
        in_x, in_w = inside_m[:, None], inside_n[None, :]
        if not EVEN_K:
            inside_k = offs_k < K - step * BLOCK_K
            in_x, in_w = in_x & inside_k[None, :], in_w & inside_k[:, None]
        x = tl.load(x_ptrs + step * BLOCK_K, mask=in_x, other=0.0)
        w = tl.load(w_ptrs + step * BLOCK_K, mask=in_w, other=0, eviction_policy="evict_first")
        if norm_eps is not None:
            squares = add_squares(squares, x)
        if norm_ptr is not None:
            norm_at = (step * BLOCK_K + offs_k)[None, :]
            x = weighted(x, norm_ptr + norm_at, None if EVEN_K else norm_at < K, True)
        if GROUPED:
            at = tl.minimum(step + 1, num_steps - 1).to(tl.int64)
            next_scales = tl.load(scales_ptrs + at * stride_sg, mask=inside_n, other=0.0)
            acc += tl.dot(x, w.to(x.dtype)) * scales.to(tl.float32)[None, :]
            scales = next_scales
        else:
            acc = tl.dot(x, w.to(x.dtype), acc)
    if not GROUPED:
        acc = acc * scales.to(tl.float32)[None, :]

    finish_product(
        acc, squares, partial_ptr, arrived_ptr, y_ptr, bias_ptr, residual_ptr, scale, norm_eps, M, N, K,
        stride_ym, stride_rm, inside_m, ACTIVATION, GATED, BLOCK_M, BLOCK_N, GROUP_M, PDL,
    )  # fmt: skip


@taking(DTYPES)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses. group 0 is one scale per row."""
    if shape.group not in (0, *GROUPS):
        return f"the group must be one of {', '.join(map(str, GROUPS))}, or K for one scale per row, got {shape.group}"
    if shape.group and shape.k % shape.group:
        return f"K must be a multiple of the group {shape.group}, got {shape.k}"
    if shape.k % 16:
        return f"K must be a multiple of 16, got {shape.k}"
    if not shape.aligned:
        return "rows of x and w must start at multiples of 16 elements, and both pointers at multiples of 16 bytes"
    return norm_refusal(shape.m) if shape.norm else None


@remembered
def plan(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, **given: Any) -> Plan:
    """Compute y: [M, N] or, gated, [M, N // 2]. Arguments as in the module's docstring; options: `split_k.Options`."""
    require_matrix("x", x, None, x.shape[-1], None)
    k, n = x.shape[1], w.shape[0]
    require_matrix("w", w, n, k, torch.int8)
    each = require_scales(scales, n, k)
    group = each if len(scales) > 1 else 0
    return plan_product(
        KERNEL,
        matmul_int8_kernel,
        x,
        w,
        given,
        bits=8,
        group=group,
        weights={"scales_ptr": scales, "stride_sg": row_stride(scales)},
        constants=lambda _, config: {"GROUPED": group > 0, **depth(k, config)},
    )


def example(shape: MatmulShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make, groups = empties(dtype, device), shape.k // shape.group if shape.group else 1
    x, w = make(shape.m, shape.k), make(shape.n, shape.k, kind="int8")
    norm = norm_example(shape.k if shape.norm else 0, x.dtype, device)
    return (x, w, make(groups, shape.n)), {"gated": shape.gated, **norm}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), groups=(0, 128, 64, 32), typical=MatmulShape(16, 4096, 4096))
