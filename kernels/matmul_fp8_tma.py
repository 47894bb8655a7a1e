# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) in 8-bit floating point on Hopper and Blackwell: a persistent grid that moves whole tiles by tensor descriptor (TMA).

Operands and scales as in `matmul_fp8.py`, scales outside of the sums only (one for a row or for all); grid, tiles and
epilogue as in `matmul_tma.py`. Every row of every matrix must start at a multiple of 16 bytes; K may be anything.

Hopper's tensor cores keep about 14 bits of a sum of fp8 products, so there the sum of each 128 of K is added to a
float32 one on the ordinary cores, which costs as many registers again: tiles are at most 128 x 128.

Products of compiled programs go to `matmul_fp8.py` until a measurement says from how many rows on this is the faster one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import matmul_fp8
from nnfront_kernels.common import ARCHS, Config, Kernel, Plan, launcher, require_matrix, taking
from nnfront_kernels.epilogue import Epilogue, finish_tile, halves
from nnfront_kernels.matmul_tma import descriptor, store_half, with_room
from nnfront_kernels.tiles import MatmulShape, best, cdiv
from nnfront_kernels.tiles import shared_bytes as operand_bytes
from nnfront_kernels.walk import tile_at

DTYPES = matmul_fp8.DTYPES
reference = matmul_fp8.reference

# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_90": (
        Config(128, 128, 128, 8, 4),
        Config(128, 64, 128, 8, 5),
        Config(64, 128, 128, 4, 5),
    ),
    "sm_100": (Config(128, 128, 128, 4, 4), Config(128, 64, 128, 4, 5)),
}


def shared_bytes(config: Config, moved: int = 2) -> int:
    """The operands, half a tile of the `moved` bytes per element that the epilogue loads and stores, and the scales."""
    half = config.block_m * config.block_n // 2
    return operand_bytes(config, 8, 8) + half * moved + 4 * (config.block_m + config.block_n)


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The config for a shape. Depends on M only through `tiles.bucket`."""
    return best(CONFIGS[arch], shape, arch, 8, 8)


@triton.jit(do_not_specialize=["M", "stride_xsm"])
def matmul_fp8_tma_kernel(
    x_desc,  # [M, K] in blocks of [BLOCK_M, BLOCK_K]
    w_desc,  # [N, K] in blocks of [BLOCK_N, BLOCK_K]
    y_desc,  # [M, columns] in blocks of [BLOCK_M, BLOCK_N // 2]
    residual_desc,  # like y_desc, or None
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    scale,
    M,
    N,
    K,
    stride_xsm,  # 0 where one scale serves all rows
    stride_wsn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROMOTE: tl.constexpr,  # how many products a tensor core may sum before float32 takes over; 0 is any
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_at(tile, num_m, num_n, GROUP_M)
        first_m = pid_m * BLOCK_M
        first_n = pid_n * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([first_m, k])
            w = w_desc.load([first_n, k])
            if PROMOTE:
                acc = tl.dot(x, w.T, acc, max_num_imprecise_acc=PROMOTE)
            else:
                acc = tl.dot(x, w.T, acc)

        offs_m = first_m + tl.arange(0, BLOCK_M)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        x_scales = tl.load(x_scales_ptr + offs_m.to(tl.int64) * stride_xsm, mask=offs_m < M, other=0.0)
        w_scales = tl.load(w_scales_ptr + offs_n.to(tl.int64) * stride_wsn, mask=offs_n < N, other=0.0)
        acc = acc * x_scales[:, None] * w_scales[None, :]

        # Half a tile at a time is stored, which leaves shared memory for another stage of operands.
        if GATED:
            half = finish_tile(acc, bias_ptr, scale, first_n, N, ACTIVATION, True, BLOCK_M, BLOCK_N)
            store_half(half, y_desc, residual_desc, first_m, pid_n * HALF)
        else:
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            left = finish_tile(left, bias_ptr, scale, first_n, N, ACTIVATION, False, BLOCK_M, HALF)
            store_half(left, y_desc, residual_desc, first_m, first_n)
            right = finish_tile(right, bias_ptr, scale, first_n + HALF, N, ACTIVATION, False, BLOCK_M, HALF)
            store_half(right, y_desc, residual_desc, first_m, first_n + HALF)


@taking(DTYPES, CONFIGS)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses. Alignment is checked by `plan`, on the tensors."""
    if shape.group:
        return f"scales are for rows, got groups of {shape.group}"
    if shape.k == 0:
        return "K must be at least 1, got 0"
    if shape.norm:
        return "it does not normalise rows"
    return None


def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    out_dtype: torch.dtype | None = None,
    **epilogue: Any,
) -> Plan:
    """Compute y: [M, N] or, gated, [M, N // 2]. Arguments and options as for `matmul_fp8.launch`, without a workspace."""
    epi = Epilogue(**epilogue, out_dtype=out_dtype or torch.bfloat16)
    require_matrix("x", x, None, x.shape[-1], None)
    require_matrix("w", w, None, x.shape[1], x.dtype)
    (m, k), n = x.shape, w.shape[0]
    epi.check(m, n)
    blocks = matmul_fp8.in_blocks(x_scales, w_scales, n)
    shape = MatmulShape(m, n, k, gated=epi.gated, group=matmul_fp8.BLOCK if blocks else 0)
    arch, config = KERNEL.settle(shape, x, arch, config)
    matmul_fp8.require_scales(x_scales, w_scales, m, n, k, blocks=False)
    y = epi.output(out, x, n)
    moved = y.element_size() + (0 if epi.residual is None else epi.residual.element_size())
    config = with_room(config, arch, lambda c: shared_bytes(c, moved))
    arguments: dict[str, Any] = {}
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    if tiles:
        half = [config.block_m, config.block_n // 2]
        arguments = {
            "x_desc": descriptor("x", x, [config.block_m, config.block_k]),
            "w_desc": descriptor("w", w, [config.block_n, config.block_k]),
            "y_desc": descriptor("out", y, half),
            "residual_desc": None if epi.residual is None else descriptor("residual", epi.residual, half),
            "x_scales_ptr": x_scales,
            "w_scales_ptr": w_scales,
            "bias_ptr": epi.bias,
            "scale": epi.scale,
            "M": m,
            "N": n,
            "K": k,
            "stride_xsm": x_scales.stride(0) if x_scales.shape[0] > 1 else 0,
            "stride_wsn": w_scales.stride(0) if w_scales.shape[0] > 1 else 0,
        }
    return Plan(
        kernel=matmul_fp8_tma_kernel,
        grid=(min(tiles, ARCHS[arch].num_sms),),
        arguments=arguments,
        constants={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": 8,
            "PROMOTE": matmul_fp8.BLOCK if arch == "sm_90" else 0,
            **epi.constants(),
        },
        config=config,
        output=y,
    )


launch = launcher(plan)


KERNEL = Kernel.of(
    globals(),
    op="matmul_fp8",
    cost=matmul_fp8.cost,
    example=matmul_fp8.example,
    typical=MatmulShape(4096, 4096, 4096),
)
