# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a product (LoRA), of which each sequence of a batch has its own or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Size, product, total
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import require, require_float, require_integer, require_same, wide


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of both matrices, for each vector."""
    _, x, a, b, _ = operands
    vectors = product([2, *x.shape[:-1]])
    return total([product([vectors, *matrix.shape[1:]]) for matrix in (a, b)])


@op(
    stricter="all have one dtype, and every sequence an adapter or none", flops=_flops, dtype_policy="compute"
)
def add_low_rank(
    y: TensorType, x: TensorType, a: TensorType, b: TensorType, adapter: TensorType
) -> TensorType:
    """y + x A^T B^T, for each sequence with the matrices A and B of its adapter; y where it has none.

    Shapes: y [batch, ..., out]; x [batch, ..., in]; a [adapters, rank, in]; b [adapters, out, rank]; adapter [batch], integers in [0, adapters),
    what is outside is none; result y's type. Products are summed in float32, and rounded to y's dtype once.
    Source: LoRA (arXiv 2106.09685), section 4.1.
    """
    for name, tensor in (("y", y), ("x", x), ("a", a), ("b", b)):
        require_float(tensor, name)
        require(tensor.dtype == y.dtype, "{} is {}, y is {}", name, tensor.dtype, y.dtype)
    require_integer(adapter, "adapter")
    require(x.ndim >= 2, "x must have at least 2 axes, got {}", x.ndim)
    require(y.ndim == x.ndim, "y has {} axes, x has {}", y.ndim, x.ndim)
    for name, tensor, axes in (("a", a, 3), ("b", b, 3), ("adapter", adapter, 1)):
        require(tensor.ndim == axes, "{} must have {} axes, got {}", name, axes, tensor.ndim)
    for axis, (mine, its) in enumerate(zip(y.shape[:-1], x.shape[:-1], strict=True)):
        require_same(mine, its, "sizes along axis {} differ: y has {}, x has {}", axis)
    require_same(adapter.shape[0], x.shape[0], "adapter is for {} sequences, x has {}")
    require_same(a.shape[0], b.shape[0], "a is of {} adapters, b of {}")
    require_same(a.shape[1], b.shape[2], "a has rank {}, b has {}")
    require_same(a.shape[2], x.shape[-1], "a takes {} features, x has {}")
    require_same(b.shape[1], y.shape[-1], "b gives {} features, y has {}")
    return y


@add_low_rank.reference
def _(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: torch.Tensor
) -> torch.Tensor:
    count, of_wide = a.shape[0], wide(y.dtype)
    if not count or not x.numel() or not y.numel():
        return y.clone()
    chosen = adapter.long().clamp(0, count - 1)
    vectors = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
    first, second = (matrix.index_select(0, chosen).to(of_wide).mT for matrix in (a, b))
    added = (vectors.to(of_wide) @ first @ second).view(y.shape)
    is_one = ((adapter >= 0) & (adapter < count)).view(-1, *[1] * (y.ndim - 1))
    return torch.where(is_one, y.to(of_wide) + added, y.to(of_wide)).to(y.dtype)
