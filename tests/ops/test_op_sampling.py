# SPDX-License-Identifier: Apache-2.0
"""Sampling against loops over tokens."""

import pytest
import torch
from call import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from nnfront import ops


def distributions(rows: int, vocab: int) -> torch.Tensor:
    prob = torch.rand(rows, vocab, dtype=torch.float64) ** 3 + 1e-3
    return prob / prob.sum(-1, keepdim=True)


def draw_by_hand(prob: list[float], u: float) -> int:
    total = 0.0
    for token, p in enumerate(prob):
        total += p
        if u < total:
            return token
    return len(prob) - 1


def kept_by_hand(prob: list[float], top_p: float, top_k: int) -> int:
    """Return how many of falling probabilities are kept."""
    total = 0.0
    for count, p in enumerate(prob, 1):
        total += p
        if total >= top_p or count >= top_k:
            return count
    return len(prob)


seeds, rows = st.integers(0, 10**6), st.integers(1, 4)


@settings(max_examples=50, deadline=None)
@given(
    seed=seeds,
    batch=rows,
    vocab=st.integers(1, 9),
    samples=st.integers(0, 6),
    dtype=st.sampled_from(["int64", "int32"]),
)
def test_a_uniform_number_picks_the_token_whose_share_it_falls_in(
    seed: int, batch: int, vocab: int, samples: int, dtype: str
) -> None:
    torch.manual_seed(seed)
    prob, u = distributions(batch, vocab), torch.rand(samples, 1, dtype=torch.float64)
    rows_of = torch.randint(0, batch, (samples, 1))
    result = run(ops.multinomial_from_uniform, prob, u, rows_of, dtype=dtype)
    assert result.tolist() == [
        [draw_by_hand(prob[r].tolist(), x)]
        for r, x in zip(rows_of.flatten(), u.flatten().tolist(), strict=True)
    ]


def test_without_indices_row_i_is_sampled_from_distribution_i() -> None:
    prob = torch.eye(4)[[2, 0, 3]]
    assert run(ops.multinomial_from_uniform, prob, torch.rand(3, 1)).tolist() == [[2], [0], [3]]


def test_rounding_never_picks_a_token_beyond_the_last() -> None:
    assert run(ops.multinomial_from_uniform, torch.tensor([[0.5, 0.4]]), torch.tensor([[0.99]])).tolist() == [
        [1]
    ]


@settings(max_examples=50, deadline=None)
@given(seed=seeds, batch=rows, vocab=st.integers(1, 9), samples=st.integers(0, 6))
def test_top_p_and_top_k_sample_among_the_tokens_kept(
    seed: int, batch: int, vocab: int, samples: int
) -> None:
    torch.manual_seed(seed)
    prob, index = distributions(batch, vocab).sort(-1, descending=True)
    top_p, top_k = torch.rand(batch, 1, dtype=torch.float64), torch.randint(1, vocab + 3, (batch, 1))
    u, rows_of = torch.rand(samples, 1, dtype=torch.float64), torch.randint(0, batch, (samples, 1))
    result = run(ops.sample_top_p_top_k_from_sorted_prob, prob, index, top_p, top_k, u, rows_of)
    for r, x, token in zip(rows_of.flatten(), u.flatten().tolist(), result.flatten().tolist(), strict=True):
        count = kept_by_hand(prob[r].tolist(), float(top_p[r]), int(top_k[r]))
        kept = prob[r, :count]
        assert token == index[r, draw_by_hand((kept / kept.sum()).tolist(), x)]


@settings(max_examples=50, deadline=None)
@given(seed=seeds, batch=rows, vocab=st.integers(1, 9))
def test_renormalising_drops_what_is_not_kept(seed: int, batch: int, vocab: int) -> None:
    torch.manual_seed(seed)
    prob = distributions(batch, vocab)
    top_p, top_k = torch.rand(batch, 1, dtype=torch.float64), torch.randint(1, vocab + 3, (batch, 1))
    ordered, index = prob.sort(-1, descending=True)
    expected = torch.zeros_like(prob)
    for r in range(batch):
        kept = index[r, : kept_by_hand(ordered[r].tolist(), float(top_p[r]), int(top_k[r]))]
        expected[r, kept] = prob[r, kept] / prob[r, kept].sum()
    assert_close(run(ops.renormalize_top_p_top_k_prob, prob, ordered, top_p, top_k), expected)


@pytest.mark.parametrize("top_p", [0.0, 1.0])
def test_at_least_one_token_is_kept_and_at_most_all(top_p: float) -> None:
    prob = torch.tensor([[0.5, 0.3, 0.2]])
    result = run(ops.renormalize_top_p_top_k_prob, prob, prob, torch.tensor([[top_p]]), torch.tensor([[10]]))
    assert_close(result, torch.tensor([[1.0, 0.0, 0.0]]) if top_p == 0 else prob)
