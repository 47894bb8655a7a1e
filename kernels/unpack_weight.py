# SPDX-License-Identifier: Apache-2.0
"""The weight that elements in 4 or 8 bits stand for, in 16 bits: for products of so many rows that unpacking it once costs less than with each tile.

    y[n, k] = (q[n, k] - zero[k // G, n]) * scale[k // G, n]

Shapes: packed w [N, K // 2] uint8 with G 32, 64 or 128 and zeros [K // G, N] uint8 or None for 8 everywhere, as `matmul_int4` takes them; or w [N, K]
int8, with zero 0 and any G that divides K, or [1, N] scales, as `matmul_int8` does; y [N, K]. In float32, rounded once.

A word of four packed bytes holds four neighbours in its low nibbles and the four that lie half a group further in its high ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import (
    Config,
    Kernel,
    KernelError,
    Plan,
    empties,
    launcher,
    require_matrix,
    row_stride,
    taking,
)
from nnfront_kernels.quantized import GROUPS, dequantize_int4, dequantize_int8, require_scales
from nnfront_kernels.remembered import remembered
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class UnpackShape:
    """`n` rows of `k` elements in groups, 0 for one a row; `bits` 4 or 8."""

    n: int
    k: int
    group: int = 128
    bits: int = 4
    zero_points: bool = False


def reference(
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, rounded to `dtype`."""
    if w.dtype == torch.int8:
        return dequantize_int8(w, scales, compute).to(dtype)
    return dequantize_int4(w, scales, zeros, 2 * w.shape[1] // len(scales), compute).to(dtype)


# Rows x elements of K of a block: 16 bytes or 32 for each thread to read. By arithmetic; not yet measured.
CONFIGS = (Config(16, 256, 1, 4, 1),)


@triton.jit
def unpack_weight_kernel(
    w_ptr,  # int32, of eight nibbles each, or int8
    scales_ptr,
    zeros_ptr,
    y_ptr,
    N,
    K,
    stride_wn,
    stride_sg,  # 0 where a row has one scale
    stride_zg,
    stride_yn,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,  # groups of a block
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = (row < N)[:, None] & (group * GROUP < K)[None, :]
    at = group.to(tl.int64)[None, :]
    scales = tl.load(scales_ptr + at * stride_sg + row[:, None], mask=inside, other=0.0).to(tl.float32)
    w_rows = (w_ptr + row.to(tl.int64) * stride_wn)[:, None, None]
    y_rows = (y_ptr + row.to(tl.int64) * stride_yn)[:, None, None]
    first = (group * GROUP)[None, :, None]
    if PACKED:
        WORDS: tl.constexpr = GROUP // 8
        lane = tl.arange(0, WORDS)[None, None, :]
        w = tl.load(w_rows + first // 8 + lane, mask=inside[:, :, None], other=0)
        zero = tl.full((BLOCK_N, BLOCK_G), 8, dtype=tl.int32)
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + at * stride_zg + row[:, None], mask=inside, other=0).to(tl.int32)
        for high in tl.static_range(2):
            quads = neighbours(w >> 4 * high, BLOCK_N, BLOCK_G, WORDS)
            y = (quads - zero[:, :, None]).to(tl.float32) * scales[:, :, None]
            to = y_rows + first + high * GROUP // 2 + tl.arange(0, GROUP // 2)[None, None, :]
            tl.store(to, y.to(y_ptr.dtype.element_ty), mask=inside[:, :, None])
    else:
        k = first + tl.arange(0, GROUP)[None, None, :]
        held = inside[:, :, None] & (k < K)
        y = tl.load(w_rows + k, mask=held, other=0).to(tl.float32) * scales[:, :, None]
        tl.store(y_rows + k, y.to(y_ptr.dtype.element_ty), mask=held)


@triton.jit
def neighbours(w, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, WORDS: tl.constexpr):
    """The low nibbles of words in order: of four bytes the second and the third have changed places."""
    even, odd = tl.join(w & 15, (w >> 8) & 15), tl.join((w >> 16) & 15, (w >> 24) & 15)
    return tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_G, 4 * WORDS))


@taking(DTYPES)
def accepts(shape: UnpackShape, dtype: str, arch: str) -> str | None:
    if shape.bits == 4 and shape.group not in GROUPS:
        return f"the group must be one of {', '.join(map(str, GROUPS))}, got {shape.group}"
    if shape.bits == 8 and shape.group not in (0, *GROUPS):
        return f"the group must be one of {', '.join(map(str, GROUPS))}, or K for one scale per row, got {shape.group}"
    if shape.k % 16:
        return f"K must be a multiple of 16, got {shape.k}"
    return None


@remembered
def plan(
    w: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Unpack: y [N, K]. Options: dtype, float16 or bfloat16; out, to write to."""
    packed = w.dtype == torch.uint8
    require_matrix("w", w, None, w.shape[-1], torch.uint8 if packed else torch.int8)
    n, k = w.shape[0], w.shape[1] * (2 if packed else 1)
    each, groups = require_scales(scales, n, k), len(scales)
    if zeros is not None:
        if not packed:
            raise KernelError("zeros are for packed weights, and w is int8")
        require_matrix("zeros", zeros, groups, n, torch.uint8)
    if packed and (w.data_ptr() % 4 or (n > 1 and w.stride(0) % 4)):
        raise KernelError(
            f"w must have rows that start at multiples of 4 bytes, got {w.stride(0)} bytes apart"
        )
    whole = groups == 1 and not packed
    shape = UnpackShape(n, k, 0 if whole else each, 4 if packed else 8, zeros is not None)
    out = torch.empty(n, k, dtype=dtype, device=w.device) if out is None else out
    require_matrix("out", out, n, k, dtype)
    arch, config = KERNEL.settle(shape, out, arch, config)
    group, words = shape.group or GROUPS[-1], w.view(torch.int32) if packed else w
    return Plan(
        kernel=unpack_weight_kernel,
        grid=(cdiv(n, config.block_m), cdiv(k, config.block_n)),
        arguments={
            "w_ptr": words,
            "scales_ptr": scales,
            "zeros_ptr": zeros,
            "y_ptr": out,
            "N": n,
            "K": k,
            "stride_wn": row_stride(words),
            "stride_sg": 0 if whole else row_stride(scales),
            "stride_zg": 0 if zeros is None else row_stride(zeros),
            "stride_yn": row_stride(out),
        },
        constants={
            "GROUP": group,
            "PACKED": packed,
            "BLOCK_N": config.block_m,
            "BLOCK_G": config.block_n // group,
        },
        config=config,
        output=out,
    )


def example(shape: UnpackShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make, groups = empties(dtype, device), shape.k // shape.group if shape.group else 1
    packed = shape.bits == 4
    w = make(shape.n, shape.k // 2 if packed else shape.k, kind="uint8" if packed else "int8")
    zeros = make(groups, shape.n, kind="uint8") if shape.zero_points else None
    return (w, make(groups, shape.n), zeros), {"dtype": getattr(torch, dtype)}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.block_m * config.block_n,
    groups=(128, 64, 32),
    typical=UnpackShape(28672, 4096),
)
