# SPDX-License-Identifier: Apache-2.0
"""y = epilogue(x @ w.T) with x and w stored in 8-bit floating point (e4m3fn) and float32 scales.

Shapes: x [M, K], w [N, K], both float8_e4m3fn; K a multiple of 16; x_scales [M, 1] or [1, 1], w_scales [N, 1] or [1, 1]: one for a row or for all,
applied to the sums.
`quantized.quantize_fp8` makes them, for activations on the GPU `quantize_fp8.py`. Epilogue as in `epilogue.py`; the
output is bfloat16 unless out_dtype says otherwise.

sm_90 and sm_100 multiply fp8 natively. Hopper's tensor cores keep about 14 bits of a sum of fp8 products (DeepSeek-V3,
arXiv 2412.19437, section 3.5.2), so there the sum of each 128 of K is added to a float32 one on the ordinary cores. sm_80 has no fp8: there
the codes are decoded to float16 by integer arithmetic, exactly, and multiplied as float16.
"""

from __future__ import annotations

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
    empties,
    launcher,
    require_matrix,
    taking,
)
from nnfront_kernels.dependent import fetch_rows, wait_for_earlier
from nnfront_kernels.epilogue import Epilogue
from nnfront_kernels.quantized import dequantize_fp8
from nnfront_kernels.remembered import remembered
from nnfront_kernels.split_k import depth, finish_product, part_of_block, plan_product
from nnfront_kernels.tiles import MatmulShape, smallest
from nnfront_kernels.tiles import shared_bytes as operand_bytes

DTYPES = ("float8_e4m3fn",)
SUMMED = 128  # how much of K is summed in a tensor core
NATIVE = tuple(name for name, arch in ARCHS.items() if arch.target >= 89)


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
    **epilogue: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`. Takes what `launch` takes."""
    dense_x, dense_w = (
        dequantize_fp8(q, scales, max(len(q), 1) if len(scales) == 1 else 1, q.shape[1], compute)
        for q, scales in ((x, x_scales), (w, w_scales))
    )
    return Epilogue(**epilogue).reference(dense_x @ dense_w.T, torch.bfloat16)


# Chosen by arithmetic and by what the compiler makes of them (registers, spills, instructions); not yet measured.
# split_k is added by choose.
CONFIGS: dict[str, tuple[Config, ...]] = {
    # block_m, block_n, block_k, num_warps, num_stages
    "sm_80": (
        Config(16, 64, 128, 4, 4, registers=96),
        Config(32, 64, 128, 4, 3, registers=168),
        Config(64, 64, 128, 4, 3),
        Config(128, 64, 128, 8, 3),
    ),
    "sm_90": (
        Config(16, 64, 128, 4, 4, registers=96),
        Config(32, 64, 128, 4, 4, registers=128),
        Config(64, 128, 128, 4, 4),
        Config(128, 128, 128, 8, 4),
    ),
    "sm_100": (
        Config(16, 128, 128, 4, 4, registers=112),
        Config(32, 64, 128, 4, 4, registers=128),
        Config(64, 128, 128, 4, 4),
        Config(128, 128, 128, 8, 4),
    ),
}


def shared_bytes(config: Config) -> int:
    """Every stage of the codes; they are decoded in registers."""
    return operand_bytes(config, 8, 8)


def choose(shape: MatmulShape, dtype: str, arch: str) -> Config:
    """The tile with the fewest rows that hold M, else the largest; K split by `tiles.splits`."""
    return smallest("matmul_fp8", KERNEL.configs[arch], shape, arch, shared_bytes, 8)


@triton.jit
def decode(codes):
    """e4m3fn codes in uint8 to the float16 that equals them, NaN to NaN.

    The exponent and the mantissa, moved to where float16 has them, stand for the value divided by 2 ** (15 - 7), for
    subnormal codes too.
    """
    bits = codes.to(tl.uint16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit(do_not_specialize=["M", "stride_xsm"])
def matmul_fp8_kernel(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    arrived_ptr,
    scale,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_xsm,  # 0 where one scale serves all rows
    stride_wsn,
    stride_ym,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles above one another that share tiles of w in L2
    BLOCK_K: tl.constexpr,
    DECODE: tl.constexpr,
    PROMOTE: tl.constexpr,  # how many products a tensor core may sum before float32 takes over; 0 is any
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    FETCH: tl.constexpr,  # lines of each row of w that are fetched before earlier launches have ended
):
    steps = tl.cdiv(K, BLOCK_K)
    offs_m, offs_n, inside_m, inside_n, first, end = part_of_block(M, N, steps, BLOCK_M, BLOCK_N, GROUP_M)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_wn)[:, None] + offs_k[None, :]  # [BLOCK_N, BLOCK_K]
    x_scales_ptrs = x_scales_ptr + offs_m.to(tl.int64) * stride_xsm
    fetch_rows(w_ptr, offs_n, stride_wn, N, first * BLOCK_K, K, FETCH)
    wait_for_earlier(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, end):
        in_x, in_w = inside_m[:, None], inside_n[:, None]
        if not EVEN_K:
            inside_k = (offs_k < K - step * BLOCK_K)[None, :]
            in_x, in_w = in_x & inside_k, in_w & inside_k
        x = tl.load(x_ptrs + step * BLOCK_K, mask=in_x, other=0.0)
        w = tl.load(w_ptrs + step * BLOCK_K, mask=in_w, other=0.0)
        if DECODE:
            x = decode(x)
            w = decode(w)
        if PROMOTE:
            acc = tl.dot(x, w.T, acc, max_num_imprecise_acc=PROMOTE)
        else:
            acc = tl.dot(x, w.T, acc)
    w_scales = tl.load(w_scales_ptr + offs_n.to(tl.int64) * stride_wsn, mask=inside_n, other=0.0)
    acc = acc * tl.load(x_scales_ptrs, mask=inside_m, other=0.0)[:, None] * w_scales[None, :]

    finish_product(
        acc, None, partial_ptr, arrived_ptr, y_ptr, bias_ptr, residual_ptr, scale, None, M, N, K,
        stride_ym, stride_rm, inside_m, ACTIVATION, GATED, BLOCK_M, BLOCK_N, GROUP_M, PDL,
    )  # fmt: skip


@taking(DTYPES)
def accepts(shape: MatmulShape, dtype: str, arch: str) -> str | None:
    """None, or why this kernel refuses."""
    if shape.group:
        return f"scales are for rows, got groups of {shape.group}"
    if shape.k == 0 or shape.k % 16:
        return f"K must be a multiple of 16 and at least 16, got {shape.k}"
    if not shape.aligned:
        return "rows of x and w must start at multiples of 16 bytes, and so must both pointers"
    if shape.norm:
        return "it does not normalise rows"
    return None


@remembered
def plan(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    **given: Any,
) -> Plan:
    """Compute y: [M, N] or, gated, [M, N // 2]. Arguments as in the module's docstring; options: `split_k.Options`."""
    require_matrix("x", x, None, x.shape[-1], None)
    (m, k), n = x.shape, w.shape[0]
    require_matrix("w", w, n, k, x.dtype)
    require_scales("x_scales", x_scales, m)
    require_scales("w_scales", w_scales, n)

    def constants(arch: str, config: Config) -> dict[str, Any]:
        promote = SUMMED if arch == "sm_90" else 0
        return {"DECODE": arch not in NATIVE, "PROMOTE": promote, **depth(k, config)}

    made = plan_product(
        KERNEL,
        matmul_fp8_kernel,
        x,
        w,
        {**given, "out_dtype": given.get("out_dtype") or torch.bfloat16},
        bits=8,
        weights={
            "x_scales_ptr": x_scales,
            "w_scales_ptr": w_scales,
            # 0 where there is one for all rows.
            "stride_xsm": x_scales.stride(0) if x_scales.shape[0] > 1 else 0,
            "stride_wsn": w_scales.stride(0) if w_scales.shape[0] > 1 else 0,
        },
        constants=constants,
    )
    if made.constants["DECODE"]:
        made.arguments.update(x_ptr=x.view(torch.uint8), w_ptr=w.view(torch.uint8))
    return made


def require_scales(name: str, scales: torch.Tensor, rows: int) -> None:
    """Raise KernelError unless there is a float32 scale for each row, or for all."""
    if tuple(scales.shape) not in [(rows, 1), (1, 1)]:
        raise KernelError(f"{name} must have shape {[rows, 1]} or [1, 1], got {list(scales.shape)}")
    if scales.dtype != torch.float32:
        raise KernelError(f"{name} must be torch.float32, got {scales.dtype}")


def example(shape: MatmulShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    scales = (make(rows, 1, kind="float32") for rows in (shape.m, shape.n))
    return (make(shape.m, shape.k), make(shape.n, shape.k), *scales), {"gated": shape.gated}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=MatmulShape(4096, 4096, 4096))
