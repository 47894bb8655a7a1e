# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) with w stored in 4 bits: w[n, k] = (nibble[n, k] - zero[k // G, n]) * scale[k // G, n].

Shapes: x [M, K] 16-bit, packed w [N, K // 2] uint8 and scales [K // G, N] of any float dtype, zeros [K // G, N] uint8 or
None for 8 everywhere, all as `quantized.py` makes them; G is 32, 64 or 128 and divides K. Epilogue as in `epilogue.py`.

One step of the loop is one group. Nibbles less their zero point become exact 16-bit integers, are multiplied on the tensor cores, and
the group's scale is applied to the float32 product: scaling the weights first would round each of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import split_k
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    Plan,
    empties,
    launcher,
    require_matrix,
    row_stride,
    taking,
)
from nnfront_kernels.dependent import fetch_rows, wait_for_earlier
from nnfront_kernels.nibbles import unpack
from nnfront_kernels.quantized import GROUPS, dequantize_int4, require_scales
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import add_squares, norm_example, norm_refusal, weighted
from nnfront_kernels.split_k import finish_product, part_of_block, plan_product
from nnfront_kernels.tiles import MatmulShape, smallest

DTYPES = ("float16", "bfloat16")


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    compute: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`. Takes what `launch` takes."""
    dense = dequantize_int4(w, scales, zeros, x.shape[1] // scales.shape[0], compute)
    return split_k.reference(x, dense, compute=compute, **options)


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
# block_k is the group: it is filled in by choose, and split_k too.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_80": (
        Config(16, 128, 128, 4, 3, registers=128),
        Config(32, 128, 128, 8, 3, registers=128),
        Config(64, 128, 128, 8, 3),
    ),
    # 64 rows: with eight warps the sums of two products in a row change hands through shared memory. 32 rows: with four they fill the registers.
    "sm_90": (
        Config(16, 128, 128, 4, 4, registers=128),
        Config(32, 128, 128, 8, 4, registers=128),
        Config(64, 128, 128, 4, 3),
        Config(128, 128, 128, 8, 4),
    ),
    "sm_100": (
        Config(16, 128, 128, 4, 4, registers=128),
        Config(32, 128, 128, 8, 4, registers=128),
        Config(64, 128, 128, 8, 3),
        Config(128, 128, 128, 8, 3),
    ),
}


def shared_bytes(config: Config) -> int:
    """Every stage of x and of the packed weights, the scales beside them, and one unpacked tile for wgmma."""
    x_bits, w_bits = 16 * config.block_m, 4 * config.block_n
    pipeline = config.num_stages * (config.block_k * (x_bits + w_bits) // 8 + 4 * config.block_n)
    return pipeline + (2 * config.block_k * config.block_n if config.block_m >= 64 else 0)


def candidates(shape: MatmulShape, arch: str) -> tuple[Config, ...]:
    """What choose picks from. Zero points in groups of 128 take a few registers more, and on sm_90 with 32 rows more than eight warps have."""
    configs = KERNEL.configs[arch]
    if not shape.zero_points or shape.group < 128:
        return configs
    if ARCHS[arch].family != "sm_90":
        return tuple(replace(c, registers=max(c.registers, 176)) for c in configs)
    wider = {16: {"registers": 136}, 32: {"num_warps": 4, "registers": 224}}
    return tuple(replace(c, **wider.get(c.block_m, {})) for c in configs)


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The tile with the fewest rows that hold M, else the largest; K split by `tiles.splits`."""
    registers = 168 if ARCHS[arch].family == "sm_80" else 144
    return smallest("matmul_int4", candidates(shape, arch), shape, arch, shared_bytes, 4, registers)


@triton.jit(do_not_specialize=["M"])
def matmul_int4_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
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
    stride_zg,
    stride_ym,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles above one another that share tiles of w in L2
    GROUP: tl.constexpr,
    LOP3: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    FETCH: tl.constexpr,  # lines of each row of w that are fetched before earlier launches have ended
):
    HALF: tl.constexpr = GROUP // 2
    num_groups = K // GROUP
    offs_m, offs_n, inside_m, inside_n, first, end = part_of_block(
        M, N, num_groups, BLOCK_M, BLOCK_N, GROUP_M
    )
    offs_k = tl.arange(0, HALF)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]  # [BLOCK_M, HALF]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[None, :] + offs_k[:, None]  # [HALF, BLOCK_N]
    fetch_rows(w_ptr, offs_n, stride_wn, N, first * HALF, K // 2, FETCH)
    wait_for_earlier(PDL)
    # The scales of the next group are loaded one step early: Triton pipelines only what a dot reads.
    scales_ptrs = scales_ptr + offs_n
    at = tl.minimum(first, num_groups - 1).to(tl.int64)
    scales = tl.load(scales_ptrs + at * stride_sg, mask=inside_n, other=0.0)
    zeros = None
    if zeros_ptr is not None:
        zeros_ptrs = zeros_ptr + offs_n
        zeros = tl.load(zeros_ptrs + at * stride_zg, mask=inside_n, other=8)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = None
    if norm_eps is not None:
        squares = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
    for g in range(first, end):
        x_first = tl.load(x_ptrs + g * GROUP, mask=inside_m[:, None], other=0.0)
        x_second = tl.load(x_ptrs + g * GROUP + HALF, mask=inside_m[:, None], other=0.0)
        w = tl.load(w_ptrs + g * HALF, mask=inside_n[None, :], other=0, eviction_policy="evict_first")
        at = tl.minimum(g + 1, num_groups - 1).to(tl.int64)
        next_scales = tl.load(scales_ptrs + at * stride_sg, mask=inside_n, other=0.0)
        if norm_eps is not None:
            squares = add_squares(add_squares(squares, x_first), x_second)
        if norm_ptr is not None:
            norm_rows = norm_ptr + g * GROUP + offs_k[None, :]
            x_first = weighted(x_first, norm_rows, None, True)
            x_second = weighted(x_second, norm_rows + HALF, None, True)
        low, high = unpack(w, zeros, x_ptr.dtype.element_ty, LOP3, BLOCK_N, HALF)
        product = tl.dot(x_first, low)
        product = tl.dot(x_second, high, product)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptrs + at * stride_zg, mask=inside_n, other=8)
        acc += product * scales.to(tl.float32)[None, :]
        scales = next_scales

    finish_product(
        acc, squares, partial_ptr, arrived_ptr, y_ptr, bias_ptr, residual_ptr, scale, norm_eps, M, N, K,
        stride_ym, stride_rm, inside_m, ACTIVATION, GATED, BLOCK_M, BLOCK_N, GROUP_M, PDL,
    )  # fmt: skip


@taking(DTYPES)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    if shape.group not in GROUPS:
        return f"the group must be one of {', '.join(map(str, GROUPS))}, got {shape.group}"
    if shape.k % shape.group:
        return f"K must be a multiple of the group {shape.group}, got {shape.k}"
    if not shape.aligned:
        return "rows of x must start at multiples of 16 elements and rows of w of 16 bytes, and so must both pointers"
    return norm_refusal(shape.m) if shape.norm else None


@remembered
def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    **given: Any,
) -> Plan:
    """Compute y: [M, N] or, gated, [M, N // 2]. Arguments as in the module's docstring; options: `split_k.Options`."""
    require_matrix("x", x, None, x.shape[-1], None)
    k, n = x.shape[1], w.shape[0]
    require_matrix("w", w, n, k // 2, torch.uint8)
    group = require_scales(scales, n, k)
    if zeros is not None:
        require_matrix("zeros", zeros, k // group, n, torch.uint8)
    return plan_product(
        KERNEL,
        matmul_int4_kernel,
        x,
        w,
        given,
        bits=4,
        group=group,
        zero_points=zeros is not None,
        weights={
            "scales_ptr": scales,
            "zeros_ptr": zeros,
            "stride_sg": row_stride(scales),
            "stride_zg": 0 if zeros is None else row_stride(zeros),
        },
        constants=lambda *_: {"GROUP": group, "LOP3": not triton.knobs.runtime.interpret},
    )


def example(shape: MatmulShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make, groups = empties(dtype, device), shape.k // shape.group
    x, w = make(shape.m, shape.k), make(shape.n, shape.k // 2, kind="uint8")
    zeros = make(groups, shape.n, kind="uint8") if shape.zero_points else None
    norm = norm_example(shape.k if shape.norm else 0, x.dtype, device)
    return (x, w, make(groups, shape.n), zeros), {"gated": shape.gated, **norm}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), groups=(128, 64, 32), typical=MatmulShape(16, 4096, 4096, group=128))
