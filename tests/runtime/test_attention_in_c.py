# SPDX-License-Identifier: Apache-2.0
"""What attention of one token in C does with scores and with values, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_alone import assert_near, biases, both
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import working

from nnfront.backends.cpu.extension import NATIVE

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
    sign: float = 1.0  # of the scale

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
            self.sign * self.size**-0.5, self.softcap,
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
            scores = (query @ keys.mT).flatten(0, 1) * self.sign * self.size**-0.5
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
        biases(data, len(lengths), groups * shared, 300), data.draw(st.sampled_from([1.0, -1.0, 0.0])),
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
