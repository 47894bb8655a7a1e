# SPDX-License-Identifier: Apache-2.0
"""Round activations to 8-bit floating point (e4m3fn) with a float32 scale per row or per 128 of a row.

    largest[r, g] = max(|x[r, k]| for k in group g, 2^-100)        one group: the row, or 128 neighbours
    scales[r, g]  = largest / 448
    q[r, k]       = nearest e4m3fn to clamp(x[r, k] * (448 / largest), -448, 448), ties to even; NaN stays NaN

Shapes: x [M, K] 16-bit or float32, rows may be strided; q [M, K] float8_e4m3fn; scales [M, 1] or [M, ceil(K / 128)].
A group that holds an infinity has no meaning: its infinity becomes NaN.
With `norm_eps` rows are divided by their root mean square and multiplied by `norm_weight` [K] first, in float32; they have one scale each.

The rounding is integer arithmetic: sm_80 cannot convert to e4m3fn, and Triton's interpreter rounds some values
wrongly. Without a norm the result equals `quantized.quantize_fp8` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, Plan, launcher, require_matrix, taking
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.quantized import FP8, FP8_MAX, FP8_SMALLEST
from nnfront_kernels.quantized import quantize_fp8 as quantize
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import add_squares, norm_example, normalised, require_norm, weighted
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")
GROUP = 128


@dataclass(frozen=True)
class QuantizeShape:
    """m rows of k values; group 128, or 0 for one scale per row."""

    m: int
    k: int
    group: int = 0
    norm: bool = False


def reference(
    x: torch.Tensor,
    *,
    group: int = 0,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: (q, scales)."""
    rows = x if norm_eps is None else normalised(x.float(), norm_eps, norm_weight)
    return quantize(rows, 1, group or max(x.shape[1], 1))


# One block per row, or 16 rows of one group. By arithmetic: enough loads in flight; not yet measured.
ROWS = Config(1, 1, 2048, 4, 1)
GROUPS = Config(16, 1, GROUP, 4, 1)
CONFIGS = (ROWS, GROUPS)


def choose(shape: QuantizeShape, dtype: str, arch: str) -> Config:
    """The one config for each form of scales."""
    return GROUPS if shape.group else ROWS


@triton.jit
def encode(z):
    """float32 to e4m3fn codes in uint8, to nearest with ties to even. |z| must be at most 448, or z NaN."""
    bits = z.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa to 3 bits, then change the exponent's bias from 127 to 7.
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9, which is also the step between float32 numbers at 2^14: the addition rounds.
    near = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = near.to(tl.uint32, bitcast=True) - 0x46800000  # the bits of 16384.0
    code = tl.where(size < 0x3C800000, subnormal, normal)  # the bits of 2^-6
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["M"])
def quantize_fp8_kernel(
    x_ptr,
    q_ptr,  # uint8
    scales_ptr,
    norm_ptr,
    norm_eps,
    M,
    K,
    stride_xm,
    stride_qm,
    stride_sm,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is a whole row
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = offs_m < M
    offs_k = tl.arange(0, BLOCK_K)
    group = tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, K) if GROUP else K
    x_rows = x_ptr + (offs_m.to(tl.int64) * stride_xm)[:, None]
    q_rows = q_ptr + (offs_m.to(tl.int64) * stride_qm)[:, None]
    wait_for_earlier(PDL)
    let_next_start(PDL)
    largest = tl.full((BLOCK_M,), SMALLEST, dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for k in range(first, end, BLOCK_K):
        at = (k + offs_k)[None, :]
        x = tl.load(x_rows + at, mask=inside_m[:, None] & (at < end), other=0.0).to(tl.float32)
        if norm_eps is not None:
            squares = add_squares(squares, x)
        if norm_ptr is not None:
            x = weighted(x, norm_ptr + at, at < end, False)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    if norm_eps is not None:
        norm = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / K + norm_eps)
        largest = tl.maximum(largest * norm, SMALLEST)
    full = tl.full((BLOCK_M,), LARGEST, dtype=tl.float32)
    tl.store(scales_ptr + offs_m.to(tl.int64) * stride_sm + group, tl.div_rn(largest, full), mask=inside_m)
    inverse = tl.div_rn(full, largest)[:, None]
    for k in range(first, end, BLOCK_K):
        at = (k + offs_k)[None, :]
        inside = inside_m[:, None] & (at < end)
        z = tl.load(x_rows + at, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            z = weighted(z, norm_ptr + at, at < end, False)
        if norm_eps is not None:
            z = z * norm[:, None]
        z = z * inverse
        limited = tl.minimum(tl.maximum(z, -LARGEST), LARGEST)
        tl.store(q_rows + at, encode(tl.where(z == z, limited, z)), mask=inside)


@taking(DTYPES)
def accepts(shape: QuantizeShape, dtype: str, arch: str) -> str | None:
    if shape.group not in (0, GROUP):
        return f"the group must be {GROUP}, or 0 for one scale per row, got {shape.group}"
    if shape.norm and shape.group:
        return "rows that are normalised have one scale each, got groups"
    return None


@remembered
def plan(
    x: torch.Tensor,
    *,
    group: int = 0,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Quantise x [M, K]: (q [M, K] float8_e4m3fn, scales [M, 1] or [M, ceil(K / 128)] float32).

    Options: group 0 or 128; norm_eps and norm_weight [K]; out and scales to write to.
    """
    require_matrix("x", x, None, x.shape[-1], None)
    m, k = x.shape
    require_norm(norm_eps, norm_weight, k)
    shape = QuantizeShape(m, k, group, norm_eps is not None)
    arch, config = KERNEL.settle(shape, x, arch, config)
    across = cdiv(k, group) if group else 1
    if out is None:
        out = torch.empty(m, k, dtype=FP8, device=x.device)
    if scales is None:
        scales = torch.empty(m, across, dtype=torch.float32, device=x.device)
    require_matrix("out", out, m, k, FP8)
    require_matrix("scales", scales, m, across, torch.float32)
    return Plan(
        kernel=quantize_fp8_kernel,
        grid=(cdiv(m, config.block_m), across),
        arguments={
            "x_ptr": x,
            "q_ptr": out.view(torch.uint8),
            "scales_ptr": scales,
            "norm_ptr": norm_weight,
            "norm_eps": norm_eps,
            "M": m,
            "K": k,
            "stride_xm": x.stride(0),
            "stride_qm": out.stride(0),
            "stride_sm": scales.stride(0),
        },
        constants={
            "LARGEST": FP8_MAX,
            "SMALLEST": FP8_SMALLEST,
            "GROUP": group,
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        also=("scales_ptr",),
    )


def example(shape: QuantizeShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    kind = getattr(torch, dtype)
    options = {"group": shape.group, **norm_example(shape.k if shape.norm else 0, kind, device)}
    return (torch.empty(shape.m, shape.k, dtype=kind, device=device),), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.block_m * config.num_warps,
    shape_for=lambda shape, config: replace(shape, group=GROUP if config == GROUPS else 0),
    groups=(0, GROUP),
    typical=QuantizeShape(4096, 4096),
)
