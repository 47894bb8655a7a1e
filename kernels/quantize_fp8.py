# SPDX-License-Identifier: Apache-2.0
"""Round activations to 8-bit floating point (e4m3fn) with a float32 scale per row.

    largest[r] = max(|x[r, k]|, 2^-100)
    scales[r]  = largest / 448
    q[r, k]    = nearest e4m3fn to clamp(x[r, k] * (448 / largest), -448, 448), ties to even; NaN stays NaN

Shapes: x [M, K] 16-bit or float32, rows may be strided; q [M, K] float8_e4m3fn; scales [M, 1].
A row that holds an infinity has no meaning: its infinity becomes NaN.
With `norm_eps` rows are divided by their root mean square and multiplied by `norm_weight` [K] first, in float32.

The rounding is integer arithmetic: sm_80 cannot convert to e4m3fn, and Triton's interpreter rounds some values
wrongly. Without a norm the result equals `quantized.quantize_fp8` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, Plan, launcher, require_matrix
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.quantized import FP8, FP8_MAX, FP8_SMALLEST
from nnfront_kernels.quantized import quantize_fp8 as quantize
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import add_squares, norm_example, normalised, require_norm, weighted

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class QuantizeShape:
    """m rows of k values."""

    m: int
    k: int
    norm: bool = False


def reference(
    x: torch.Tensor,
    *,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: (q, scales)."""
    rows = x if norm_eps is None else normalised(x.float(), norm_eps, norm_weight)
    return quantize(rows, 1, max(x.shape[1], 1))


# One block per row. By arithmetic: enough loads in flight; not yet measured.
CONFIGS = (Config(1, 1, 2048, 4, 1),)


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


@triton.jit
def quantize_fp8_kernel(
    x_ptr,
    q_ptr,  # uint8
    scales_ptr,
    norm_ptr,
    norm_eps,
    K,
    stride_xm,
    stride_qm,
    stride_sm,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * stride_qm
    wait_for_earlier(PDL)
    let_next_start(PDL)
    largest = tl.full((1,), SMALLEST, dtype=tl.float32)
    squares = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        at = (k + offs_k)[None, :]
        x = tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32)
        if norm_eps is not None:
            squares = add_squares(squares, x)
        if norm_ptr is not None:
            x = weighted(x, norm_ptr + at, at < K, False)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    if norm_eps is not None:
        norm = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / K + norm_eps)
        largest = tl.maximum(largest * norm, SMALLEST)
    full = tl.full((1,), LARGEST, dtype=tl.float32)
    tl.store(scales_ptr + row * stride_sm + tl.arange(0, 1), tl.div_rn(largest, full))
    inverse = tl.div_rn(full, largest)[:, None]
    for k in range(0, K, BLOCK_K):
        at = (k + offs_k)[None, :]
        z = tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            z = weighted(z, norm_ptr + at, at < K, False)
        if norm_eps is not None:
            z = z * norm[:, None]
        z = z * inverse
        limited = tl.minimum(tl.maximum(z, -LARGEST), LARGEST)
        tl.store(q_row + at, encode(tl.where(z == z, limited, z)), mask=at < K)


@remembered
def plan(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Quantise x [M, K]: (q [M, K] float8_e4m3fn, scales [M, 1] float32).

    Options: norm_eps and norm_weight [K]; out and scales to write to.
    """
    require_matrix("x", x, None, x.shape[-1], None)
    m, k = x.shape
    require_norm(norm_eps, norm_weight, k)
    shape = QuantizeShape(m, k, norm_eps is not None)
    arch, config = KERNEL.settle(shape, x, arch, config)
    if out is None:
        out = torch.empty(m, k, dtype=FP8, device=x.device)
    if scales is None:
        scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    require_matrix("out", out, m, k, FP8)
    require_matrix("scales", scales, m, 1, torch.float32)
    return Plan(
        kernel=quantize_fp8_kernel,
        grid=(m,),
        arguments={
            "x_ptr": x,
            "q_ptr": out.view(torch.uint8),
            "scales_ptr": scales,
            "norm_ptr": norm_weight,
            "norm_eps": norm_eps,
            "K": k,
            "stride_xm": x.stride(0),
            "stride_qm": out.stride(0),
            "stride_sm": scales.stride(0),
        },
        constants={
            "LARGEST": FP8_MAX,
            "SMALLEST": FP8_SMALLEST,
            "BLOCK_K": config.block_k,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        also=("scales_ptr",),
    )


def example(shape: QuantizeShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    kind = getattr(torch, dtype)
    options = norm_example(shape.k if shape.norm else 0, kind, device)
    return (torch.empty(shape.m, shape.k, dtype=kind, device=device),), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.num_warps,
    typical=QuantizeShape(4096, 4096),
)
