# SPDX-License-Identifier: Apache-2.0
"""Divide rows by their root mean square, after an optional addition.

    s[r, i] = x[r, i] + residual[r, i]                      rounded to x's dtype; s = x without a residual
    y[r, i] = s[r, i] / sqrt(mean(s[r, :]^2) + eps) * w[i]

Shapes: x, residual, s and y [rows, size] or [tokens, heads, size], adjacent along size, any strides between rows; w [size]
of any float dtype, or without one 1. Statistics and products are float32, and y is rounded once. s may be residual: each element is read
before it is written. Rows up to 8192 are read once, longer ones twice. Sums are in a fixed order: repeatable bit for bit.

Source: Zhang and Sennrich, arXiv 1910.07467, eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    require_vector,
    rows_refusal,
    strides,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.row_norm import normalised
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class NormShape:
    """`rows` vectors of `size` values; `residual` says that another tensor is added first."""

    rows: int
    size: int
    residual: bool = False


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`: y, or (s, y) with a residual."""
    s = x if residual is None else (x.to(compute) + residual.to(compute)).to(x.dtype)
    y = normalised(s.to(compute), eps, weight).to(x.dtype)
    return y if residual is None else (s, y)


# Rows x columns of a block: the narrowest that holds a row, else the last, in several steps. By arithmetic: 16 bytes or
# more in flight for each thread; not yet measured.
CONFIGS = (
    Config(1, 4096, 1, 8, 1),
    Config(16, 128, 1, 4, 1),
    Config(4, 512, 1, 4, 1),
    Config(1, 2048, 1, 4, 1),
    Config(1, 8192, 1, 8, 1),
)


def choose(shape: NormShape, dtype: str, arch: str) -> Config:
    """The narrowest config that holds a row, else the widest."""
    widths = sorted(CONFIGS, key=lambda config: config.block_n)
    return next((config for config in widths if config.block_n >= shape.size), widths[-1])


@triton.jit(do_not_specialize=["ROWS"])
def norm_kernel(
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
    CENTERED: tl.constexpr,  # the mean of a row is subtracted first: `layer_norm.py`
    ONE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
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
    wait_for_earlier(PDL)
    let_next_start(PDL)
    at = tl.arange(0, BLOCK_N)
    mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if ONE_STEP:
        inside_n = at < SIZE
        inside = inside_m & inside_n[None, :]
        s = load_sum(x_rows, residual_rows, at[None, :], inside)
        if CENTERED:
            mean, squares = statistics(s, inside_n, SIZE)
        else:
            squares = tl.sum(s * s, axis=1)
        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)
        write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, at, inside_n, inside, CENTERED)
    else:
        if CENTERED:
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
        else:
            partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for first in range(0, SIZE, BLOCK_N):
                inside = inside_m & (first + at < SIZE)[None, :]
                s = load_sum(x_rows, residual_rows, (first + at)[None, :], inside)
                partial += s * s
            squares = tl.sum(partial, axis=1)
        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)
        for first in range(0, SIZE, BLOCK_N):
            inside_n = first + at < SIZE
            inside = inside_m & inside_n[None, :]
            s = load_sum(x_rows, residual_rows, (first + at)[None, :], inside)
            write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, first + at, inside_n, inside, CENTERED)


@triton.jit
def statistics(s, inside_n, count):
    """The mean of each row of a block, and the sum of squared differences from it. s is 0 outside."""
    mean = tl.sum(s, axis=1) / count
    away = tl.where(inside_n[None, :], s - mean[:, None], 0.0)
    return mean, tl.sum(away * away, axis=1)


@triton.jit
def load_sum(x_rows, residual_rows, at, inside):
    """x + residual as the dtype of x holds it, in float32; 0 outside."""
    x = tl.load(x_rows + at, mask=inside, other=0.0)
    s = x.to(tl.float32)
    if residual_rows is not None:
        added = s + tl.load(residual_rows + at, mask=inside, other=0.0).to(tl.float32)
        s = added.to(x.dtype).to(tl.float32)
    return s


@triton.jit
def write(s, mean, inverse, s_rows, y_rows, w_ptr, b_ptr, at, inside_n, inside, CENTERED: tl.constexpr):
    if s_rows is not None:
        tl.store(s_rows + at[None, :], s.to(s_rows.dtype.element_ty), mask=inside)
    y = (s - mean[:, None] if CENTERED else s) * inverse[:, None]
    if w_ptr is not None:
        y = y * tl.load(w_ptr + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    tl.store(y_rows + at[None, :], y.to(y_rows.dtype.element_ty), mask=inside)


@taking(DTYPES)
def accepts(shape: NormShape, dtype: str, arch: str) -> str | None:
    if shape.size < 1:
        return "rows must have at least 1 element, got 0"
    return rows_refusal(shape.rows)


def plan_rows(
    kernel: Kernel,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    centered: bool,
) -> Plan:
    """The launch of a norm of rows, and of what comes after it."""
    if x.ndim not in (2, 3):
        raise KernelError(f"x must be [rows, size] or [tokens, heads, size], got {list(x.shape)}")
    size, rows = x.shape[-1], x.shape[:-1].numel()
    arch, config = kernel.settle(NormShape(rows, size, residual is not None), x, arch, config)
    if total is not None and residual is None:
        raise KernelError("total is for the sum with a residual, and there is none")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if residual is not None and total is None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            require_vector(name, vector, size)
    for name, tensor in (("x", x), ("residual", residual), ("total", total), ("out", out)):
        require_rows(name, tensor, x)
    axes = "th" if x.ndim == 3 else "t"
    apart = {f"stride_{name}h": 0 for name in "xrsy"}  # heads of a matrix
    return Plan(
        kernel=norm_kernel,
        grid=(cdiv(rows, config.block_m),),
        arguments={
            "x_ptr": x,
            "w_ptr": weight,
            "b_ptr": bias,
            "residual_ptr": residual,
            "s_ptr": total,
            "y_ptr": out,
            "ROWS": rows,
            "HEADS": x.shape[1] if x.ndim == 3 else 1,
            "SIZE": size,
            **apart,
            **strides("x", x, axes),
            **strides("r", residual, axes),
            **strides("s", total, axes),
            **strides("y", out, axes),
            "eps": eps,
        },
        constants={
            "CENTERED": centered,
            "ONE_STEP": size <= config.block_n,
            **config.blocks("mn"),
            "PDL": overlaps(arch),
        },
        config=config,
        output=out if total is None else total,
        also=() if total is None else ("y_ptr",),
    )


@remembered
def plan(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, **options: Any) -> Plan:
    """Normalise rows: y, or with a residual (s, y). Options: eps, must be given; residual; out and total, to write y and s to."""
    return plan_rows(KERNEL, x, weight, eps=eps, centered=False, **options)


def require_rows(name: str, tensor: torch.Tensor | None, like: torch.Tensor) -> None:
    """Raise KernelError unless `tensor`, if there is one, has the shape and dtype of `like` and adjacent elements in a row."""
    if tensor is None:
        return
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise KernelError(
            f"{name} must be {like.dtype} {list(like.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelError(
            f"{name} must have adjacent elements along its last axis, got strides {list(tensor.stride())}\n"
            f"  help: {name}.contiguous()"
        )


def example(shape: NormShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    options: dict[str, Any] = {"eps": 1e-6}
    if shape.residual:
        options["residual"] = make(shape.rows, shape.size)
    return (make(shape.rows, shape.size), make(shape.size)), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.block_m * config.num_warps,
    shape_for=lambda shape, config: replace(shape, size=config.block_n),
    typical=NormShape(4096, 4096, residual=True),
)
