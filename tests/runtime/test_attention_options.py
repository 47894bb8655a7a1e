# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache with every option, held to its formula in float64: values of another size, values inside keys, reading again, biases."""

import math

import pytest
import torch
from cache_model import exact_in_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nnfront import ops
from nnfront.backends.cpu.attention import cached
from nnfront.errors import RunError
from nnfront.lower import Buffer, Run, StateLayerType, StateType, Structure, kv_layer
from nnfront.state.contiguous import make_cache

HEADS, GROUPS, SIZE, VALUES, BATCH, ROOM = 4, 2, 6, 4, 2, 24
LATENT = Buffer("latent", (1, SIZE), "float32")


def exact(q, keys, values, position, bias, window, scale, softcap, sinks):
    """One query [heads, size] over keys and values [tokens, groups, ...], bias [heads, tokens] of floats."""
    shared, rows = HEADS // keys.shape[1], []
    for head in range(HEADS):
        scores = {}
        for t in range(position + 1):
            if window is not None and t <= position - window:
                continue
            score = float(q[head] @ keys[t, head // shared]) * scale
            score = score if softcap is None else softcap * math.tanh(score / softcap)
            scores[t] = score + float(bias[head, t])
        weights = {t: math.exp(s) for t, s in scores.items()}
        total = sum(weights.values()) + (0 if sinks is None else math.exp(sinks[head]))
        row = torch.zeros(values.shape[-1], dtype=torch.float64)
        for t, weight in weights.items():
            row += values[t, head // shared] * (weight / total if total else 0)
        rows.append(row)
    return torch.stack(rows)


def attend(by_kernel, layer, q, k, v, sinks, bias, attrs):
    if by_kernel and sinks is None and "softcap" not in attrs:
        return cached(
            Run("attention_stored", "attention", (), Structure(fields=(Structure(0), Structure(1))), attrs)
        )(q, k, v, layer, None, bias)[0]
    return ops.attention.run((q, k, v, layer, sinks, bias), attrs)[0]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_attention_is_its_formula_over_every_storage(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    is_latent, window = draw(st.booleans()), draw(st.sampled_from([None, None, 3]))
    storage = draw(st.sampled_from([{}, {"page_size": 4}, {"stored_as": "float8_e4m3fn"}]))
    type = (
        StateLayerType((LATENT,), (), BATCH, ROOM, window)
        if is_latent
        else kv_layer(GROUPS, SIZE, "float32", BATCH, ROOM, window, value_size=VALUES)
    )
    groups = 1 if is_latent else GROUPS
    cache = make_cache(StateType((type,)), {}, **storage)
    keys, values = (torch.zeros(BATCH, 0, groups, n, dtype=torch.float64) for n in (SIZE, VALUES))
    sinks = torch.randn(HEADS) if draw(st.booleans()) else None
    by_kernel, softcap = draw(st.booleans()), draw(st.sampled_from([None, 2.0]))
    own_window = draw(st.sampled_from([None, 2]))
    attrs = {"scale": 0.4, "window": own_window, "value_size": VALUES if is_latent else None}
    attrs |= {} if softcap is None else {"softcap": softcap}
    if softcap is None and sinks is None and by_kernel:
        attrs = {name: value for name, value in attrs.items() if value is not None}
    else:
        attrs |= {"is_causal": True, "softcap": softcap}
    for seq in draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=4)):
        k, v = (exact_in_codes(BATCH, seq, groups, n) for n in (SIZE, VALUES))
        keys = torch.cat([keys, k.double()], 1)
        values = keys[..., :VALUES] if is_latent else torch.cat([values, v.double()], 1)
        for again in range(draw(st.sampled_from([1, 2]))):
            q = torch.randn(BATCH, seq, HEADS, SIZE)
            shape = [draw(st.sampled_from([1, n])) for n in (BATCH, HEADS, seq)]
            bias = draw(st.sampled_from([None, torch.randn(*shape, ROOM), torch.rand(*shape, ROOM) > 0.3]))
            turned = window is not None and seq > 1 and keys.shape[1] > window and "page_size" not in storage
            if again and turned and by_kernel and "softcap" not in attrs:
                break  # outside of a call nothing is kept for those who read again
            part = (None, None) if again else (k, None if is_latent else v)
            y = attend(by_kernel, cache[0], q, *part, sinks, bias, attrs)
            wide = torch.zeros(BATCH, HEADS, seq, ROOM, dtype=torch.float64)
            if bias is not None:
                wide = wide.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else wide + bias
            limits = [w for w in (window, own_window) if w is not None]
            for row in range(BATCH):
                for i in range(seq):
                    expected = exact(
                        q[row, i].double(), keys[row], values[row], keys.shape[1] - seq + i,
                        wide[row, :, i], min(limits, default=None), 0.4, softcap, sinks,
                    )  # fmt: skip
                    torch.testing.assert_close(y[row, i].double(), expected, rtol=1e-4, atol=1e-4)


def test_reading_again_what_a_ring_has_lost_is_refused():
    cache = make_cache(
        StateType((kv_layer(1, 4, "float32", 1, 16, 3), kv_layer(1, 4, "float32", 1, 16, 3))), {}
    )
    for layer in cache:
        layer.append(*(torch.randn(1, 7, 1, 4) for _ in range(2)))
    with pytest.raises(RunError) as caught:
        cache[0].last_positions(7)
    assert str(caught.value) == (
        "a layer with the window 3 is read again, but of the last 7 tokens some see what it holds no more\n"
        "  what they see besides was kept until the call that appended them was over\n"
        "  help: let the method that appends read again, or give one token at a time"
    )
    assert cache[1].last_positions(7).tolist() == [[0, 1, 2, 3, 4, 5, 6]]


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.count = max(self.count, made.numel())
        return made


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_soft_caps_and_sinks_of_a_prompt_are_computed_block_by_block(data):
    draw = data.draw
    window, storage = draw(st.sampled_from([None, 6, 20])), draw(st.sampled_from([{}, {"page_size": 4}]))
    type = StateType((kv_layer(GROUPS, SIZE, "float32", BATCH, 64, window),))
    blocked, whole = make_cache(type, {}, **storage), make_cache(type, {}, **storage)
    softcap = draw(st.sampled_from([None, 2.0]))
    sinks = torch.randn(HEADS) if softcap is None or draw(st.booleans()) else None
    attrs = {"scale": 0.4, "window": None, "value_size": None, "is_causal": True, "softcap": softcap}
    named = {name: value for name, value in attrs.items() if value is not None}
    by_kernel = cached(Run("attention_cached", "attention", (), Structure(fields=(Structure(0),) * 2), named))
    for seq in draw(st.lists(st.sampled_from([1, 3, 9, 20]), min_size=1, max_size=3)):
        q, k, v = (torch.randn(BATCH, seq, n, SIZE) for n in (HEADS, GROUPS, GROUPS))
        bias = draw(
            st.sampled_from([None, torch.randn(BATCH, 1, seq, 64), torch.rand(1, HEADS, 1, 64) > 0.3])
        )
        with pytest.MonkeyPatch.context() as patch, Largest() as largest:
            patch.setattr("nnfront.backends.cpu.attention.BLOCK", 4)
            y, _ = by_kernel(q, k, v, blocked[0], sinks, bias)
        expected = ops.attention.run((q, k, v, whole[0], sinks, bias), attrs)[0]
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        stored = blocked.length()
        assert largest.count <= max(BATCH * HEADS * 4 * (stored + 1), BATCH * 64 * HEADS * SIZE, q.numel())
        assert blocked.lengths == whole.lengths
