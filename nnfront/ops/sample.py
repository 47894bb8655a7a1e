# SPDX-License-Identifier: Apache-2.0
"""Tokens from probabilities. Randomness comes in as uniform numbers, so every op here is a function.

Probabilities are [batch, vocab] and each row sums to 1; they are summed in float32, wider if they are.
"""

from __future__ import annotations

from typing import Any

import torch

from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import Dtype, require, require_float, require_integer, require_same, wide


def _check_column(x: TensorType, name: str, rows: Any = None) -> None:
    """Require [rows, 1]."""
    require(x.ndim == 2, "{} must be [rows, 1], got {} axes", name, x.ndim)
    columns = x.shape[1]
    require(isinstance(columns, int) and columns == 1, "{} must have one column, got {}", name, columns)
    if rows is not None:
        require_same(x.shape[0], rows, f"{name} has {{}} rows, expected {{}}")


def _check_samples(prob: TensorType, uniform_sample: TensorType, sample_indices: TensorType | None) -> None:
    require_float(prob, "the probabilities")
    require(prob.ndim == 2, "the probabilities must be [batch, vocab], got {} axes", prob.ndim)
    size = prob.shape[1]
    require(not (isinstance(size, int) and size == 0), "the vocabulary is empty")
    require_float(uniform_sample, "uniform_sample")
    _check_column(uniform_sample, "uniform_sample")
    if sample_indices is None:
        require_same(
            uniform_sample.shape[0], prob.shape[0], "{} samples for {} distributions, and no sample_indices"
        )
    else:
        require_integer(sample_indices, "sample_indices")
        _check_column(sample_indices, "sample_indices", uniform_sample.shape[0])


def _chosen_rows(x: torch.Tensor, sample_indices: torch.Tensor | None) -> torch.Tensor:
    return x if sample_indices is None else x.index_select(0, sample_indices.reshape(-1).long())


def _first_above(sums: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return in each row the first position whose sum exceeds the threshold [rows, 1], the last one if none does."""
    return (sums <= threshold).sum(-1, keepdim=True).clamp(max=sums.shape[-1] - 1)


@op()
def multinomial_from_uniform(
    prob: TensorType,
    uniform_sample: TensorType,
    sample_indices: TensorType | None = None,
    dtype: Dtype = "int64",
) -> TensorType:
    """Sample a token for each uniform number in [0, 1): the first whose cumulative probability exceeds it.

    Shapes: prob [batch, vocab]; uniform_sample [n, 1]; sample_indices [n, 1], the row of prob to sample from (row i if absent,
    and then n is batch); result [n, 1] of type `dtype`.
    """
    _check_samples(prob, uniform_sample, sample_indices)
    require_integer(TensorType((), dtype), "the result")
    return TensorType((uniform_sample.shape[0], 1), dtype)


@multinomial_from_uniform.reference
def _(
    prob: torch.Tensor, uniform_sample: torch.Tensor, sample_indices: torch.Tensor | None, dtype: str
) -> torch.Tensor:
    sums = _chosen_rows(prob, sample_indices).cumsum(-1, dtype=wide(prob.dtype))
    return _first_above(sums, uniform_sample.to(sums.dtype)).to(getattr(torch, dtype))


def _check_limits(sorted_prob: TensorType, top_p: TensorType, top_k: TensorType) -> None:
    require_float(sorted_prob, "sorted_prob")
    require(sorted_prob.ndim == 2, "sorted_prob must be [batch, vocab], got {} axes", sorted_prob.ndim)
    require_float(top_p, "top_p")
    require_integer(top_k, "top_k")
    _check_column(top_p, "top_p", sorted_prob.shape[0])
    _check_column(top_k, "top_k", sorted_prob.shape[0])


def _last_kept(sums: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return in each row the position of the last token to keep: the one that reaches top_p, at most the top_k-th, at least the first."""
    reaches = (sums < top_p.to(sums.dtype)).sum(-1, keepdim=True)
    return torch.minimum(reaches, top_k.long() - 1).clamp(0, sums.shape[-1] - 1)


@op()
def sample_top_p_top_k_from_sorted_prob(
    sorted_prob: TensorType,
    sorted_index: TensorType,
    top_p: TensorType,
    top_k: TensorType,
    uniform_sample: TensorType,
    sample_indices: TensorType | None = None,
) -> TensorType:
    """Sample among the most probable tokens: as few as reach top_p together, at most top_k, at least one.

    Shapes: sorted_prob [batch, vocab], falling; sorted_index [batch, vocab], the token of each; top_p and top_k [batch, 1];
    uniform_sample and sample_indices [n, 1] as for multinomial_from_uniform; result [n, 1] of sorted_index's dtype.
    Source: The Curious Case of Neural Text Degeneration (arXiv 1904.09751), section 3.1.
    """
    _check_samples(sorted_prob, uniform_sample, sample_indices)
    _check_limits(sorted_prob, top_p, top_k)
    require_integer(sorted_index, "sorted_index")
    require(sorted_index.ndim == 2, "sorted_index must be [batch, vocab], got {} axes", sorted_index.ndim)
    for mine, its in zip(sorted_index.shape, sorted_prob.shape, strict=True):
        require_same(mine, its, "sorted_index and sorted_prob differ: {} and {}")
    return TensorType((uniform_sample.shape[0], 1), sorted_index.dtype)


@sample_top_p_top_k_from_sorted_prob.reference
def _(
    sorted_prob: torch.Tensor,
    sorted_index: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    uniform_sample: torch.Tensor,
    sample_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    sums = sorted_prob.cumsum(-1, dtype=wide(sorted_prob.dtype))
    last = _last_kept(sums, top_p, top_k)
    kept = sums.gather(-1, last)
    sums, last, kept = (_chosen_rows(t, sample_indices) for t in (sums, last, kept))
    place = torch.minimum(_first_above(sums, uniform_sample.to(sums.dtype) * kept), last)
    return _chosen_rows(sorted_index, sample_indices).gather(-1, place)


@op()
def renormalize_top_p_top_k_prob(
    prob: TensorType, sorted_prob: TensorType, top_p: TensorType, top_k: TensorType
) -> TensorType:
    """Set the probabilities of tokens outside the most probable ones to 0 and scale the rest to sum to 1.

    Shapes: prob and sorted_prob (the same numbers, falling) [batch, vocab]; top_p and top_k [batch, 1] as for
    sample_top_p_top_k_from_sorted_prob; the result has prob's type. Tokens as probable as the last one kept are all kept.
    """
    require_float(prob, "prob")
    require(prob.ndim == 2, "prob must be [batch, vocab], got {} axes", prob.ndim)
    _check_limits(sorted_prob, top_p, top_k)
    require(sorted_prob.dtype == prob.dtype, "prob is {}, sorted_prob is {}", prob.dtype, sorted_prob.dtype)
    for mine, its in zip(prob.shape, sorted_prob.shape, strict=True):
        require_same(mine, its, "prob and sorted_prob differ: {} and {}")
    size = prob.shape[1]
    require(not (isinstance(size, int) and size == 0), "the vocabulary is empty")
    return prob


@renormalize_top_p_top_k_prob.reference
def _(
    prob: torch.Tensor, sorted_prob: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    last = _last_kept(sorted_prob.cumsum(-1, dtype=wide(prob.dtype)), top_p, top_k)
    kept = torch.where(prob >= sorted_prob.gather(-1, last), prob, 0.0).to(wide(prob.dtype))
    return (kept / kept.sum(-1, keepdim=True)).to(prob.dtype)
