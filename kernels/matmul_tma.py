# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) on Hopper and Blackwell: a persistent grid that moves whole tiles by tensor descriptor (TMA).

Shapes and epilogue as in `matmul.py`; 16-bit operands; sums are float32. Tile addresses, masks and swizzles are the
copy engine's work: a tile that hangs over an edge is filled with zeros on the way in and cut on the way out, so K and N
may be anything. Every row must start at a multiple of 16 bytes. One block per SM walks over the output tiles, so that
the epilogue of one tile overlaps the loads of the next.

Not used: Triton's warp_specialize, which on Hopper is ignored or fails to compile in Triton 3.6 to 3.9.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import matmul
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    KernelError,
    Plan,
    launcher,
    num_sms,
    require_matrix,
    taking,
)
from nnfront_kernels.epilogue import Epilogue, finish_tile, halves
from nnfront_kernels.tiles import MatmulShape, best, cdiv
from nnfront_kernels.tiles import shared_bytes as operand_bytes
from nnfront_kernels.walk import tile_at
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = ("float16", "bfloat16")
reference, example = matmul.reference, matmul.example

# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_90": (
        Config(128, 256, 64, 8, 3),
        Config(128, 128, 64, 8, 4),
        Config(128, 128, 64, 4, 4),
        Config(64, 256, 64, 4, 4),
        Config(64, 128, 64, 4, 5),
    ),
    "sm_100": (Config(128, 256, 64, 8, 3), Config(128, 128, 64, 8, 4), Config(128, 128, 64, 4, 4)),
}


def shared_bytes(config: Config, moved: int = 2) -> int:
    """The operands, and half a tile of the `moved` bytes per element that the epilogue loads and stores."""
    return operand_bytes(config, 16, 16) + config.block_m * config.block_n // 2 * moved


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The config for a shape. Depends on M only through `tiles.bucket`."""
    return best(KERNEL.configs[arch], shape, arch, 16, 16)


def with_room(config: Config, arch: str, moved: int) -> Config:
    """The config with as many of its stages as leave room for the epilogue: a wide residual costs one."""
    while shared_bytes(config, moved) + BARRIERS > ARCHS[arch].shared_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


BARRIERS = 256  # bytes that Triton adds for the mbarriers of a pipeline, rounded up


@triton.jit(do_not_specialize=["M"])
def matmul_tma_kernel(
    x_desc,  # [M, K] in blocks of [BLOCK_M, BLOCK_K]
    w_desc,  # [N, K] in blocks of [BLOCK_N, BLOCK_K]
    y_desc,  # [M, columns] in blocks of [BLOCK_M, BLOCK_N // 2]
    residual_desc,  # like y_desc, or None
    bias_ptr,
    scale,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
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
            acc = tl.dot(x, w.T, acc)

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


@triton.jit
def store_half(half, y_desc, residual_desc, first_m, first_column):
    if residual_desc is not None:
        half += residual_desc.load([first_m, first_column]).to(tl.float32)
    y_desc.store([first_m, first_column], half.to(y_desc.dtype))


@taking(DTYPES, CONFIGS)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses. Alignment is checked by `plan`, on the tensors."""
    return matmul.accepts(shape, dtype, arch) if shape.k else "K must be at least 1, got 0"


def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **epilogue: Any,
) -> Plan:
    """Compute y. x [M, K], w [N, K] of one 16-bit dtype; returns [M, N] or, gated, [M, N // 2].

    Options as for `matmul.launch`.
    """
    epi = Epilogue(**epilogue)
    require_matrix("x", x, None, x.shape[-1], None)
    require_matrix("w", w, None, x.shape[1], x.dtype)
    (m, k), n = x.shape, w.shape[0]
    epi.check(m, n)
    shape = MatmulShape(m, n, k, gated=epi.gated)
    arch, config = KERNEL.settle(shape, x, arch, config)
    y = epi.output(out, x, n)
    moved = y.element_size() + (0 if epi.residual is None else epi.residual.element_size())
    config = with_room(config, arch, moved)
    arguments: dict[str, Any] = {}
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    if tiles:
        half = [config.block_m, config.block_n // 2]
        arguments = {
            "x_desc": descriptor("x", x, [config.block_m, config.block_k]),
            "w_desc": descriptor("w", w, [config.block_n, config.block_k]),
            "y_desc": descriptor("out", y, half),
            "residual_desc": None if epi.residual is None else descriptor("residual", epi.residual, half),
            "bias_ptr": epi.bias,
            "scale": epi.scale,
            "M": m,
            "N": n,
            "K": k,
        }
    return Plan(
        kernel=matmul_tma_kernel,
        grid=(min(tiles, num_sms(x, arch)),),
        arguments=arguments,
        constants={
            **config.blocks("mnk"),
            "GROUP_M": 8,
            **epi.constants(),
        },
        config=config,
        output=y,
    )


def descriptor(name: str, tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """A host tensor descriptor; KernelError if TMA cannot address the tensor."""
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or (tensor.stride(0) * size % 16 and tensor.shape[0] > 1):
        raise KernelError(
            f"TMA: every row of {name} must start at a multiple of 16 bytes, got address "
            f"{tensor.data_ptr() % 16} mod 16 and rows {tensor.stride(0) * size} bytes apart"
        )
    # The stride of a single row is never used, and torch lets it be anything.
    stride = tensor.stride(0) if tensor.shape[0] > 1 else cdiv(tensor.shape[1] * size, 16) * 16 // size
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], block)


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=MatmulShape(4096, 4096, 4096))
