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
from nnfront_kernels import matmul_fp8
from nnfront_kernels.common import Config, Kernel, Plan, launcher, require_matrix, taking
from nnfront_kernels.epilogue import Epilogue
from nnfront_kernels.matmul_tma import plan_persistent
from nnfront_kernels.tiles import MatmulShape, best
from nnfront_kernels.tiles import shared_bytes as operand_bytes

DTYPES, reference, example = matmul_fp8.DTYPES, matmul_fp8.reference, matmul_fp8.example

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
    return best(KERNEL.configs[arch], shape, arch, 8, 8)


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
    return plan_persistent(
        shape,
        config,
        epi,
        x,
        w,
        out,
        arch=arch,
        shared=shared_bytes,
        scales=matmul_fp8.scales_of_rows(x_scales, w_scales),
        promote=matmul_fp8.BLOCK if arch == "sm_90" else 0,
    )


launch = launcher(plan)
KERNEL = Kernel.of(globals(), op="matmul_fp8", typical=MatmulShape(4096, 4096, 4096))
