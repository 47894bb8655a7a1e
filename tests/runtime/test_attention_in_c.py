# SPDX-License-Identifier: Apache-2.0
"""What attention of one token in C does with scores and with values, against float64, and that decoding with it is one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_alone import assert_near, attend, both
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import working

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


@dataclass
class Case:
    """A call of the kernel: what is stored is NaN wherever there is no token, and so is all around the operands."""

    groups: int
    shared: int
    size: int
    value_size: int
    capacity: int
    lengths: list[int]  # with the new token
    appends: bool = True
    has_values: bool = True
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [1 or batch, 1 or heads, 1, positions]

    def __post_init__(self) -> None:
        batch = len(self.lengths)
        self.q = torch.randn(batch, self.groups * self.shared, self.size).to(BF16)
        self.every_key = [torch.randn(self.groups, n, self.size).to(BF16) for n in self.lengths]
        self.every_value = [torch.randn(self.groups, n, self.value_size).to(BF16) for n in self.lengths]
        if not self.has_values:
            self.every_value = [keys[..., : self.value_size] for keys in self.every_key]

    def stored(self, every: list[torch.Tensor]) -> torch.Tensor:
        made = torch.full((len(every), self.groups, self.capacity, every[0].shape[-1]), torch.nan).to(BF16)
        for row, (tokens, length) in enumerate(zip(every, self.lengths, strict=True)):
            for position in range(max(0, length - self.capacity), length - self.appends):
                made[row, :, position % self.capacity] = tokens[:, position]
        return made

    def run(self, threads: int = 2) -> torch.Tensor:
        assert NATIVE is not None
        batch, heads = len(self.lengths), self.groups * self.shared
        keys = self.stored(self.every_key)
        values = self.stored(self.every_value) if self.has_values else None
        k, v = (torch.stack([t[:, -1] for t in every]) for every in (self.every_key, self.every_value))
        y = torch.full((batch, heads, self.value_size), torch.nan).to(BF16)
        bias, next_bias, next_head, positions = self.bias, 0, 0, 0
        if bias is not None:
            bias = bias.contiguous()
            next_bias = bias.stride(0) if len(bias) > 1 else 0
            next_head, positions = (bias.stride(1) if bias.shape[1] > 1 else 0), bias.shape[-1]
        sizes = {"batch": batch, "tokens": 1, "shared": self.shared, "value_size": self.value_size}
        work = working("append_and_attend", sizes | {"threads": threads})
        NATIVE.append_and_attend(
            batch, 1, self.groups, self.shared, self.size, self.value_size, self.capacity, 0, 0, 0,
            heads * self.size, self.groups * self.size, self.groups * self.value_size,
            positions, next_bias, next_head, 0, 0 if bias is None else bias.itemsize,
            self.sinks is not None and self.sinks.dtype == torch.float32, threads,
            self.size**-0.5, self.softcap,
            self.q, k if self.appends else None, v if self.appends and self.has_values else None,
            None, None, None, keys, values,
            torch.tensor(self.lengths, dtype=torch.int32), self.sinks, bias, work, y,
        )  # fmt: skip
        if self.appends:
            for row, length in enumerate(self.lengths):
                assert torch.equal(keys[row, :, (length - 1) % self.capacity], k[row])
                assert values is None or torch.equal(values[row, :, (length - 1) % self.capacity], v[row])
        return y

    def exact(self) -> torch.Tensor:
        """What is expected, and what would be if values had no signs."""
        rows = []
        for row, length in enumerate(self.lengths):
            seen = range(max(0, length - self.capacity), length)
            keys, values = (every[row][:, seen].double() for every in (self.every_key, self.every_value))
            query = self.q[row].double().unflatten(0, (self.groups, -1))
            scores = (query @ keys.mT).flatten(0, 1) * self.size**-0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.bias is not None:
                bias = self.bias[row % len(self.bias), :, 0][:, seen]
                scores = (
                    scores.masked_fill(~bias, -torch.inf)
                    if bias.dtype == torch.bool
                    else scores + bias.double()
                )
            sinks = torch.full((len(scores),), -torch.inf) if self.sinks is None else self.sinks
            weights = torch.cat([scores, sinks.double()[:, None]], -1).softmax(-1)[:, :-1].nan_to_num(0.0)
            rows.append((weights.unflatten(0, (self.groups, -1)) @ both(values)).flatten(1, 2))
        return torch.stack(rows, 1)


def biases(data: st.DataObject, batch: int, heads: int, positions: int) -> torch.Tensor | None:
    kind = data.draw(st.sampled_from([None, torch.float32, BF16, torch.bool]))
    shape = data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])), 1, positions
    if kind is None:
        return None
    return torch.rand(shape) < 0.7 if kind == torch.bool else (2 * torch.randn(shape)).to(kind)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_attention_in_c_agrees_with_float64(data: st.DataObject):
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 15, 127, 129, 260]), min_size=1, max_size=3))
    groups, shared = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 18))
    size = data.draw(st.sampled_from([1, 7, 16, 31, 33, 64, 80, 192]))
    has_values = data.draw(st.booleans())
    value_size = data.draw(st.integers(1, size if not has_values else 70))
    sinks = data.draw(st.sampled_from([None, torch.float32, BF16]))
    case = Case(
        groups, shared, size, value_size, data.draw(st.sampled_from([20, 260, 300])), lengths,
        data.draw(st.booleans()), has_values, data.draw(st.sampled_from([0.0, 0.5, 20.0])),
        None if sinks is None else torch.randn(groups * shared).to(sinks),
        biases(data, len(lengths), groups * shared, 300),
    )  # fmt: skip
    assert_near(case.run(data.draw(st.sampled_from([1, 2, 5]))), *case.exact())


def test_a_latent_is_read_once_for_scores_and_sums():
    case = Case(1, 16, 576, 512, 300, [1, 299, 200], has_values=False)
    assert_near(case.run(), *case.exact())


@pytest.mark.parametrize("groups", [1, 3])
def test_results_do_not_depend_on_threads(groups):
    heads = 4 * groups
    sinks, bias = torch.randn(heads), torch.randn(1, heads, 1, 900)
    case = Case(groups, 4, 72, 40, 900, [857, 31], softcap=3.0, sinks=sinks, bias=bias)
    first = case.run(1)
    assert all(torch.equal(case.run(threads), first) for threads in (2, 3, 6))


def test_a_query_that_sees_nothing_gives_zeros():
    hidden = torch.zeros(1, 1, 1, 400, dtype=torch.bool)
    for threads in (1, 4):
        assert not Case(1, 3, 32, 32, 400, [300], bias=hidden).run(threads).any()
        infinite = torch.full((1, 1, 1, 400), -torch.inf)
        assert not Case(1, 3, 32, 32, 400, [300], bias=infinite).run(threads).any()


def test_what_is_hidden_first_does_not_spoil_what_is_seen_later():
    bias = torch.ones(1, 1, 1, 400, dtype=torch.bool)
    bias[..., :290] = False
    case = Case(1, 3, 32, 32, 400, [300], bias=bias)
    for threads in (1, 4):
        assert_near(case.run(threads), *case.exact())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "heads of at least 1 feature, got 0 and 8"),
        ({"value_size": 0}, "heads of at least 1 feature, got 8 and 0"),
        ({"values": None, "v": None, "value_size": 9}, "values of at most 8 features, got 9"),
        ({"values": None}, "a key with a value, a key whose first features are the value, or neither"),
        ({"v": None}, "a key with a value, a key whose first features are the value, or neither"),
        ({"k": None}, "a key with a value, a key whose first features are the value, or neither"),
        ({"bias_bytes": 3}, "a bias of 1, 2 or 4 bytes, got 3"),
        ({"positions": 2}, "a bias for 3 positions, got 2"),
        (
            {"tokens": 2, "lengths": torch.tensor([1], dtype=torch.int32)},
            "at least 2 tokens in each sequence, got 1",
        ),
        ({"tokens": 2, "capacity": 2}, "one token where newer ones lie over older ones, got 2"),
        ({"key_scales": torch.zeros(4)}, "scales of keys and of values, or of neither"),
        ({"value_scales": torch.zeros(4)}, "scales of keys and of values, or of neither"),
        ({"pages": torch.zeros(1, dtype=torch.int32), "columns": 0, "pool": 1}, "pages for 3 tokens, got 0"),
        ({"pages": torch.ones(1, dtype=torch.int32), "columns": 1, "pool": 1}, "pages below 1, got 1"),
    ],
)
def test_operands_that_make_no_sense_together_are_refused(change, message):
    assert NATIVE is not None
    cache, token = torch.zeros(1, 1, 4, 9).to(BF16), torch.zeros(18).to(BF16)
    sizes = {"batch": 1, "tokens": 1, "groups": 1, "shared": 1, "size": 8, "value_size": 8, "capacity": 4}
    sizes |= {"columns": 0, "pool": 0, "window": 0, "next_q": 0, "next_k": 0, "next_v": 0, "positions": 4}
    sizes |= {"next_bias": 0, "next_bias_head": 0, "next_bias_token": 0}
    sizes |= {"bias_bytes": 4, "has_wide_sinks": 0, "threads": 1, "scale": 1.0, "softcap": 0.0}
    operands: dict[str, Any] = {"q": token, "k": token, "v": token, "pages": None, "key_scales": None}
    operands |= {"value_scales": None, "keys": cache, "values": cache.clone()}
    operands |= {"lengths": torch.tensor([3], dtype=torch.int32), "sinks": None, "bias": torch.zeros(4)}
    operands["work"] = working("append_and_attend", sizes | change)
    with pytest.raises(ValueError, match=f"^{message}$"):
        NATIVE.append_and_attend(*(sizes | operands | {"y": token.clone()} | change).values())
    assert not cache.any()


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
    assert ran == [3, 3, 3]  # rope, attention, and the product with the residual after it
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
