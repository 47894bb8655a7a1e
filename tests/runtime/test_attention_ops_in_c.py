# SPDX-License-Identifier: Apache-2.0
"""Attention with scores and values that are no Llama's, in C: as the references of its ops compute it, in calls of its own and in those of a tape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_alone import assert_near, attend, biases, both
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cpu import decode_attention, in_c, tape, tape_builder
from nnfront.backends.cpu.backend import WRITERS
from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.tape_builder import LayerValue, Place, TapeBuilder, Value
from nnfront.backends.table import resolver
from nnfront.ir.types import Buffer, StateLayerType
from nnfront.lower import Run, Structure, kv_layer
from nnfront.state.lengths import SequenceLengths
from nnfront.state.ring import make_layer

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]
BF16 = torch.bfloat16


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_soft_caps_and_sinks_agree_with_the_reference_of_the_op(data: st.DataObject):
    groups, shared, seq = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
    )
    heads, attrs = groups * shared, {"softcap": data.draw(st.sampled_from([1.0, 30.0]))}
    sinks = data.draw(st.sampled_from([None, torch.randn(heads), torch.randn(heads).to(BF16)]))
    attrs = {} if sinks is not None and data.draw(st.booleans()) else attrs
    attrs |= {"window": data.draw(st.sampled_from([3, 20]))} if data.draw(st.booleans()) else {}
    attend = resolver("cpu")(
        Run("attention_cached", "attention", (), Structure(fields=(Structure(0), Structure(1))), attrs)
    )
    layers = [make_layer(kv_layer(groups, 40, "bfloat16", 2, 16, None)) for _ in range(2)]
    for layer in layers:
        torch.manual_seed(0)
        layer.append(*torch.randn(2, 2, 5, groups, 40).to(BF16))
        layer.set_lengths(SequenceLengths((5, 2)))
    q = torch.randn(2, seq, heads, 40).to(BF16)
    k, v = torch.randn(2, 2, seq, groups, 40).to(BF16)
    y, _ = attend(q, k, v, layers[0], sinks)
    expected, _ = ops.attention.run((q, k, v, layers[1], sinks), attrs)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-2)
    assert torch.equal(layers[0].stored(0), layers[1].stored(0))
    assert layers[0].lengths.values == layers[1].lengths.values


class Layer(nn.Module):
    """Attention as models that are no Llama have it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.qkv = nn.Linear(32, 8 * 16, bias=False, dtype="bfloat16")
        self.out = nn.Linear(4 * 16, 32, bias=False, dtype="bfloat16")
        self.up = nn.Linear(32, 32, bias=False, dtype="bfloat16")
        self.sinks = nn.Parameter((4,), "bfloat16")

    def forward(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache: nn.Cache) -> nn.Tensor:
        batch, seq, _ = x.shape
        q, k, v = op.split(self.qkv(x), (64, 96), -1)
        q, k, v = (op.reshape(t, (batch, seq, heads, 16)) for t, heads in ((q, 4), (k, 2), (v, 2)))
        is_interleaved = self.kind == "neighbours"
        q, k = (op.rope(t, cos, sin, interleaved=is_interleaved) for t in (q, k))
        capped, sinks = {"capped": (2.0, None), "sinks": (None, self.sinks)}.get(self.kind, (None, None))
        y = op.attention(q, k, v, cache[0], sinks, softcap=capped)
        return self.up(x + self.out(op.reshape(y, (batch, seq, 64))))


@pytest.mark.parametrize(
    ("kind", "pairs"), [("capped", 8), ("sinks", 8), ("rotated in part", 3), ("neighbours", 8)]
)
def test_attention_of_other_models_is_part_of_one_call(kind, pairs, monkeypatch):
    x = spec.Tensor(["batch", "seq", 32], "bfloat16")
    angles = spec.Tensor(["batch", "seq", pairs], "float32")
    cache = spec.Cache(1, 2, 16, "bfloat16")
    ir = Layer(kind).export({"forward": {"x": x, "cos": angles, "sin": angles, "cache": cache}})
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    weights = {"qkv.weight": torch.randn(128, 32) / 4, "out.weight": torch.randn(32, 64) / 8}
    weights["up.weight"] = torch.randn(32, 32) / 6
    weights = {name: w.to(BF16) for name, w in {**weights, "sinks": torch.randn(4)}.items()}

    def decoded() -> list[torch.Tensor]:
        torch.manual_seed(0)
        session = executable.load(weights)
        state, found = session.make_cache(batch=2, max_seq=9), []
        for seq in (3, 1, 1):
            table = torch.randn(2, seq, pairs)
            found.append(
                session["forward"](torch.randn(2, seq, 32).to(BF16), table.cos(), table.sin(), state)
            )
        return found

    ran: list[int] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(NATIVE, name)

        def run_sequence(self, rows: torch.Tensor, *memories: Any) -> None:
            ran.extend([len(rows)] * (len(rows) > 1))
            assert NATIVE is not None
            NATIVE.run_sequence(rows, *memories)

    with monkeypatch.context() as patch:
        patch.setattr(tape_builder, "NATIVE", Recorder())
        got = decoded()
    # A product, four for the tables of rope, rope, attention, and the product with the residual after it.
    assert ran == [8, 8, 8]
    with monkeypatch.context() as patch:
        patch.setattr(tape, "NATIVE", None)
        assert all(torch.equal(a, b) for a, b in zip(got, decoded(), strict=True))
        patch.setattr(in_c, "NATIVE", None)
        for a, b in zip(got, decoded(), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=0.03)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_latent_and_a_bias_agree_with_the_reference_token_by_token(data: st.DataObject):
    heads, size = data.draw(st.integers(1, 10)), data.draw(st.sampled_from([16, 40, 96]))
    has_values, window = data.draw(st.booleans()), data.draw(st.sampled_from([None, 3]))
    value_size = data.draw(st.integers(1, size))
    buffers = [Buffer("latent", (1, size), "bfloat16"), Buffer("values", (1, value_size), "bfloat16")]
    layer = make_layer(StateLayerType(tuple(buffers[: 1 + has_values]), (), 2, 9, window))
    bias = biases(data, 2, heads, 9)
    keys, values = torch.randn(2, 6, 1, size).to(BF16), torch.randn(2, 6, 1, value_size).to(BF16)
    values = values if has_values else keys[..., :value_size]
    scores = Scores(0.1, value_size=None if has_values else value_size)
    for n in range(6):
        q = torch.randn(2, 1, heads, size).to(BF16)
        token = values[:, n : n + 1].contiguous() if has_values else None
        y = attend(q, keys[:, n : n + 1].contiguous(), token, layer, scores, None, bias)
        assert y is not None
        seen = slice(0 if window is None else max(0, n + 1 - window), n + 1)
        seen_values = values[:, seen].double()
        expected = [
            ops.scaled_dot_product_attention.run(
                (q.double(), keys[:, seen].double(), part, None if bias is None else mask_of(bias, seen)),
                {"scale": 0.1},
            ).nan_to_num(0.0)
            for part in both(seen_values)
        ]
        assert_near(y, *expected)
    assert layer.lengths.values == (6, 6)


def mask_of(bias: torch.Tensor, seen: slice) -> torch.Tensor:
    part = bias[..., seen]
    return part if bias.dtype == torch.bool else part.double()


def test_a_latent_and_a_bias_can_be_rows_of_a_sequence():
    layer_type = StateLayerType((Buffer("latent", (1, 32), "bfloat16"),), (), 2, 5, None)
    q, k = torch.randn(2, 1, 4, 32).to(BF16), torch.randn(2, 1, 1, 32).to(BF16)
    bias, results = torch.randn(1, 4, 1, 5), []
    run = Run(
        "attention_cached",
        "attention",
        (),
        Structure(fields=(Structure(0), Structure(1))),
        {"value_size": 20},
    )
    builder, layer = TapeBuilder(2, {0: 5 + decode_attention.PLACES}), make_layer(layer_type)
    values = [Value(Place(2 + i), tuple(t.shape), t.dtype) for i, t in enumerate((q, k, bias))]
    WRITERS[run.kernel](builder, run, *values[:2], None, LayerValue(layer, 5), None, values[2])
    assert NATIVE is not None
    one = builder.tape()
    for _ in range(3):
        storage = layer.reserve_tokens(1)
        assert storage is not None
        y = torch.empty(2, 1, 4, 20, dtype=BF16)
        held = decode_attention.places(storage, layer)
        memory = torch.empty(one.size, dtype=torch.uint8)
        NATIVE.run_sequence(one.rows, None, memory, q, k, bias, *held, y)
        results.append(y)
    other = make_layer(layer_type)
    for y in results:
        expected = attend(q, k, None, other, Scores(value_size=20), None, bias)
        assert torch.equal(y, expected)


def test_sinks_of_other_dtypes_are_left_to_the_reference():
    layer = make_layer(kv_layer(1, 32, "bfloat16", 1, 4, None))
    q = k = v = torch.ones(1, 1, 1, 32).to(BF16)
    assert attend(q, k, v, layer, Scores(), torch.ones(1).half()) is None
    assert layer.lengths.values == (0,)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_kernels_of_latents_and_biases_decode_as_the_reference_of_the_op(data: st.DataObject):
    heads, has_values = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    attrs: dict[str, Any] = {"softcap": 5.0} if data.draw(st.booleans()) else {}
    attrs |= {} if has_values else {"value_size": 20}
    buffers = [Buffer("latent", (1, 32), "bfloat16"), Buffer("values", (1, 20), "bfloat16")]
    layers = [make_layer(StateLayerType(tuple(buffers[: 1 + has_values]), (), 2, 9, None)) for _ in range(2)]
    bias = biases(data, 2, heads, 9)
    bias = bias if bias is None or bias.dtype == torch.bool else bias.to(BF16)
    attend = resolver("cpu")(
        Run("attention_stored", "attention", (), Structure(fields=(Structure(0), Structure(1))), attrs)
    )
    for _ in range(3):
        q, k, v = (torch.randn(2, 1, n, size).to(BF16) for n, size in ((heads, 32), (1, 32), (1, 20)))
        value = v if has_values else None
        y, _ = attend(q, k, value, layers[0], None, bias)
        expected, _ = ops.attention.run((q, k, value, layers[1], None, bias), attrs)
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-2)
        assert torch.equal(layers[0].stored(0), layers[1].stored(0))
