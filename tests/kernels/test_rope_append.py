# SPDX-License-Identifier: Apache-2.0
"""Rotation and appending against float64 loops: every byte of the cache, both layouts, both pairings, and mistakes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from kernel_checks import EPS32, TOLERANCES, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, rope_append
from nnfront_kernels.common import Cost
from nnfront_kernels.rope_append import RopeShape


@dataclass(frozen=True)
class Append:
    """`seq` tokens for each sequence; `before` are the lengths. page 0 is contiguous with `capacity` slots."""

    before: tuple[int, ...]
    seq: int
    heads: int
    kv_heads: int
    size: int
    pairs: int
    page: int = 0
    capacity: int = 40
    interleaved: bool = False
    dtype: str = "float16"
    gap: int = 0
    table: int = 400  # positions that have angles

    def __str__(self) -> str:
        heads = f"{self.heads}of{self.kv_heads}x{self.size}-{self.pairs}pairs"
        return f"{self.before}+{self.seq}-{heads}-page{self.page}-{self.dtype}{'-interleaved' * self.interleaved}-gap{self.gap}"


def append(package: ModuleType, case: Append) -> None:
    """Launch twice on a poisoned cache; AssertionError unless queries and every slot are as the definition says."""
    generator = torch.Generator().manual_seed(case.size + case.seq)
    dtype = getattr(torch, case.dtype)
    batch, total = len(case.before), case.heads + 2 * case.kv_heads

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    qkv = surrounded(normal(batch * case.seq, total * case.size).to(dtype), case.gap, 0).unflatten(
        0, (batch, case.seq)
    )
    angles = normal(case.table, case.pairs) * 3
    cos, sin = (surrounded(f(angles).float(), case.gap, 0) for f in (torch.cos, torch.sin))
    lengths = torch.tensor(case.before, dtype=torch.int32)
    first, slots, pages = batch, case.capacity, None
    if case.page:
        per = -(-(max(case.before) + case.seq) // case.page)
        first, slots = batch * per + 1, case.page
        pages = torch.randperm(first, generator=generator)[: batch * per].reshape(batch, per).int()
        if batch > 2:
            pages[1, 0] = -1  # given away
    rows = first * case.kv_heads * slots
    shape = (first, case.kv_heads, slots)
    store = "k", "v"
    got = launched_twice(
        lambda pattern: [
            Guarded(batch * case.seq * case.heads, case.size, dtype, case.gap, 0, pattern),
            *(Guarded(rows, case.size, dtype, case.gap + 8 * (name == "v"), 0, 0x5A) for name in store),
        ],
        lambda views: package.rope_append.plan(
            qkv,
            cos,
            sin,
            lengths,
            views[1].unflatten(0, shape),
            views[2].unflatten(0, shape),
            pages=pages,
            interleaved=case.interleaved,
            out=views[0].unflatten(0, (batch, case.seq, case.heads)),
            arch="sm_80",
        ),
    )
    poison = torch.full((rows * case.size * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)
    poison = poison.reshape(*shape, case.size)
    expected_k, expected_v, sizes = poison.double(), poison.double(), poison.double().abs()
    expected_q = torch.empty(batch, case.seq, case.heads, case.size, dtype=torch.float64)
    size_q = torch.empty_like(expected_q)
    x = qkv.double().unflatten(2, (total, case.size))
    for b, before in enumerate(case.before):
        for t in range(case.seq):
            p = before + t
            turned, size = turn(x[b, t], cos, sin, p, case)
            expected_q[b, t], size_q[b, t] = turned[: case.heads], size[: case.heads]
            page = b if pages is None else int(pages[b, p // case.page])
            if page < 0 or (pages is None and p >= case.capacity):
                continue
            slot = p if pages is None else p % case.page
            expected_k[page, :, slot] = turned[case.heads : case.heads + case.kv_heads]
            sizes[page, :, slot] = size[case.heads : case.heads + case.kv_heads]
            expected_v[page, :, slot] = x[b, t, case.heads + case.kv_heads :]
    close(got[0], expected_q, size_q)
    close(got[1], expected_k, sizes)
    assert torch.equal(got[2].double(), expected_v.reshape(rows, -1)), "values are not copies"
    if pages is None and max(case.before) + case.seq <= min(case.capacity, case.table):
        stated = package.rope_append.reference(
            qkv, cos, sin, lengths, poison, poison, interleaved=case.interleaved, compute=torch.float64
        )
        for mine, his in zip(got, stated, strict=True):
            unit = TOLERANCES[dtype].unit
            torch.testing.assert_close(mine, his.reshape(mine.shape), rtol=4 * unit, atol=8 * unit)


def close(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    expected = expected.reshape(got.shape)
    assert_close(actual=got, expected=expected, drift=4 * EPS32 * sizes.reshape(got.shape))


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, case: Append
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [all heads, size] with queries and keys rotated pair by pair as complex numbers, and the sizes of the terms."""
    y, size = x.clone(), x.abs()
    if position >= case.table:
        return y, size
    rotated = case.heads + case.kv_heads
    for i in range(case.pairs):
        a, b = (2 * i, 2 * i + 1) if case.interleaved else (i, i + case.pairs)
        z = torch.complex(x[:rotated, a], x[:rotated, b]) * complex(cos[position, i], sin[position, i])
        y[:rotated, a], y[:rotated, b] = z.real, z.imag
        size[:rotated, a] = size[:rotated, b] = x[:rotated, a].abs() + x[:rotated, b].abs()
    return y, size


CASES = [
    Append((0,), 1, 4, 1, 64, 32),
    Append((5, 0, 39), 1, 8, 2, 128, 64, gap=16),
    Append((3, 0), 7, 3, 1, 80, 40, dtype="float32", interleaved=True),
    Append((15, 16, 17), 2, 7, 1, 64, 16, page=16, gap=8),
    Append((0, 63, 64), 3, 4, 4, 96, 24, page=64, interleaved=True, dtype="float32"),
    Append((127, 128, 300), 1, 8, 1, 256, 64, page=128),
    Append((1, 35), 9, 6, 2, 40, 5, gap=3),  # the second sequence ends beyond the capacity
    Append((1, 2), 3, 2, 2, 17, 7, interleaved=True, gap=3),
    Append((2, 0), 4, 9, 3, 32, 16, table=4, dtype="float32"),  # positions without angles
    Append((0, 0), 17, 1, 1, 16, 8, page=16),
]


def append_here(case: Append) -> None:
    append(nnfront_kernels, case)


@pytest.mark.ahead.with_args(append_here)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_turn_and_keys_and_values_are_appended(interpreted, case):
    interpreted(append_here, case)


PAGED = Append((15, 3, 17), 2, 7, 2, 40, 12, page=16, gap=8)
PLAIN = Append((1, 35), 9, 6, 2, 40, 12, gap=3)
MIXED = replace(PLAIN, interleaved=True)
MUTANTS = [
    (Mutant("turned_backwards", "rope_append.py", "(wide_a * cos - wide_b * sin)", "(wide_a * cos + wide_b * sin)"), PLAIN),
    (Mutant("sin_of_the_first_position", "rope_append.py", "position.to(tl.int64) * stride_np", "0 * position.to(tl.int64) * stride_np"), PLAIN),
    (Mutant("values_turned", "rope_append.py", "turns = (v_head < 0)[:, None]", "turns = (v_head < 1)[:, None]"), PLAIN),
    (Mutant("keys_not_turned", "rope_append.py", "turns = (v_head < 0)[:, None]", "turns = (k_head < 0)[:, None]"), PLAIN),
    (Mutant("rest_not_written", "rope_append.py", "        if BLOCK_R:", "        if BLOCK_R < 0:"), PLAIN),
    (Mutant("capacity_ignored", "rope_append.py", "(position < CAPACITY)", "(position < CAPACITY + 9)"), PLAIN),
    (Mutant("one_head_too_many", "rope_append.py", "(v_head < stored)", "(v_head <= stored)"), PLAIN),
    (Mutant("length_ignored", "rope_append.py", "tl.load(lengths_ptr + sequence) + t", "tl.load(lengths_ptr + sequence) * 0 + t"), PLAIN),
    (Mutant("length_of_the_first", "rope_append.py", "tl.load(lengths_ptr + sequence) + t", "tl.load(lengths_ptr) + t"), PLAIN),
    (Mutant("interleaved_pairs_beyond_the_last", "rope_append.py", "POSITIONS, PAIRS, 0)", "POSITIONS, PAIRS + 1, 0)"), MIXED),
    (Mutant("halves_for_neighbours", "rope_append.py", "tl.reshape(tl.join(a, b), (BLOCK_H, 2 * BLOCK_P))", "tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BLOCK_H, 2 * BLOCK_P))"), MIXED),
    (Mutant("page_given_away_written", "rope_append.py", "stored = tl.where(page >= 0, KV_HEADS, 0)", "stored = KV_HEADS"), PAGED),
    (Mutant("first_page_only", "cache.py", "tl.load(row + position // PAGE", "tl.load(row + 0 * position"), PAGED),
    (Mutant("slot_of_a_contiguous_cache", "cache.py", "slot = (position % PAGE)", "slot = position"), PAGED),
    (Mutant("table_of_the_first_sequence", "cache.py", "sequence.to(tl.int64) * stride_pages", "sequence.to(tl.int64) * 0"), PAGED),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Append) -> None:
    append(package(mutant), case)


@pytest.mark.ahead.with_args(run_mutant)
@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
def test_mutant_of_appending_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", [PLAIN, PAGED, MIXED], ids=str)
def test_appending_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"qkv": tensor(2, 3 * 64)}, r"qkv must be \[batch, seq, width\] with adjacent elements, got \[2, 192\]"),
    ({"qkv": tensor(2, 3, 128)}, "qkv must hold query heads and two times 1 heads of 64, got a width of 128 and values of 64"),
    ({"values": tensor(2, 1, 8, 32)}, "got a width of 192 and values of 32"),
    ({"values": tensor(2, 1, 9, 64)}, r"keys and values must agree except for size, got \[2, 1, 8, 64\] and \[2, 1, 9, 64\]"),
    ({"keys": tensor(2, 1, 64, 8).transpose(2, 3)}, r"keys must be \[batch or pages, kv_heads, slots, size\] with adjacent elements"),
    ({"keys": tensor(2, 1, 8, 64, dtype=torch.bfloat16)}, "keys must be torch.float16, got torch.bfloat16"),
    ({"keys": tensor(3, 1, 8, 64), "values": tensor(3, 1, 8, 64)}, "keys must hold 2 sequences, got 3"),
    ({"pages": tensor(2, 4, dtype=torch.int32)}, "a page must hold one of 16, 64, 128 tokens, got 8"),
    ({"pages": tensor(3, 4, dtype=torch.int32), "keys": tensor(2, 1, 16, 64), "values": tensor(2, 1, 16, 64)}, r"pages must be int32 \[2, pages\] with adjacent elements, got torch.int32 \[3, 4\]"),
    ({"lengths": tensor(2, dtype=torch.int64)}, r"lengths must be a dense int32 \[2\], got torch.int64 \[2\]"),
    ({"sin": tensor(9, 31)}, r"sin must have shape \[9, 32\], got \[9, 31\]"),
    ({"cos": tensor(9, 33), "sin": tensor(9, 33)}, "rope_append: 1 to 32 pairs fit in a head of 64, got 33"),
    ({"out": tensor(2, 3, 2, 64)}, r"out must be torch.float16 \[2, 3, 1, 64\] with adjacent elements, got torch.float16 \[2, 3, 2, 64\]"),
    ({"arch": "sm_70"}, "rope_append: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_rope_append_says_what_does_not_fit(changes, message):
    arguments = {
        "qkv": tensor(2, 3, 192),
        "cos": tensor(9, 32),
        "sin": tensor(9, 32),
        "lengths": tensor(2, dtype=torch.int32),
        "keys": tensor(2, 1, 8, 64),
        "values": tensor(2, 1, 8, 64),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        rope_append.plan(**arguments)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"batch": 2**20, "tokens": 2**11}, "there must be less than 2^31 tokens, got 2147483648"),
])  # fmt: skip
def test_rope_append_refuses(changes, message):
    dtype = changes.pop("dtype", "float16")
    shape = replace(RopeShape(1, 1, 1, 1, 64, 32), **changes)
    assert rope_append.accepts(shape, dtype, "sm_90") == message


def test_cost_of_appending_counts_a_row_once():
    # 5 heads of 64 in and out, 32 cosines and sines, a length
    assert rope_append.cost(RopeShape(1, 1, 3, 1, 64, 32), "float16") == Cost(
        6 * 4 * 32, 2 * 2 * 5 * 64 + 8 * 32 + 4
    )
