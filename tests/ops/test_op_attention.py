# SPDX-License-Identifier: Apache-2.0
"""Attention against torch's own, against a loop over heads and tokens, and against itself through a cache."""

import math

import pytest
import torch
from call import run
from op_cases import Layer
from torch.nn import functional as F
from torch.testing import assert_close

from nnfront import ops
from nnfront.ir.types import kv_layer

BATCH, SEQ, HEADS, GROUPS, SIZE = 2, 6, 4, 2, 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tensors(seq: int = SEQ, kv_seq: int = SEQ, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = (BATCH, seq, HEADS, SIZE), (BATCH, kv_seq, GROUPS, SIZE), (BATCH, kv_seq, GROUPS, SIZE)
    return [torch.randn(s).to(dtype) for s in shapes]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """Return what torch computes, in this project's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def by_hand(q, k, v, sees, scale=None, softcap=None, sinks=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Return attention of every head and token, one at a time; `sees(batch, query, key)` says what is visible."""
    result = torch.zeros(*q.shape[:3], v.shape[-1])
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        g = h // (q.shape[2] // k.shape[2])
        keys = [j for j in range(k.shape[1]) if sees(b, i, j)]
        scores = [float(q[b, i, h] @ k[b, j, g]) * (scale or SIZE**-0.5) for j in keys]
        if softcap is not None:
            scores = [softcap * math.tanh(s / softcap) for s in scores]
        total = sum(map(math.exp, scores)) + (math.exp(sinks[h]) if sinks is not None else 0)
        for j, score in zip(keys, scores, strict=True):
            result[b, i, h] += v[b, j, g] * math.exp(score) / total
    return result


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_is_torchs(is_causal: bool) -> None:
    q, k, v = tensors(4, 6)
    result = run(ops.scaled_dot_product_attention, q, k, v, is_causal=is_causal, scale=0.3)
    assert_close(result, torchs(q, k, v, is_causal=is_causal, scale=0.3))


@pytest.mark.parametrize("shape", [(SEQ, SEQ), (BATCH, 1, 1, SEQ), (BATCH, HEADS, SEQ, SEQ)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_hides_or_adds(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = tensors()
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape)
    assert_close(run(ops.scaled_dot_product_attention, q, k, v, mask), torchs(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_causality_hold_together(kind: str) -> None:
    q, k, v = tensors()
    mask = torch.rand(SEQ, SEQ) > 0.3 if kind == "bool" else torch.randn(SEQ, SEQ)
    both = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    both = both & mask if kind == "bool" else mask.masked_fill(~both, -torch.inf)
    assert_close(
        run(ops.scaled_dot_product_attention, q, k, v, mask, is_causal=True), torchs(q, k, v, attn_mask=both)
    )


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = tensors()
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool)
    mask[2] = False
    assert (run(ops.scaled_dot_product_attention, q, k, v, mask)[:, 2] == 0).all()


def test_half_types_are_computed_in_float32_unless_told() -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    exact = torchs(*(x.float() for x in (q, k, v))).bfloat16()
    assert torch.equal(run(ops.scaled_dot_product_attention, q, k, v), exact)
    assert not torch.equal(run(ops.scaled_dot_product_attention, q, k, v, scale_dtype="bfloat16"), exact)


def test_attention_without_a_cache_is_causal_sdpa() -> None:
    q, k, v = tensors()
    assert_close(run(ops.attention, q, k, v), torchs(q, k, v, is_causal=True))


def test_attention_to_another_sequence_sees_all_of_it() -> None:
    q, k, v = tensors(3, 5)
    assert_close(run(ops.attention, q, k, v, is_causal=False), torchs(q, k, v))


def test_window_softcap_and_sinks() -> None:
    q, k, v = tensors()
    sinks = torch.randn(HEADS)
    result = run(ops.attention, q, k, v, None, sinks, window=3, softcap=2.0, scale=0.7)
    assert_close(result, by_hand(q, k, v, lambda b, i, j: i - 3 < j <= i, 0.7, 2.0, sinks))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("steps", [[6], [1] * 6, [3, 1, 2]])
def test_steps_through_a_cache_are_attention_at_once(steps: list[int], window: int | None) -> None:
    q, k, v = tensors()
    layer = Layer(kv_layer(GROUPS, SIZE, "float32", BATCH, 16, window))
    parts = []
    for start, size in zip([sum(steps[:i]) for i in range(len(steps))], steps, strict=True):
        y, handle = run(ops.attention, *(x[:, start : start + size] for x in (q, k, v)), layer)
        assert handle is layer
        parts.append(y)
    assert_close(torch.cat(parts, 1), run(ops.attention, q, k, v, window=window))


def test_a_narrower_window_than_the_caches_holds_as_well() -> None:
    q, k, v = tensors()
    for own, caches in ((2, 4), (4, 2), (2, None)):
        layer = Layer(kv_layer(GROUPS, SIZE, "float32", BATCH, 16, caches))
        y, _ = run(ops.attention, q, k, v, layer, window=own)
        assert_close(y, run(ops.attention, q, k, v, window=2))


class Ragged(Layer):
    """Two sequences of different lengths in slots out of order; the shorter one has an empty slot."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(kv_layer(GROUPS, SIZE, "float32", BATCH, 16), positions.shape[1])
        self.at = positions

    def positions(self, seq: int) -> torch.Tensor:
        return self.at.max(1, keepdim=True).values + 1 + torch.arange(seq)

    def append(self, *parts: torch.Tensor) -> None:
        self.at = torch.cat([self.at, self.positions(parts[0].shape[1])], 1)
        super().append(*parts)

    def key_positions(self) -> torch.Tensor:
        return self.at


def test_sequences_of_different_lengths_share_a_batch() -> None:
    q, k, v = tensors(2, 2)
    slots = torch.tensor([[2, 0, 1], [-1, 1, 0]])
    layer = Ragged(slots)
    y, _ = run(ops.attention, q, k, v, layer, window=3)
    keys, values = (layer.stored(i).transpose(1, 2) for i in range(2))
    at = layer.at
    queries = torch.tensor([[3, 4], [2, 3]])
    expected = by_hand(
        q, keys, values, lambda b, i, j: 0 <= at[b, j] and queries[b, i] - 3 < at[b, j] <= queries[b, i]
    )
    assert_close(y, expected)


@pytest.mark.parametrize("seq", [1, 3])
def test_what_is_stored_is_seen_as_a_whole(seq: int) -> None:
    layer = Layer(kv_layer(GROUPS, SIZE, "float32", BATCH, 8))
    _, k, v = tensors(1, SEQ)
    assert run(ops.cache_append, layer, k, v) is layer
    q = torch.randn(BATCH, seq, HEADS, SIZE)
    y, after = run(ops.attention, q, None, None, layer, is_causal=False)
    assert after is layer
    assert_close(y, torchs(q, k, v))


def test_tokens_of_a_call_may_see_later_ones_under_a_bias_and_a_window() -> None:
    layer = Layer(kv_layer(GROUPS, SIZE, "float32", BATCH, 8, window=4))
    before = tensors(2, 2)
    run(ops.attention, *before, layer)
    q, k, v = tensors(3, 3)
    seen = torch.rand(BATCH, 1, 3, 8) > 0.3
    seen[..., 2:5] |= torch.eye(3, dtype=torch.bool)
    y, _ = run(ops.attention, q, k, v, layer, None, seen, is_causal=False)
    keys, values = (torch.cat(pair, 1) for pair in zip(before[1:], (k, v), strict=True))
    assert_close(y, by_hand(q, keys, values, lambda b, i, j: bool(seen[b, 0, i, j]) and j > i + 2 - 4))


def test_a_cache_comes_apart_into_layers_and_together_again() -> None:
    layers = tuple(Layer(kv_layer(1, 4, "float32", 2, 8)) for _ in range(3))
    assert run(ops.cache_join, *run(ops.cache_split, layers)) == layers


def test_positions_continue_where_the_cache_ends() -> None:
    layer = Layer(kv_layer(1, 4, "float32", 2, 8), stored=5)
    assert run(ops.cache_positions, layer, seq=3).tolist() == [[5, 6, 7]] * 2
