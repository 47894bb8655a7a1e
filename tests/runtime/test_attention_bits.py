# SPDX-License-Identifier: Apache-2.0
"""Attention in C has one order of sums: a token's result is the same bits in a row, in a ring and in pages, alone and beside others, one token at a
time and several in a call; what is in 8 bits is what torch would store and attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_alone import attend
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.extension import NATIVE
from nnfront.ir.types import Buffer, StateLayerType, StateType
from nnfront.state.cache import Cache
from nnfront.state.contiguous import make_cache

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]
BF16, ROOM = torch.bfloat16, 560
FLOAT8 = "float8_e4m3fn"
LAST = 24  # tokens of a sequence that are held to those that attend alone


@dataclass
class Attending:
    """A kind of attention, and tokens [sequences, tokens, heads, size] that go through it."""

    groups: int
    shared: int
    size: int
    value_size: int
    has_values: bool
    window: int | None
    own_window: int | None
    softcap: float | None
    has_sinks: bool
    has_bias: bool
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        batch, heads, longest = len(self.lengths), self.groups * self.shared, max(self.lengths)
        self.q = torch.randn(batch, longest, heads, self.size).to(BF16)
        self.k = torch.randn(batch, longest, self.groups, self.size).to(BF16)
        self.v = torch.randn(batch, longest, self.groups, self.value_size).to(BF16)
        self.sinks = torch.randn(heads) if self.has_sinks else None
        self.bias = torch.randn(batch, heads, longest, ROOM) if self.has_bias else None
        value_size = None if self.has_values else self.value_size
        self.scores = Scores(self.size**-0.5, self.own_window, self.softcap, value_size)

    def cache(self, batch: int, page_size: int | None, stored_as: str | None) -> Cache:
        buffers = [Buffer("keys", (self.groups, self.size), "bfloat16")]
        buffers += [Buffer("values", (self.groups, self.value_size), "bfloat16")] * self.has_values
        layer = StateLayerType(tuple(buffers), (), batch, ROOM, self.window)
        sizes = {"batch": batch, "max_seq": ROOM}
        return make_cache(
            StateType((layer,)), sizes, "cpu", pages=None, page_size=page_size, stored_as=stored_as
        )

    def fill(self, cache: Cache, row: int, sequence: int, length: int) -> None:
        """Store tokens without attending, a page and a bit at a time, so that pages of sequences lie between each other."""
        layer = cache.rows(row)[0]
        for first in range(layer.lengths.values[0], length, 37):
            part = slice(first, min(first + 37, length))
            layer.append(*(t[sequence : sequence + 1, part] for t in (self.k, self.v)[: 1 + self.has_values]))
        layer.release()

    def attend(
        self, cache: Cache, sequences: Sequence[int], first: Sequence[int], count: int
    ) -> torch.Tensor:
        """Tokens from `first` on of each sequence, in one call."""
        q, k, v = (
            torch.stack([t[s, f : f + count] for s, f in zip(sequences, first, strict=True)])
            for t in (self.q, self.k, self.v)
        )
        bias = None
        if self.bias is not None:
            bias = torch.stack(
                [self.bias[s, :, f : f + count] for s, f in zip(sequences, first, strict=True)]
            )
        y = attend(q, k, v if self.has_values else None, cache[0], self.scores, self.sinks, bias)
        assert y is not None
        return y

    def alone(self, sequence: int, stored_as: str | None) -> torch.Tensor:
        """The last `LAST` tokens of a sequence, by itself in a row, one after the other."""
        cache, length = self.cache(1, None, stored_as), self.lengths[sequence]
        self.fill(cache, 0, sequence, length - LAST)
        tokens = [self.attend(cache, [sequence], [n], 1) for n in range(length - LAST, length)]
        return torch.cat(tokens, 1)[0]


@st.composite
def attendings(draw: Any) -> Attending:
    has_values = draw(st.booleans())
    size = draw(st.sampled_from([16, 33, 64, 80]))
    value_size = draw(st.sampled_from([16, 40, 64])) if has_values else draw(st.sampled_from([8, 16]))
    return Attending(
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 7, 9])),
        size,
        value_size,
        has_values,
        draw(st.sampled_from([None, 50, 300])),
        draw(st.sampled_from([None, 20, 70])),
        draw(st.sampled_from([None, 4.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.lists(st.sampled_from([25, 64, 130, 257, 300, 540]), min_size=1, max_size=3)),
    )


@settings(max_examples=8, deadline=None)
@given(
    case=attendings(),
    page_size=st.sampled_from([None, 8, 16, 128]),
    stored_as=st.sampled_from([None, FLOAT8]),
    count=st.sampled_from([1, 2, 8, LAST]),
    threads=st.sampled_from([1, 2]),
)
def test_a_token_is_the_same_bits_in_a_row_and_in_pages_alone_and_beside_others_and_in_longer_calls(
    case: Attending, page_size: int | None, stored_as: str | None, count: int, threads: int
) -> None:
    if page_size is None and case.window is not None:
        count = 1  # of a ring
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = range(len(case.lengths))
        cache = case.cache(len(rows), page_size, stored_as)
        for i in rows:
            for part in range(0, case.lengths[i] - LAST, 90):
                case.fill(cache, i, i, min(part + 90, case.lengths[i] - LAST))
        for i in rows:
            case.fill(cache, i, i, case.lengths[i] - LAST)
        calls = [
            case.attend(cache, rows, [case.lengths[i] - LAST + n for i in rows], count)
            for n in range(0, LAST, count)
        ]
    finally:
        torch.set_num_threads(before)
    together = torch.cat(calls, 1)
    for i in rows:
        assert torch.equal(together[i], case.alone(i, stored_as))


@settings(max_examples=8, deadline=None)
@given(case=attendings(), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_c_stores_the_codes_of_8_bits_that_torch_does(case: Attending, scale: float) -> None:
    case.k, case.v = case.k * scale, case.v * scale
    case.k[0, 0, 0] = 0
    mine, theirs = case.cache(1, None, FLOAT8), case.cache(1, None, FLOAT8)
    for n in range(min(4, case.lengths[0])):
        case.attend(mine, [0], [n], 1)
        case.fill(theirs, 0, 0, n + 1)
    for a, b in zip(mine[0].storage.tensors(), theirs[0].storage.tensors(), strict=True):
        a, b = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (a, b))
        assert torch.equal(a, b)


def test_every_code_of_8_bits_is_decoded_as_torch_decodes_it():
    case = Attending(1, 1, 1, 1, True, None, None, None, False, False, [9])
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 3.7e-5):
        for code in codes[(codes & 0x7F) != 0x7F]:
            cache = case.cache(1, None, FLOAT8)
            case.fill(cache, 0, 0, 1)
            layer = cache[0]
            layer.storage.values.view(torch.uint8)[0, 0, 0] = code
            layer.storage.scales[1][0, 0, 0] = scale
            expected = layer.stored(1)[0, 0, 0].clone()
            q = torch.full((1, 1, 1, 1), 1.0).to(BF16)
            hidden = torch.zeros(1, 1, 1, ROOM, dtype=torch.bool)
            hidden[..., 0] = True
            y = attend(q, q, q, layer, case.scores, None, hidden)
            assert y is not None
            assert torch.equal(y.flatten(), expected)


def test_a_page_that_is_not_there_is_refused():
    case = Attending(1, 1, 16, 16, True, None, None, None, False, False, [20])
    cache = case.cache(1, 8, None)
    case.fill(cache, 0, 0, 12)
    cache.tables[0].pages_tensor[0, 0] = 1000  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^pages below 70, got 1000$"):
        case.attend(cache, [0], [12], 1)
