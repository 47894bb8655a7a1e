# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T): dense matmul with 16-bit or float32 operands, on every GPU.

Shapes: x [M, K], w [N, K] (as a linear layer stores it), y [M, N], or [M, N // 2] if gated; see `epilogue.py`.
Rows may be strided, elements within a row are adjacent. Sums are float32. float32 operands are multiplied in float32,
not in TF32. A tile of w is read once for each tile row of x, so M of a few rows belongs to `matmul_small_m.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, Plan, is_divisible, launcher, require_matrix, taking
from nnfront_kernels.epilogue import Epilogue, write_tile
from nnfront_kernels.remembered import remembered
from nnfront_kernels.tiles import MatmulShape, best, cdiv, shared_bytes
from nnfront_kernels.walk import tile_at

DTYPES = ("float16", "bfloat16", "float32")


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    **epilogue: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`. Takes what `launch` takes."""
    product = x.to(compute) @ w.to(compute).T
    y = Epilogue(**epilogue).reference(product, x.dtype)
    return y if out is None else out.copy_(y)


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_80": (
        Config(128, 256, 32, 8, 4),
        Config(128, 128, 64, 8, 3),
        Config(128, 64, 64, 4, 3),
        Config(64, 128, 32, 4, 4),
        Config(64, 64, 64, 4, 4),
        Config(32, 64, 32, 4, 4),
    ),
    "sm_90": (
        Config(128, 256, 64, 8, 4),
        Config(128, 128, 64, 8, 4),
        Config(128, 128, 64, 4, 3),
        Config(64, 256, 64, 8, 4),
        Config(64, 128, 64, 4, 4),
        Config(64, 64, 64, 4, 5),
        Config(32, 64, 32, 4, 4),
    ),
    "sm_100": (
        Config(128, 256, 64, 8, 4),
        Config(128, 128, 64, 8, 4),
        Config(64, 128, 64, 4, 4),
        Config(32, 64, 32, 4, 4),
    ),
}
# Where a row does not start at a multiple of 16 elements, loads are two bytes wide and addresses take the registers.
UNALIGNED = Config(64, 64, 32, 4, 2)
FLOAT32 = Config(64, 64, 16, 8, 2)


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The config for a shape. Depends on M only through `tiles.bucket`."""
    if dtype == "float32":
        return FLOAT32
    if not shape.aligned:
        return UNALIGNED
    return best(KERNEL.configs[arch], shape, arch, 16, 16)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    scale,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    pid_m, pid_n = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[:, None] + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
    inside_m = (offs_m < M)[:, None]
    inside_n = (offs_n < N)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        in_x, in_w = inside_m, inside_n
        if not EVEN_K:
            inside_k = (offs_k < K - k)[None, :]
            in_x, in_w = in_x & inside_k, in_w & inside_k
        x = tl.load(x_ptrs, mask=in_x, other=0.0)
        w = tl.load(w_ptrs, mask=in_w, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    write_tile(
        acc, y_ptr, bias_ptr, residual_ptr, scale, pid_m * BLOCK_M, pid_n * BLOCK_N,
        M, N, stride_ym, stride_rm, ACTIVATION, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@taking(DTYPES)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    if shape.group:
        return f"weights are dense, got quantisation groups of {shape.group}"
    if shape.norm:
        return "it does not normalise rows"
    return None


@remembered
def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **epilogue: Any,
) -> Plan:
    """Compute y. x [M, K], w [N, K] of one dtype; returns [M, N] or, gated, [M, N // 2].

    Options: bias [N], activation none|silu|gelu|gelu_tanh, gated, residual like y in shape, scale, out_dtype, out.
    """
    epi = Epilogue(**epilogue)
    require_matrix("x", x, None, x.shape[-1], None)
    require_matrix("w", w, None, x.shape[1], x.dtype)
    (m, k), n = x.shape, w.shape[0]
    epi.check(m, n)
    loads = {"x_ptr": x, "w_ptr": w, "K": k, "stride_xm": x.stride(0), "stride_wn": w.stride(0)}
    aligned = all(map(is_divisible, loads.values()))
    shape = MatmulShape(m, n, k, gated=epi.gated, aligned=aligned)
    arch, config = KERNEL.settle(shape, x, arch, config)
    y = epi.output(out, x, n)
    return Plan(
        kernel=matmul_kernel,
        grid=(cdiv(m, config.block_m) * cdiv(n, config.block_n),),
        arguments={
            **loads,
            **epi.arguments(y),
            "M": m,
            "N": n,
        },
        constants={
            **config.blocks("mnk"),
            "GROUP_M": 8,
            "EVEN_K": k % config.block_k == 0,
            **epi.constants(),
        },
        config=config,
        output=y,
        divisible=tuple(loads) if aligned and config not in (UNALIGNED, FLOAT32) else (),
    )


def example(shape: MatmulShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    kind = getattr(torch, dtype)
    x = torch.empty(shape.m, shape.k, dtype=kind, device=device)
    return (x, torch.empty(shape.n, shape.k, dtype=kind, device=device)), {"gated": shape.gated}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=partial(shared_bytes, x_bits=16, w_bits=16),
    fallbacks=(UNALIGNED, FLOAT32),
    typical=MatmulShape(4096, 4096, 4096),
)
