# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of the rows that a product reads, inside of the product.

    (x / sqrt(mean(x^2) + eps)) @ w.T = (x @ w.T) / sqrt(mean(x^2) + eps)

Blocks read x anyway, so they sum its squares on the way, and divide the finished sums: no launch, and no normalised rows in memory. The norm's weight
scales what they read of x: weights in few bits could not hold it. Tensor cores take x times this weight in x's dtype, where float16 ends at its
largest number, as no row has been divided yet; a single row, which other cores multiply, is not rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import KernelError, require_vector

# Rows: with taller tiles their squares take the registers that hide the latency of memory.
MOST_NORMALISED = 16


def normalised(x: torch.Tensor, eps: float | None, weight: torch.Tensor | None = None) -> torch.Tensor:
    """The definition: rows divided by their root mean square and multiplied by a weight, if there is one, or with None as they are."""
    if eps is None:
        return x
    rows = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows if weight is None else rows * weight.to(x.dtype)


def norm_refusal(rows: int) -> str | None:
    """None, or why so many rows are not normalised inside of a product."""
    if rows <= MOST_NORMALISED:
        return None
    return f"rows are normalised in products of at most {MOST_NORMALISED} of them, got {rows}"


def require_norm(eps: float | None, weight: torch.Tensor | None, size: int) -> None:
    """Raise KernelError unless a norm's weight is of rows of this size, and there is a norm for it."""
    if weight is None:
        return
    if eps is None:
        raise KernelError("norm_weight is for rows that are normalised, and norm_eps is None")
    require_vector("norm_weight", weight, size)


def norm_example(size: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Options of `plan` for rows of this size that are normalised; with 0 for others."""
    return {"norm_eps": 1e-5, "norm_weight": torch.empty(size, dtype=dtype, device=device)} if size else {}


@triton.jit
def add_squares(squares, x):
    """Squares of a part of the rows, added up element by element: they are summed once, at the end."""
    wide = x.to(tl.float32)
    return squares + wide * wide


@triton.jit
def weighted(x, norm_rows, inside, ROUND: tl.constexpr):
    """A part of the rows times that of the norm's weight, float32 or in x's dtype."""
    weight = tl.load(norm_rows, mask=inside, other=None if inside is None else 0.0)
    wide = x.to(tl.float32) * weight.to(tl.float32)
    if ROUND:
        if x.dtype == tl.float16:
            wide = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        wide = wide.to(x.dtype)
    return wide


@triton.jit
def divided(acc, squares, K, eps):
    """Sums [BLOCK_M, BLOCK_N] over the root mean square of their rows, whose squares [BLOCK_M] are summed over K elements."""
    return acc * (1.0 / tl.sqrt_rn(squares / K + eps))[:, None]
