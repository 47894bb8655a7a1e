# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) for up to 64 rows of x, where the time goes into reading w once.

Shapes and epilogue as in `matmul.py`; 16-bit operands; sums are float32. A single row is multiplied on the ordinary
cores; 2 to 64 rows are padded to 16, 32 or 64 for the tensor cores. The K axis is split so that all SMs read at the same
time, and the parts are added in a fixed order (`split_k.py`): results are repeatable bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import matmul, split_k
from nnfront_kernels.common import ARCHS, Config, Kernel, Plan, launcher, require_matrix, taking
from nnfront_kernels.dependent import fetch_rows, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import add_squares, norm_example, norm_refusal, weighted
from nnfront_kernels.split_k import depth, finish_product, part_of_block, plan_product
from nnfront_kernels.tiles import MatmulShape, shared_bytes, smallest

DTYPES = ("float16", "bfloat16")
MOST_ROWS = 64
reference = split_k.reference


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
# One row: each warp has whole rows of w, so that x needs no shared memory. 64 rows: two blocks or more of this size are on an SM at once.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages; split_k is added by choose
    "sm_80": (
        Config(1, 8, 1024, 4, 2, registers=128),
        Config(16, 64, 128, 4, 3, registers=80),
        Config(32, 64, 128, 4, 4, registers=96),
        Config(64, 64, 64, 4, 4, registers=128),
    ),
    "sm_90": (
        Config(1, 8, 1024, 4, 2, registers=96),
        Config(16, 64, 128, 4, 4, registers=80),
        Config(32, 64, 128, 4, 4, registers=96),
        Config(64, 64, 64, 4, 5, registers=80),
    ),
    "sm_100": (
        Config(1, 4, 1024, 4, 2, registers=80),
        Config(16, 64, 128, 4, 4, registers=80),
        Config(32, 64, 128, 4, 4, registers=96),
        Config(64, 64, 64, 4, 5, registers=88),
    ),
}
UNALIGNED = Config(16, 32, 64, 4, 2)  # two-byte loads; a single row is padded too


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The tile with the fewest rows that hold M, and K split by `tiles.splits`."""
    candidates = KERNEL.configs[arch] if shape.aligned else (UNALIGNED,)
    registers = 152 if ARCHS[arch].family == "sm_80" and shape.m > 1 else 128
    return smallest("matmul_small_m", candidates, shape, arch, operand_bytes, 16, registers)


def operand_bytes(config: Config) -> int:
    """Every stage of x and w; where single warps multiply, what they multiply is in registers, and there is a stage less."""
    kept = config.num_stages - (config.block_m < 64)
    return shared_bytes(replace(config, num_stages=kept), x_bits=16, w_bits=16)


@triton.jit(do_not_specialize=["M"])
def matmul_small_m_kernel(
    x_ptr,
    w_ptr,
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
    stride_ym,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles above one another that share tiles of w in L2
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    FETCH: tl.constexpr,  # lines of each row of w that are fetched before earlier launches have ended
):
    steps = tl.cdiv(K, BLOCK_K)
    offs_m, offs_n, inside_m, inside_n, first, end = part_of_block(M, N, steps, BLOCK_M, BLOCK_N, GROUP_M)
    first_k, end_k = first * BLOCK_K, tl.minimum(end * BLOCK_K, K)
    offs_k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None]
    w_rows = w_ptr + (offs_n.to(tl.int64) * stride_wn)[:, None]
    fetch_rows(w_ptr, offs_n, stride_wn, N, 2 * first_k, 2 * K, FETCH)
    wait_for_earlier(PDL)
    if BLOCK_M == 1:
        products = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = None
    if norm_eps is not None:
        squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for k in range(first_k, end_k, BLOCK_K):
        at = (k + offs_k)[None, :]
        in_x, in_w = inside_m[:, None], inside_n[:, None]
        if not EVEN_K:
            in_x, in_w = in_x & (at < K), in_w & (at < K)
        x = tl.load(x_rows + at, mask=in_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_rows + at, mask=in_w, other=0.0, eviction_policy="evict_first")  # [BLOCK_N, BLOCK_K]
        if norm_eps is not None:
            squares = add_squares(squares, x)
        if norm_ptr is not None:
            x = weighted(x, norm_ptr + at, None if EVEN_K else at < K, BLOCK_M > 1)
        if BLOCK_M == 1:
            products += w.to(tl.float32) * x.to(tl.float32)
        else:
            acc = tl.dot(x, w.T, acc)
    if BLOCK_M == 1:
        acc = tl.sum(products, axis=1)[None, :]

    finish_product(
        acc, squares, partial_ptr, arrived_ptr, y_ptr, bias_ptr, residual_ptr, scale, norm_eps, M, N, K,
        stride_ym, stride_rm, inside_m, ACTIVATION, GATED, BLOCK_M, BLOCK_N, GROUP_M, PDL,
    )  # fmt: skip


@taking(DTYPES)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    if shape.group:
        return f"weights are dense, got quantisation groups of {shape.group}"
    if shape.m > MOST_ROWS:
        return f"M must be at most {MOST_ROWS}, got {shape.m}"
    return norm_refusal(shape.m) if shape.norm else None


@remembered
def plan(x: torch.Tensor, w: torch.Tensor, **given: Any) -> Plan:
    """Compute y. x [M, K] with M <= 64, w [N, K] of one 16-bit dtype; returns [M, N] or, gated, [M, N // 2].

    Options: `split_k.Options`.
    """
    require_matrix("x", x, None, x.shape[-1], None)
    require_matrix("w", w, None, x.shape[1], x.dtype)
    return plan_product(
        KERNEL,
        matmul_small_m_kernel,
        x,
        w,
        given,
        bits=16,
        weights={},
        constants=lambda _, config: depth(x.shape[1], config),
    )


def example(shape: MatmulShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors, options = matmul.example(shape, dtype, device)
    return tensors, options | norm_example(shape.k if shape.norm else 0, tensors[0].dtype, device)


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    fallbacks=(UNALIGNED,),
    shared_bytes=operand_bytes,
    typical=MatmulShape(16, 4096, 4096),
)
