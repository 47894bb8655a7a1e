# SPDX-License-Identifier: Apache-2.0
"""Attention in C of many rows at once: a row gives the bits that it gives alone, whatever its neighbours are and wherever its tokens lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from few_of import few_of
from native_calls import working

from nnfront.backends.cpu.extension import NATIVE

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Heads:
    """What attention does; values are the first features of keys if they are `is_latent`."""

    groups: int = 2
    shared: int = 7
    size: int = 64
    value_size: int = 64
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [groups * shared, positions]
    is_latent: bool = False
    is_8_bit: bool = False


@dataclass(frozen=True)
class Cache:
    """Keys, values and scales [groups, pool, capacity, ...], or without pages [sequences, groups, capacity, ...]."""

    parts: tuple[torch.Tensor | None, ...]  # keys, values, scales of keys, scales of values
    pages: torch.Tensor | None  # [rows, columns]

    @classmethod
    def empty(cls, heads: Heads, pool: int, capacity: int, pages: torch.Tensor) -> Cache:
        shape = heads.groups, pool, capacity
        stored = torch.float8_e4m3fn if heads.is_8_bit else BF16
        keys, values = (
            torch.full((*shape, size), torch.nan).to(stored) for size in (heads.size, heads.value_size)
        )
        scales = torch.full(shape, torch.nan) if heads.is_8_bit else None
        if heads.is_latent:
            return cls((keys, None, scales, None), pages)
        return cls((keys, values, scales, None if scales is None else scales.clone()), pages)

    def row(self, i: int) -> Cache:
        assert self.pages is not None
        return replace(self, pages=self.pages[i : i + 1])

    def apart(self) -> Cache:
        """The same with pages of each row's own."""
        assert self.pages is not None
        pages = self.pages.long().flatten()
        parts = tuple(None if t is None else t[:, pages].contiguous() for t in self.parts)
        return Cache(parts, torch.arange(len(pages), dtype=torch.int32).view(self.pages.shape))

    def in_a_row(self) -> Cache:
        """The same without pages."""
        assert self.pages is not None
        pages = self.pages.long()
        parts = (None if t is None else t[:, pages].transpose(0, 1).flatten(2, 3) for t in self.parts)
        return Cache(tuple(None if t is None else t.contiguous() for t in parts), None)


def attend(
    heads: Heads,
    cache: Cache,
    lengths: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    threads: int = 1,
    tokens: int = 1,
) -> torch.Tensor:
    """Attend from q [rows, heads, size] to so many tokens; k and v [rows, groups, size] are stored before."""
    assert NATIVE is not None
    keys, values, key_scales, value_scales = cache.parts
    assert keys is not None
    columns, pool = (0, 0) if cache.pages is None else (cache.pages.shape[1], keys.shape[1])
    y = torch.full((*q.shape[:2], heads.value_size), torch.nan).to(BF16)
    of_bias = (0, 0, 0, 0, 0)
    if heads.bias is not None:
        of_bias = heads.bias.shape[1], 0, heads.bias.stride(0), 0, heads.bias.itemsize
    sizes = {"batch": len(lengths), "tokens": tokens, "shared": heads.shared}
    work = working("append_and_attend", sizes | {"value_size": heads.value_size, "threads": threads})
    NATIVE.append_and_attend(
        len(lengths), tokens, heads.groups, heads.shared, heads.size, heads.value_size, keys.shape[2],
        columns, pool, heads.window, q.stride(0), heads.groups * heads.size, heads.groups * heads.value_size,
        *of_bias, 1, threads, heads.size**-0.5, heads.softcap, q, k, None if heads.is_latent else v,
        cache.pages, key_scales, value_scales, keys, values, lengths, heads.sinks, heads.bias, work, y,
    )  # fmt: skip
    return y


KINDS = {
    "one head": Heads(shared=1),
    "four heads": Heads(shared=4, size=33, value_size=40),
    "seven heads": Heads(),
    "sixteen heads": Heads(groups=1, shared=16, size=80, value_size=7),
    "a window": Heads(window=45),
    "a window of a block": Heads(shared=1, window=128),
    "a window of one": Heads(shared=4, window=1),
    "a soft cap": Heads(shared=3, softcap=3.0),
    "sinks": Heads(sinks=torch.arange(14.0) / 4),
    "a bias": Heads(bias=torch.linspace(-3, 3, 14 * 400).view(14, 400)),
    "8 bits": Heads(shared=4, is_8_bit=True, window=150),
    "a latent": Heads(groups=1, shared=16, size=192, value_size=160, is_latent=True),
    "a latent in 8 bits": Heads(groups=1, shared=9, size=70, value_size=31, is_latent=True, is_8_bit=True),
}
# Tokens that are known, and that are new, of each sequence.
SEQUENCES = (0, 5), (117, 26), (250, 41), (3, 1), (129, 2), (0, 70)
CAPACITY, COLUMNS = 7, 50


def filled(heads: Heads) -> tuple[Cache, torch.Tensor, tuple[torch.Tensor, ...]]:
    """A cache with the known tokens, of a row for each new token; lengths; q, k and v of the new ones."""
    torch.manual_seed(0)
    pages = torch.randperm(len(SEQUENCES) * COLUMNS, dtype=torch.int32).view(len(SEQUENCES), COLUMNS)
    cache = Cache.empty(heads, pages.numel(), CAPACITY, pages)

    def rows(counts: list[tuple[int, int]]) -> tuple[Cache, torch.Tensor, tuple[torch.Tensor, ...]]:
        of = torch.tensor([i for i, (first, end) in enumerate(counts) for _ in range(first, end)])
        lengths = torch.tensor([n + 1 for first, end in counts for n in range(first, end)], dtype=torch.int32)
        shapes = [(heads.groups * heads.shared, heads.size), (heads.groups, heads.size)]
        shapes += [(heads.groups, heads.value_size)]
        q, k, v = (torch.randn(len(of), *shape).to(BF16) for shape in shapes)
        return replace(cache, pages=pages[of]), lengths, (q, k, v)

    known, lengths, tokens = rows([(0, known) for known, _ in SEQUENCES])
    attend(heads, known, lengths, *tokens)
    return rows([(known, known + new) for known, new in SEQUENCES])


@pytest.mark.parametrize("kind", few_of(list(KINDS), 6))
def test_rows_of_several_sequences_at_once_are_those_rows_alone(kind):
    heads = KINDS[kind]
    cache, lengths, (q, k, v) = filled(heads)
    together = attend(heads, cache, lengths, q, k, v)
    assert together.isfinite().all()
    for i in range(len(q)):
        assert torch.equal(
            attend(heads, cache.row(i), lengths[i : i + 1], q[i : i + 1], threads=1 + i % 3),
            together[i : i + 1],
        )
    for threads in (2, 40):
        assert torch.equal(attend(heads, cache, lengths, q, threads=threads), together)
    assert torch.equal(attend(heads, cache.apart(), lengths, q), together)
    assert torch.equal(attend(heads, cache.in_a_row(), lengths, q), together)
    backwards = replace(cache, pages=cache.pages.flip(0))
    assert torch.equal(attend(heads, backwards, lengths.flip(0), q.flip(0)).flip(0), together)


@pytest.mark.parametrize("kind", ["one head", "seven heads", "a window", "a latent"])
def test_tokens_of_a_sequence_in_one_row_are_those_in_rows_of_their_own(kind):
    heads = KINDS[kind]
    cache, lengths, (q, k, v) = filled(heads)
    together = attend(heads, cache, lengths, q, k, v)
    first = 0
    for known, new in SEQUENCES:
        end = first + new
        own, length = cache.row(first), torch.tensor([known + new], dtype=torch.int32)
        assert torch.equal(attend(heads, own, length, q[first:end], tokens=new), together[first:end])
        first = end


@pytest.mark.parametrize("kind", ["one head", "seven heads", "a window", "a bias"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_token_that_is_no_number_does_not_reach_those_before_it(kind, what):
    heads = KINDS[kind]
    cache, lengths, (q, k, v) = filled(heads)
    expected = attend(heads, cache, lengths, q, k, v)
    first = 0
    for _, new in SEQUENCES:
        for bad in range(first + 1, first + min(new, 4)):
            spoilt = v.clone()
            spoilt[bad] = what
            y = attend(heads, cache, lengths, q, k, spoilt)
            assert torch.equal(y[first:bad], expected[first:bad])
            assert not y[bad].isfinite().any()
        first += new


def test_pages_that_no_query_reads_may_differ():
    heads = Heads(window=20)
    cache, lengths, (q, k, v) = filled(heads)
    expected = attend(heads, cache, lengths, q, k, v)
    pages = cache.pages.clone()
    for row, length in zip(pages, lengths.tolist(), strict=True):
        row[: max(0, length - 20) // CAPACITY] = -1
        row[-(-length // CAPACITY) :] = -1
    assert torch.equal(attend(heads, replace(cache, pages=pages), lengths, q), expected)


def test_blocks_that_threads_share_are_joined_a_few_at_a_time():
    heads = Heads(groups=1, shared=128, size=512, value_size=512, is_latent=True)
    keys = torch.randn(1, 1, 2600, 512).to(BF16)
    cache = Cache((keys, None, None, None), None)
    q, length = torch.randn(1, 128, 512).to(BF16), torch.tensor([2551], dtype=torch.int32)
    assert torch.equal(attend(heads, cache, length, q, threads=4), attend(heads, cache, length, q))
