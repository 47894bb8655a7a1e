# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of the rows that a product reads, inside of the product.

    (x / sqrt(mean(x^2) + eps)) @ w.T = (x @ w.T) / sqrt(mean(x^2) + eps)

A norm's weight belongs into w: it scales columns, as w does. Blocks read x anyway, so they sum its squares on the way, and divide the finished sums:
no launch, and no rounding of the normalised rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_NORMALISED = (
    16  # rows: with taller tiles their squares take the registers that hide the latency of memory
)


def normalised(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    """The definition: rows divided by their root mean square, or with None as they are."""
    return x if eps is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@triton.jit
def add_squares(squares, x):
    """Squares of a part of the rows, added up element by element: they are summed once, at the end."""
    wide = x.to(tl.float32)
    return squares + wide * wide


@triton.jit
def divided(acc, squares, K, eps):
    """Sums [BLOCK_M, BLOCK_N] over the root mean square of their rows, whose squares [BLOCK_M] are summed over K elements."""
    return acc * (1.0 / tl.sqrt_rn(squares / K + eps))[:, None]
