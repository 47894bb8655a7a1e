# SPDX-License-Identifier: Apache-2.0
"""Rope, cache and attention of one token in C, against float64 and against the way without C."""

from pathlib import Path

import pytest
import torch
from attention_alone import assert_near, attend, attend_rotated, both
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import ops
from nnfront.backends.cpu import in_c
from nnfront.backends.cpu import tape as sequence
from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure, kv_layer
from nnfront.state.lengths import SequenceLengths
from nnfront.state.ring import RingLayer, make_layer

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")

CHECKPOINT = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


def make_filled(lengths: list[int], groups: int, size: int, max_seq: int, window: int | None) -> RingLayer:
    """A layer with random tokens, and NaN wherever there is none."""
    layer = make_layer(kv_layer(groups, size, "bfloat16", len(lengths), max_seq, window))
    for part in (layer.storage.keys, layer.storage.values):
        part.fill_(torch.nan)
        for row, length in enumerate(lengths):
            part[row, :, :length] = torch.randn(groups, length, size)
    layer.set_lengths(SequenceLengths(tuple(lengths)))
    return layer


def exact(q, layer: RingLayer, window: int | None, scale: float) -> torch.Tensor:
    """Attention of the last token over what a window shows of each sequence, in float64, and what it would be if values had no signs."""
    storage, rows = layer.storage, []
    for row, length in enumerate(layer.lengths.values):
        seen = slice(max(0, length - window) if window else 0, length)
        keys, values = (part[row, :, seen].double() for part in (storage.keys, storage.values))
        query = q[row, 0].double().unflatten(0, (keys.shape[0], -1))
        weights = torch.softmax(query @ keys.mT * scale, -1)
        rows.append((weights @ both(values)).flatten(1, 2))
    return torch.stack(rows, 1)[:, :, None]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_attention_of_one_token_agrees_with_float64(data: st.DataObject):
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 15, 127, 128, 129, 300]), min_size=1, max_size=3))
    groups, shared = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 18))
    size = data.draw(st.sampled_from([1, 15, 32, 64, 80, 96, 128, 160, 256, 288]))
    window = data.draw(st.sampled_from([None, 1, 16, 200]))
    scale = data.draw(st.sampled_from([None, 0.03, 1.0]))
    layer = make_filled(lengths, groups, size, 400, None)
    batch, heads = len(lengths), groups * shared
    q, k, v = torch.randn(batch, 1, heads + 2 * groups, size).bfloat16().split((heads, groups, groups), 2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2, 5])))
        y = attend(q, k, v, layer, Scores(scale, window))
    finally:
        torch.set_num_threads(threads)
    assert y is not None
    assert layer.lengths.values == tuple(length + 1 for length in lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(layer.storage.keys[row, :, length], k[row, 0])
        assert torch.equal(layer.storage.values[row, :, length], v[row, 0])
    assert_near(y, *exact(q, layer, window, size**-0.5 if scale is None else scale))


def test_scores_far_apart_leave_one_weight():
    layer = make_filled([200], 1, 32, 300, None)
    layer.storage.keys[0, 0, :200] *= 1000
    q, k, v = (
        torch.randn(1, 1, 4, 32).bfloat16(),
        torch.zeros(1, 1, 1, 32).bfloat16(),
        torch.zeros(1, 1, 1, 32),
    )
    y = attend(q, k, v.bfloat16(), layer, Scores(1.0, None))
    torch.testing.assert_close(y.double(), exact(q, layer, None, 1.0)[0], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_what_is_no_number_is_not_hidden(where: str, value: float):
    layer = make_filled([9], 1, 32, 16, None)
    getattr(layer.storage, where)[0, 0, 4, 3] = value
    q, k, v = torch.ones(1, 1, 3, 32).bfloat16().split(1, 2)
    y = attend(q, k, v, layer, Scores())
    assert not y.isfinite().all()


@pytest.mark.parametrize(("size", "dtype"), [(32, "float32"), (4096, "bfloat16")])
def test_what_the_kernel_cannot_do_changes_nothing(size: int, dtype: str):
    layer = make_layer(kv_layer(1, size, dtype, 1, 16, None))
    q = k = v = torch.ones(1, 1, 1, size, dtype=getattr(torch, dtype))
    assert attend(q, k, v, layer, Scores()) is None
    assert layer.lengths.values == (0,)


def test_a_full_layer_is_left_to_the_general_way():
    q = k = v = torch.ones(1, 1, 1, 32).bfloat16()
    layer = make_layer(kv_layer(1, 32, "bfloat16", 1, 4, None))
    for _ in range(4):
        assert attend(q, k, v, layer, Scores()) is not None
    assert attend(q, k, v, layer, Scores()) is None
    assert layer.lengths.values == (4,)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_newer_tokens_lie_over_older_ones_that_no_query_sees(data: st.DataObject):
    window, groups, shared = (
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 3)),
    )
    starts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    batch, size, count = len(starts), 32, data.draw(st.integers(1, 25))
    ring = make_layer(kv_layer(groups, size, "bfloat16", batch, 70, window))
    every = make_layer(kv_layer(groups, size, "bfloat16", batch, 70, None))
    for row, start in enumerate(starts):
        if start:
            k, v = torch.randn(2, 1, start, groups, size).bfloat16()
            for layer in (ring.part(row, 1), every.part(row, 1)):
                layer.append(k, v)
                layer.release()  # what a chunk saw that turned the ring over
    for _ in range(count):
        q, k, v = (
            torch.randn(batch, 1, groups * (shared + 2), size)
            .bfloat16()
            .split((groups * shared, groups, groups), 2)
        )
        own = data.draw(st.sampled_from([None, max(window - 3, 1), window, window + 3]))
        y = attend(q, k, v, ring, Scores(1.0, own))
        every.append(k, v)
        assert y is not None
        assert_near(y, *exact(q, every, min(window, own or window), 1.0))
    assert ring.lengths.values == every.lengths.values


def test_some_sequences_of_a_cache_attend_without_the_others():
    layer = make_filled([3, 7, 5], 2, 64, 16, None)
    part = layer.part(1, 2)
    q, k, v = torch.randn(2, 1, 10, 64).bfloat16().split((6, 2, 2), 2)
    y = attend(q, k, v, part, Scores())
    assert layer.lengths.values == (3, 8, 6)
    assert y is not None
    assert_near(y, *exact(q, part, None, 0.125))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_q_and_k_of_a_fused_projection_are_rotated_before(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    heads, groups, size = data.draw(st.sampled_from([(1, 1, 32), (6, 2, 64), (3, 3, 80), (9, 1, 128)]))
    pairs = data.draw(st.sampled_from([size // 2, 1, 5, size // 4]))
    is_interleaved = data.draw(st.booleans())
    batch, tables = len(lengths), data.draw(st.sampled_from([1, len(lengths)]))
    layer = make_filled(lengths, groups, size, 16, None)
    qkv = torch.randn(batch, 1, (heads + 2 * groups) * size).bfloat16()
    angles = torch.randn(tables, 1, pairs)
    make = resolver("cpu")(
        Run("rope_tables", "rope", (), Structure(), {"dtype": "float32", "interleaved": is_interleaved})
    )
    cos, sin = make(angles.cos(), angles.sin())
    y = attend_rotated(qkv, cos, sin, heads, groups, layer, Scores(), is_interleaved=is_interleaved)

    x = qkv.double().unflatten(-1, (-1, size))
    tables = angles.double().cos(), angles.double().sin()
    rotated = ops.rope.run((x, *tables), {"interleaved": is_interleaved})
    q, k = rotated[:, :, :heads], rotated[:, :, heads : heads + groups]
    for row, length in enumerate(lengths):
        stored = layer.storage.keys[row, :, length].double()
        assert ((stored - k[row, 0]).abs() <= k[row, 0].abs() * 2**-8 + 1e-6).all()
        assert torch.equal(layer.storage.values[row, :, length].double(), x[row, 0, heads + groups :])
    # Queries are rounded too, so weights are off by what that changes of scores of some size.
    expected = exact(q, layer, None, size**-0.5)[0]
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=0.05)
    rounded = exact(q.bfloat16(), layer, None, size**-0.5)[0]
    assert ((y.double() - rounded).abs() <= rounded.abs() * 2**-8 + 0.02).all()


def test_fused_projections_with_other_tables_or_dtypes_are_left_to_others():
    layer, table = make_filled([1], 1, 32, 4, None), torch.ones(1, 1, 1, 32)
    qkv = torch.ones(1, 1, 96).bfloat16()
    for x, cos in (
        (qkv.float(), table),
        (qkv, table.double()),
        (qkv, table.repeat(1, 2, 1, 1)),
    ):
        assert attend_rotated(x, cos, cos, 1, 1, layer, Scores()) is None
    assert layer.lengths.values == (1,)


def test_what_lies_in_pieces_is_read_as_what_lies_in_one():
    one, qkv = torch.rand(1, 1, 1, 1), torch.randn(2, 1, 96).bfloat16()
    pieces, whole = one.expand(2, 1, 1, 32), one.expand(2, 1, 1, 32).contiguous()
    every_second = torch.stack([qkv, torch.full_like(qkv, torch.nan)], -1).flatten(-2)[..., ::2]
    results = []
    for x, cos, sin in ((qkv, whole, whole), (qkv, pieces, whole), (every_second, whole, pieces)):
        layer = make_filled([1, 1], 1, 32, 4, None)
        layer.storage.keys[:, :, :1], layer.storage.values[:, :, :1] = 1, 2
        results.append(attend_rotated(x, cos, sin, 1, 1, layer, Scores()))
        assert layer.lengths.values == (2, 2)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_without_c_there_is_another_way(monkeypatch):
    monkeypatch.setattr(in_c, "NATIVE", None)
    q = k = v = torch.ones(1, 1, 1, 32).bfloat16()
    qkv, table, layer = (
        torch.ones(1, 1, 96).bfloat16(),
        torch.ones(1, 1, 1, 32),
        make_filled([1], 1, 32, 4, None),
    )
    assert attend_rotated(qkv, table, table, 1, 1, layer, Scores()) is None
    assert attend(q, k, v, layer, Scores()) is None
    assert layer.lengths.values == (1,)


def test_a_model_decodes_with_c_as_without(monkeypatch):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]

    def logits(batch: list[list[int]]) -> list[torch.Tensor]:
        """Of a prompt of some tokens and then 20 tokens one at a time, the same tokens for all ways."""
        session = nn.LLM.load(CHECKPOINT).session
        cache = session.make_cache(batch=len(batch), max_seq=64)
        tokens = torch.arange(100, 120)
        found = [session["prefill"](torch.tensor(batch), cache)]
        return found + [session["decode"](token.expand(len(batch), 1), cache) for token in tokens]

    for batch in (prompts[:1], [prompts[1], prompts[1][::-1]]):
        with_c = logits(batch)
        with monkeypatch.context() as without:
            without.setattr(sequence, "NATIVE", None)
            without.setattr(in_c, "NATIVE", None)
            without_c = logits(batch)
        for got, expected in zip(with_c, without_c, strict=True):
            assert not torch.equal(got, torch.zeros_like(got))
            torch.testing.assert_close(got, expected, rtol=0, atol=0.02 * expected.abs().max().item())
        assert not all(torch.equal(a, b) for a, b in zip(with_c, without_c, strict=True))  # C was at work


def test_tensors_of_another_device_are_left_to_torch():
    rotate = resolver("cpu")(Run("rope_rotated", "rope", (), Structure(0), {}))
    x = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    table = torch.empty(1, 2, 1, 64, device="meta")
    assert rotate(x, table, table).is_meta
    whole = [torch.ones(1, 2, 1, 64)] * 2
    assert torch.equal(rotate(torch.ones_like(x, device="cpu"), *whole), torch.full(x.shape, 2.0).bfloat16())
