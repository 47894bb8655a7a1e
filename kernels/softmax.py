# SPDX-License-Identifier: Apache-2.0
"""Rows of weights that add up to one.

    y[r, i] = exp(x[r, i] - max(x[r, :])) / sum over j of exp(x[r, j] - max(x[r, :]))

Shapes: x and y [rows, size], adjacent along size, any stride between rows; y may be x. In float32, rounded once. Rows up to
8192 are read once, longer ones twice. Sums are in a fixed order: repeatable bit for bit.

A row with a NaN or with +inf, and one that is -inf throughout, becomes NaN, as in torch: no weights add up to one there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import rms_norm
from nnfront_kernels.common import Config, Kernel, Plan, launcher, require_matrix, rows_refusal, taking
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class SoftmaxShape:
    """`rows` rows of `size` values."""

    rows: int
    size: int


def reference(x: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """The definition, in float32 or in `compute`."""
    return torch.softmax(x.to(compute), -1).to(x.dtype)


CONFIGS, choose = rms_norm.CONFIGS, rms_norm.choose


@triton.jit(do_not_specialize=["ROWS"])
def softmax_kernel(
    x_ptr,
    y_ptr,
    ROWS,
    SIZE,
    stride_xm,
    stride_ym,
    ONE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_m = (row < ROWS)[:, None]
    x_rows = x_ptr + (row.to(tl.int64) * stride_xm)[:, None]
    y_rows = y_ptr + (row.to(tl.int64) * stride_ym)[:, None]
    at = tl.arange(0, BLOCK_N)[None, :]
    if ONE_STEP:
        z = values(x_rows, at, inside_m, SIZE)
        e = tl.exp(z - finite(tl.max(z, axis=1))[:, None])
        y = e / tl.sum(e, axis=1)[:, None]
        tl.store(y_rows + at, y.to(y_rows.dtype.element_ty), mask=inside_m & (at < SIZE))
    else:
        # Each column of the block keeps a maximum and a sum of its own; they are joined at the end.
        largest = tl.full((BLOCK_M, BLOCK_N), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, SIZE, BLOCK_N):
            z = values(x_rows, first + at, inside_m, SIZE)
            before = largest
            largest = tl.maximum(largest, z)
            total = total * tl.exp(before - finite(largest)) + tl.exp(z - finite(largest))
        top = finite(tl.max(largest, axis=1))[:, None]
        sums = tl.sum(total * tl.exp(largest - top), axis=1)[:, None]
        for first in range(0, SIZE, BLOCK_N):
            y = tl.exp(values(x_rows, first + at, inside_m, SIZE) - top) / sums
            inside = inside_m & (first + at < SIZE)
            tl.store(y_rows + first + at, y.to(y_rows.dtype.element_ty), mask=inside)


@triton.jit
def values(x_rows, at, inside_m, SIZE):
    """x, -inf beyond a row's end; rows beyond the last one hold zeros, which have weights."""
    z = tl.load(x_rows + at, mask=inside_m & (at < SIZE), other=0.0).to(tl.float32)
    return tl.where(at < SIZE, z, float("-inf"))


@triton.jit
def finite(largest):
    """What to subtract before exp: 0 in the place of -inf, whose difference from itself would be NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@taking(DTYPES)
def accepts(shape: SoftmaxShape, dtype: str, arch: str) -> str | None:
    return rows_refusal(shape.rows)


def plan(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Softmax of each row of x [rows, size]: the same shape and dtype. The option is out, to write to."""
    require_matrix("x", x, None, x.shape[-1], None)
    rows, size = x.shape
    shape = SoftmaxShape(rows, size)
    arch, config = KERNEL.settle(shape, x, arch, config)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device) if out is None else out
    require_matrix("out", out, rows, size, x.dtype)
    return Plan(
        kernel=softmax_kernel,
        grid=(cdiv(rows, config.block_m),),
        arguments={
            "x_ptr": x,
            "y_ptr": out,
            "ROWS": rows,
            "SIZE": size,
            "stride_xm": x.stride(0),
            "stride_ym": out.stride(0),
        },
        constants={
            "ONE_STEP": size <= config.block_n,
            **config.blocks("mn"),
        },
        config=config,
        output=out,
    )


def example(shape: SoftmaxShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.empty(shape.rows, shape.size, dtype=getattr(torch, dtype), device=device),), {}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.block_m * config.num_warps,
    shape_for=lambda shape, config: replace(shape, size=config.block_n),
    typical=SoftmaxShape(4096, 4096),
)
