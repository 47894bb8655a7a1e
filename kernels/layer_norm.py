# SPDX-License-Identifier: Apache-2.0
"""Subtract the mean of each row and divide by its deviation, after an optional addition.

    s[r, i] = x[r, i] + residual[r, i]                      rounded to x's dtype; s = x without a residual
    y[r, i] = (s[r, i] - mean(s[r, :])) / sqrt(variance(s[r, :]) + eps) * w[i] + b[i]

Shapes: x, residual, s and y [rows, size] or [tokens, heads, size], adjacent along size, any strides between rows; w and b
[size] of any float dtype, either may be absent. Statistics and products are float32, and y is rounded once. The variance
is that of differences from the mean, and the statistics of parts of a long row are joined by Chan's formula, so a large
mean costs no digits. s may be residual: each element is read before it is written. Rows up to 8192 are read once, longer
ones twice. Sums are in a fixed order: repeatable bit for bit.

Source: Ba, Kiros and Hinton, arXiv 1607.06450, eq. 4; Chan, Golub and LeVeque 1983, eq. 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import rms_norm
from nnfront_kernels.common import Cost, Kernel, Plan, empties, launcher
from nnfront_kernels.dependent import let_next_start, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.rms_norm import NormShape, load_sum, plan_rows

CONFIGS, DTYPES, accepts, choose = rms_norm.CONFIGS, rms_norm.DTYPES, rms_norm.accepts, rms_norm.choose


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`: y, or (s, y) with a residual."""
    s = x if residual is None else (x.to(compute) + residual.to(compute)).to(x.dtype)
    wide = s.to(compute)
    away = wide - wide.mean(-1, keepdim=True)
    y = away / (away.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    y = y.to(x.dtype)
    return y if residual is None else (s, y)


@triton.jit(do_not_specialize=["ROWS"])
def layer_norm_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    residual_ptr,
    s_ptr,
    y_ptr,
    ROWS,
    HEADS,
    SIZE,
    stride_xt, stride_xh,
    stride_rt, stride_rh,
    stride_st, stride_sh,
    stride_yt, stride_yh,
    eps,
    ONE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = (row < ROWS)[:, None]
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    x_rows = x_ptr + (token * stride_xt + head * stride_xh)[:, None]
    y_rows = y_ptr + (token * stride_yt + head * stride_yh)[:, None]
    residual_rows = None
    s_rows = None
    if residual_ptr is not None:
        residual_rows = residual_ptr + (token * stride_rt + head * stride_rh)[:, None]
        s_rows = s_ptr + (token * stride_st + head * stride_sh)[:, None]
    at = tl.arange(0, BLOCK_N)
    if ONE_STEP:
        inside_n = at < SIZE
        inside = inside_m & inside_n[None, :]
        s = load_sum(x_rows, residual_rows, at[None, :], inside)
        mean, squares = statistics(s, inside_n, SIZE)
        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)
        write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, at, inside_n, inside)
    else:
        mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for first in range(0, SIZE, BLOCK_N):
            inside_n = first + at < SIZE
            s = load_sum(x_rows, residual_rows, (first + at)[None, :], inside_m & inside_n[None, :])
            count = tl.minimum(SIZE - first, BLOCK_N).to(tl.float32)
            part_mean, part_squares = statistics(s, inside_n, count)
            share = count / (first + count)
            away = part_mean - mean
            squares += part_squares + away * away * (first * share)
            mean += away * share
        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)
        for first in range(0, SIZE, BLOCK_N):
            inside_n = first + at < SIZE
            inside = inside_m & inside_n[None, :]
            s = load_sum(x_rows, residual_rows, (first + at)[None, :], inside)
            write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, first + at, inside_n, inside)


@triton.jit
def statistics(s, inside_n, count):
    """The mean of each row of a block, and the sum of squared differences from it. s is 0 outside."""
    mean = tl.sum(s, axis=1) / count
    away = tl.where(inside_n[None, :], s - mean[:, None], 0.0)
    return mean, tl.sum(away * away, axis=1)


@triton.jit
def write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, at, inside_n, inside):
    if s_rows is not None:
        tl.store(s_rows + at[None, :], s.to(s_rows.dtype.element_ty), mask=inside)
    y = (s - mean[:, None]) * inverse[:, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    tl.store(y_rows + at[None, :], y.to(y_rows.dtype.element_ty), mask=inside)


@remembered
def plan(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    **options: Any,
) -> Plan:
    """Normalise rows: y, or with a residual (s, y). Options: eps, must be given; residual; out and total, to write y and s to."""
    vectors = {"weight": weight, "bias": bias}
    return plan_rows(KERNEL, layer_norm_kernel, x, vectors, eps=eps, **options)


def cost(shape: NormShape, dtype: str) -> Cost:
    """Seven operations for each value; each tensor moved once, weight and bias as wide as the rows."""
    size = 4 if dtype == "float32" else 2
    values = shape.rows * shape.size
    return Cost(
        (8 if shape.residual else 7) * values,
        size * ((4 if shape.residual else 2) * values + 2 * shape.size),
    )


def example(shape: NormShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    options: dict[str, Any] = {"eps": 1e-5}
    if shape.residual:
        options["residual"] = make(shape.rows, shape.size)
    return (make(shape.rows, shape.size), make(shape.size), make(shape.size)), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * max(config.block_m * config.num_warps, config.block_n),
    shape_for=lambda shape, config: replace(shape, size=config.block_n),
    typical=NormShape(4096, 4096, residual=True),
)
