# SPDX-License-Identifier: Apache-2.0
"""Subtract the mean of each row and divide by its deviation, after an optional addition.

    s[r, i] = x[r, i] + residual[r, i]                      rounded to x's dtype; s = x without a residual
    y[r, i] = (s[r, i] - mean(s[r, :])) / sqrt(variance(s[r, :]) + eps) * w[i] + b[i]

Shapes: x, residual, s and y [rows, size] or [tokens, heads, size], adjacent along size, any strides between rows; w and b
[size] of any float dtype, either may be absent. Statistics and products are float32, and y is rounded once. The variance
is that of differences from the mean, and the statistics of parts of a long row are joined by Chan's formula, so a large
mean costs no digits. s may be residual: each element is read before it is written. Rows up to 8192 are read once, longer
ones twice. Sums are in a fixed order: repeatable bit for bit. The kernel is that of `rms_norm.py`.

Source: Ba, Kiros and Hinton, arXiv 1607.06450, eq. 4; Chan, Golub and LeVeque 1983, eq. 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from nnfront_kernels import rms_norm
from nnfront_kernels.common import Kernel, Plan, launcher
from nnfront_kernels.remembered import remembered
from nnfront_kernels.rms_norm import NormShape, plan_rows
from nnfront_kernels.row_norm import normalised

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
    y = normalised(wide - wide.mean(-1, keepdim=True), eps, weight)
    y = (y if bias is None else y + bias.to(compute)).to(x.dtype)
    return y if residual is None else (s, y)


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
    return plan_rows(KERNEL, x, weight, bias, eps=eps, centered=True, **options)


def example(shape: NormShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, weight), options = rms_norm.example(shape, dtype, device)
    return (x, weight, torch.empty_like(weight)), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * max(config.block_m * config.num_warps, config.block_n),
    shape_for=lambda shape, config: replace(shape, size=config.block_n),
    typical=NormShape(4096, 4096, residual=True),
)
