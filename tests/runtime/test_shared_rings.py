# SPDX-License-Identifier: Apache-2.0
"""Layers that read what earlier ones have appended, whatever their windows, held to attention over the whole text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import op, spec
from nnfront.state.ring import RingLayer

HEADS, SIZE, ROOM = 2, 4, 40


class Shared(nn.Module):
    """Layer after layer, each attends to one of the cache: the first of those with its number appends, the others read."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def step(self, x, cache):
        written = set()
        for n, i in enumerate(self.order):
            q, k, v = (op.reshape(part, (*x.shape[:2], HEADS, SIZE)) for part in parts(x, n, op.tanh))
            if i in written:
                y = op.attention(q, cache=cache[i])
            else:
                y = op.attention(q, k, v, cache=cache[i])
            written.add(i)
            x = x + op.reshape(y, x.shape)
        return x


def parts(x, n, tanh):
    """Queries, keys and values of the layer at place n."""
    return x * (1.0 + n), tanh(x * (2.0 + n)), tanh(x + 0.3 * n)


def whole(x, order, windows):
    """The same over a whole text [batch, seq, HEADS * SIZE], in float64 and without a cache."""
    x, kept = x.double(), {}
    for n, i in enumerate(order):
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts(x, n, torch.tanh))
        k, v = kept.setdefault(i, (k, v))
        at = torch.arange(x.shape[1])
        seen = at[None] <= at[:, None]
        if windows[i] is not None:
            seen &= at[None] > at[:, None] - windows[i]
        scores = (q @ k.transpose(-1, -2) / SIZE**0.5).masked_fill(~seen, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return x


def session_of(order, windows, special=False):
    layers = [spec.KV(HEADS, SIZE, window=window) for window in windows]
    ir = Shared(order).export(
        {"step": {"x": spec.Tensor(["batch", "seq", HEADS * SIZE]), "cache": spec.State(layers)}}
    )
    if special:
        ir = nn.passes.special_cases(ir, "step", [{"batch": 2}])
    return nn.compile(ir).load({})


def check(session, order, windows, chunks, **options):
    x = torch.randn(2, sum(chunks), HEADS * SIZE)
    cache = session.make_cache(batch=2, max_seq=ROOM, **options)
    got = torch.cat([session["step"](part, cache) for part in x.split(chunks, 1)], 1)
    torch.testing.assert_close(got.double(), whole(x, order, windows), rtol=1e-4, atol=1e-4)
    return cache


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_order_of_layers_that_share_is_attention_over_the_whole_text(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    windows = draw(st.lists(st.sampled_from([None, 2, 3, 5]), min_size=1, max_size=3))
    layers = st.integers(0, len(windows) - 1)
    order = draw(st.permutations(range(len(windows)))) + draw(st.lists(layers, max_size=3))
    chunks = draw(st.lists(st.sampled_from([1, 1, 2, 6, 12]), min_size=1, max_size=3))
    options = draw(st.sampled_from([{}, {}, {"page_size": 4}]))
    check(session_of(order, windows, draw(st.booleans())), order, windows, chunks, **options)


def test_what_is_kept_for_those_who_read_again_is_given_back():
    order, windows = [0, 1, 2, 0, 1], [3, 3, 3]
    cache = check(session_of(order, windows), order, windows, [12, 9])
    assert [layer.stored(0).shape[2] for layer in cache] == [3, 3, 3]
    assert not cache.use.chunks


@pytest.mark.parametrize(("order", "most"), [([0, 1, 2], 1), ([0, 1, 2, 0], 2), ([0, 1, 2, 1, 0], 3)])
def test_only_layers_that_are_read_again_keep_what_turned_their_window_over(order, most, monkeypatch):
    counts, append = [], RingLayer.append

    def counted(self, *new):
        append(self, *new)
        counts.append(len(self._state.use.chunks))

    monkeypatch.setattr(RingLayer, "append", counted)
    check(session_of(order, [3, 3, 3]), order, [3, 3, 3], [12])
    assert max(counts) == most
