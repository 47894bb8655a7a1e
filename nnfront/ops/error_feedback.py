# SPDX-License-Identifier: Apache-2.0
"""Rounding that makes up for its own errors, as in GPTQ: what rounding one column of a weight adds to a product, the columns after it take off again, as far as inputs are alike.

With the second moments H of the inputs, the mean square of what rounding W to Q adds to a product is the trace of (W - Q) H (W - Q)'. Column after column is rounded, and its error times
a row of the Cholesky factor of H's inverse is taken from those that are left, which makes them the best ones for what is fixed by then. Columns of large inputs come first. Moments are of
blocks of neighbours, so blocks are rounded each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

DAMPING = 0.01
"""What is added to the moments of each input with itself, as a part of their mean: they are of some text, not of all."""
STEP = 32
"""Columns whose errors are taken from those far behind in one product."""
PIECE = 1 << 20
"""Elements of a weight that are rounded at once on each thread: what that holds besides is eight times as many in float32."""

Nearest = Callable[..., torch.Tensor]
"""From numbers, and for each of them what a format needs to know (scales, zero points), to the nearest numbers of the format."""


def scratch_bytes(elements: int, moments: int, scales: int = 0) -> int:
    """Return the most bytes that rounding so many elements by so many moments takes besides its operands and results; pieces of the results, of at most 2 bytes an element, are joined."""
    return 48 * moments + 2 * elements + 64 * min(elements, PIECE * torch.get_num_threads())


@dataclass(frozen=True)
class ErrorFeedback:
    """How errors of columns are passed on: the order in which columns of each block are rounded [blocks, size], and the factor of the inverse of their moments in that order [blocks, size, size]."""

    order: torch.Tensor
    factor: torch.Tensor

    @staticmethod
    def of(moments: torch.Tensor) -> ErrorFeedback:
        """Take moments [blocks, size, size]. A block of them that are those of no inputs (not finite, or not positive definite) passes nothing on."""
        wide = moments.to(torch.float64)
        own = wide.diagonal(dim1=1, dim2=2)
        added = own.mean(-1, keepdim=True) * DAMPING
        wide = wide + torch.diag_embed(torch.where(added == 0, torch.ones_like(added), added).expand_as(own))
        order = own.argsort(dim=-1, descending=True, stable=True)
        wide = wide.gather(1, order.unsqueeze(-1).expand_as(wide))
        wide = wide.gather(2, order.unsqueeze(1).expand_as(wide))
        lower, wrong = torch.linalg.cholesky_ex(wide)
        factor, wrong_again = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        lost = ((wrong != 0) | (wrong_again != 0) | ~factor.isfinite().all(-1).all(-1))[:, None, None]
        none = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
        return ErrorFeedback(order, torch.where(lost, none, factor).to(torch.float32))

    def compensated(self, w: torch.Tensor, nearest: Nearest, *parts: torch.Tensor) -> torch.Tensor:
        """Return the numbers [rows, columns] whose nearest ones are to be stored in the place of `w`'s. `parts`, of w's shape, is what `nearest` is told of each."""
        y = _round(self._ordered(w), self.factor, nearest, [self._ordered(part) for part in parts])
        back = torch.empty_like(y).scatter_(1, self.order.unsqueeze(-1).expand_as(y), y)
        return back.permute(2, 0, 1).reshape(w.shape).contiguous()

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers [rows, columns] as [blocks, size, rows]."""
        transposed = x.to(torch.float32).view(len(x), *self.order.shape).permute(1, 2, 0)
        return transposed.gather(1, self.order.unsqueeze(-1).expand_as(transposed))


def _round(
    y: torch.Tensor, factor: torch.Tensor, nearest: Nearest, parts: list[torch.Tensor]
) -> torch.Tensor:
    size = y.shape[1]
    y = y.contiguous()
    for first in range(0, size, STEP):
        last = min(first + STEP, size)
        errors = torch.empty_like(y[:, first:last])
        for at in range(first, last):
            error = y[:, at] - nearest(y[:, at], *(part[:, at] for part in parts))
            error /= factor[:, at, at, None]
            errors[:, at - first] = error
            if at + 1 < last:
                y[:, at + 1 : last] -= factor[:, at, at + 1 : last, None] * error.unsqueeze(1)
        if last < size:
            y[:, last:] -= factor[:, first:last, last:].transpose(1, 2) @ errors
    return y
