# SPDX-License-Identifier: Apache-2.0
"""Elements chosen by tensors of positions, and triangles of matrices."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import torch

from nnfront.dims import Dim, Size, less_equal
from nnfront.ir.op import alike, op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import (
    FLOAT8,
    NO_AXIS,
    Axis,
    integer,
    require,
    require_alike,
    require_integer,
    require_same,
)


@op(stricter=NO_AXIS, moves=True, scratch=False, dtype_policy="result")
def take(x: TensorType, indices: TensorType, axis: Axis | None = None) -> TensorType:
    """Take the slices of x at `indices` along an axis; without one x must have a single axis.

    Shapes: x [a, n, b], indices [i...] of any integer dtype in [0, n), result [a, i..., b]. An embedding is
    `take(table, tokens, axis=0)`. Positions outside are an error when it runs.
    """
    require_integer(indices, "indices")
    if axis is None:
        require(x.ndim == 1, "x has {} axes and no axis is named", x.ndim)
        axis = 0
    return TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)


@take.normalize
def _(x: TensorType, axis: int | None) -> dict[str, Any]:
    return {"axis": 0 if axis is None and x.ndim == 1 else axis}


@take.reference
def _(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    chosen = torch.index_select(x, axis, indices.reshape(-1).long())
    return chosen.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _check_positions(x: TensorType, indices: TensorType, axis: int) -> None:
    """Require positions along one axis of x: the same number of axes, and no size beyond x's on the others."""
    require_integer(indices, "indices")
    require(x.dtype not in FLOAT8, "{} cannot be indexed so", x.dtype, help="cast with astype first")
    require(x.ndim == indices.ndim, "x has {} axes, indices has {}", x.ndim, indices.ndim)
    for i, (size, count) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if i != axis:
            require(
                less_equal(count, size) is True,
                "nothing says that indices fit on axis {}: {} positions, size {}",
                i,
                count,
                size,
            )


@op(stricter=NO_AXIS, moves=True, dtype_policy="follow")
def gather(x: TensorType, indices: TensorType, axis: Axis = -1) -> TensorType:
    """result[i, j] = x[i, indices[i, j]] for the last axis, and likewise for any other.

    Shapes: x and indices have as many axes; on all but `axis`, indices is not longer than x. The result has indices' shape.
    """
    _check_positions(x, indices, axis)
    return TensorType(indices.shape, x.dtype)


@gather.reference
def _(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.gather(x, axis, indices.long())


def _check_scatter(x: TensorType, indices: TensorType, updates: TensorType, axis: int) -> TensorType:
    _check_positions(x, indices, axis)
    require_alike(updates=updates, x=x)
    require(updates.ndim == indices.ndim, "updates has {} axes, indices has {}", updates.ndim, indices.ndim)
    for mine, its in zip(updates.shape, indices.shape, strict=True):
        require_same(mine, its, "updates and indices differ: {} and {}")
    return x


_SAME_SHAPE = "updates must have the shape of indices, where torch allows more; " + NO_AXIS


@op(stricter=_SAME_SHAPE, moves=True, dtype_policy="follow")
def scatter(x: TensorType, indices: TensorType, updates: TensorType, axis: Axis = -1) -> TensorType:
    """A copy of x with x[i, indices[i, j]] = updates[i, j] for the last axis, and likewise for any other.

    Shapes: updates as indices, x as for gather; the result has x's type. Which update wins at a position named twice is open.
    """
    return _check_scatter(x, indices, updates, axis)


@scatter.reference
def _(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.scatter(x, axis, indices.long(), updates)


@op(stricter=_SAME_SHAPE, dtype_policy="follow")
def scatter_add(x: TensorType, indices: TensorType, updates: TensorType, axis: Axis = -1) -> TensorType:
    """Like scatter, but updates are added to what x holds; a position named twice gets both."""
    return _check_scatter(x, indices, updates, axis)


@scatter_add.reference
def _(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.scatter_add(x, axis, indices.long(), updates)


Diagonal: TypeAlias = Annotated[
    Size, lambda value, name, _: value if isinstance(value, Dim) else integer(value, name)
]
_NO_FLOAT8 = "float8 has no triangles, unless torch has nothing to do"


def _matrix(x: TensorType, diagonal: Diagonal = 0) -> TensorType:
    require(x.ndim >= 2, "x must have at least two axes, got {}", x.ndim)
    require(x.dtype not in FLOAT8, "{} has no triangles", x.dtype, help="cast with astype first")
    return x


_BESIDE = "Zero what lies {} a diagonal of each matrix [..., rows, columns]; diagonal {} the main one."
_triangle = alike(_matrix, stricter=_NO_FLOAT8, moves=True, scratch=False, dtype_policy="follow")
triu = _triangle("triu", _BESIDE.format("below", "1 is the one above"), torch.triu)
tril = _triangle("tril", _BESIDE.format("above", "-1 is the one below"), torch.tril)
