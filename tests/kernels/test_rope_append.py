# SPDX-License-Identifier: Apache-2.0
"""Rotation and appending against float64 loops: every byte of the cache, both layouts, both pairings, and mistakes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, TOLERANCES, Guarded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from kernel_rope import angles, close, projected, turned
from nnfront_kernels import KernelError, rope_append
from nnfront_kernels.common import Plan


@dataclass(frozen=True)
class Append:
    """`seq` tokens for each sequence; `before` are the lengths. page 0 is contiguous with `capacity` slots, 0 pairs are no
    rotation, value_size 0 is size.
    """

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
    value_size: int = 0
    shared: bool = False  # angles are the same for all sequences
    fused: bool = True
    fp8: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}of{self.kv_heads}x{self.size}-{self.pairs}pairs"
        flags = "".join(
            f"-{name}{int(getattr(self, name))}"
            for name in ("interleaved", "page", "gap", "value_size", "shared", "fused", "fp8")
            if getattr(self, name)
        )
        return f"{self.before}+{self.seq}-{heads}-{self.dtype}{flags}"


def append(package: ModuleType, case: Append) -> None:
    """Launch twice on a poisoned cache; AssertionError unless queries and every slot are as the definition says."""
    generator = torch.Generator().manual_seed(case.size + case.seq)
    dtype = getattr(torch, case.dtype)
    batch, sizes = len(case.before), (case.size, case.value_size or case.size)
    parts = ((case.heads, case.size), (case.kv_heads, sizes[0]), (case.kv_heads, sizes[1]))
    q, k, v = projected(generator, batch, case.seq, parts, dtype, case.gap, case.fused)
    tables = (None, None)
    if case.pairs:
        tables = angles(generator, 1 if case.shared else batch, case.seq, case.pairs, case.gap)
    lengths = torch.tensor(case.before, dtype=torch.int32)
    first, slots, pages = batch, case.capacity, None
    if case.page:
        per = -(-(max(case.before) + case.seq) // case.page)
        first, slots = batch * per + 1, case.page
        pages = torch.randperm(first, generator=generator)[: batch * per].reshape(batch, per).int()
        if batch > 2:
            pages[1, 0] = -1  # given away
    rows, shape = first * case.kv_heads * slots, (first, case.kv_heads, slots)
    if case.fp8:
        k[0, 0, 0] = 0  # has scale 1
    kind = torch.float8_e4m3fn if case.fp8 else dtype

    def planned(views: list[torch.Tensor]) -> Plan:
        keys, values = (view.unflatten(0, shape) for view in views[:2])
        options = {"pages": pages, "interleaved": case.interleaved, "arch": "sm_80"}
        if case.fp8:
            scales = [view.unflatten(0, shape)[..., 0] for view in views[2:4]]
            options |= dict(zip(("key_scales", "value_scales"), scales, strict=True))
        if case.pairs:
            options["out"] = views[-1].unflatten(0, (batch, case.seq, case.heads))
        return package.rope_append.plan(q, k, v, *tables, lengths, keys, values, **options)

    got = launched_twice(
        lambda pattern: [
            *(Guarded(rows, size, kind, case.gap + 8 * at, 0, 0x5A) for at, size in enumerate(sizes)),
            *(Guarded(rows, 1, torch.float32, 0, 0, 0x5A) for _ in sizes if case.fp8),
            *[Guarded(batch * case.seq * case.heads, case.size, dtype, case.gap, 0, pattern)]
            * bool(case.pairs),
        ],
        planned,
    )
    poison = [
        torch.full((rows * size * kind.itemsize,), 0x5A, dtype=torch.uint8).view(kind).reshape(*shape, size)
        for size in sizes
    ]
    scales = (
        dict(zip(("key_scales", "value_scales"), [poison_of(shape)] * 2, strict=True)) if case.fp8 else {}
    )
    turned_k, size_k = turned(k, *tables, case.interleaved) if case.pairs else (k.double(), k.double().abs())
    if case.fp8:
        where = places(case, batch, slots, pages)
        for index, (exact, terms) in enumerate(((turned_k, size_k), (v.double(), v.double().abs()))):
            codes, its_scales = got[index].reshape(*shape, -1), got[2 + index].reshape(shape)
            in_8_bits(codes, its_scales, exact, terms, where)
    else:
        as_they_are(case, got, poison, (turned_k, size_k), v, places(case, batch, slots, pages))
    stated_q, *stated = package.rope_append.reference(
        q,
        k,
        v,
        *tables,
        lengths,
        *poison,
        pages=pages,
        **scales,
        interleaved=case.interleaved,
        compute=torch.float64,
    )
    if case.pairs:
        close(got[-1], *turned(q, *tables, case.interleaved))
        stated.append(stated_q)
    for mine, his in zip(got, stated, strict=True):
        unit = 2.0**-4 if mine.dtype == kind and case.fp8 else TOLERANCES[mine.dtype].unit
        near = {"rtol": 4 * unit, "atol": 8 * unit, "equal_nan": True}
        torch.testing.assert_close(mine.float(), his.reshape(mine.shape).float(), **near)


def poison_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full((4 * math.prod(shape),), 0x5A, dtype=torch.uint8).view(torch.float32).reshape(shape)


def places(
    case: Append, batch: int, slots: int, pages: torch.Tensor | None
) -> dict[tuple[int, int], tuple[int, int]]:
    """Page and slot of each (sequence, token) that is stored."""
    found = {}
    for b, before in enumerate(case.before):
        for t in range(case.seq):
            row, slot = divmod(before + t, slots)
            page = int(pages[b, row]) if pages is not None else b if row == 0 else -1
            if page >= 0:
                found[b, t] = page, slot
    return found


def as_they_are(
    case: Append,
    got: list[torch.Tensor],
    poison: list[torch.Tensor],
    turned_k: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    where: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Keys are rounded once, values are copies, other slots are untouched."""
    expected_k, expected_v = (p.double() for p in poison)
    terms_k = expected_k.abs()
    for (b, t), (page, slot) in where.items():
        expected_k[page, :, slot], terms_k[page, :, slot] = (x[b, t] for x in turned_k)
        expected_v[page, :, slot] = v[b, t].double()
    close(got[0], expected_k, terms_k)
    assert torch.equal(got[1].double(), expected_v.reshape(got[1].shape)), "values are not copies"


def in_8_bits(
    codes: torch.Tensor,
    scales: torch.Tensor,
    exact: torch.Tensor,
    terms: torch.Tensor,
    where: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Codes times scales are within half a step of e4m3, scales are the largest magnitudes / 448, other slots are untouched."""
    untouched = torch.ones(scales.shape, dtype=torch.bool)
    for (b, t), (page, slot) in where.items():
        untouched[page, :, slot] = False
        scale, x = scales[page, :, slot].double(), exact[b, t]
        drift = 4 * EPS32 * terms[b, t]
        wanted = torch.where(x.abs().amax(-1) == 0, 1.0, x.abs().amax(-1) / 448)
        assert ((scale - wanted).abs() <= drift.amax(-1) / 448 + 2 * EPS32 * wanted).all(), "scales are off"
        error = (codes[page, :, slot].double() * scale[:, None] - x).abs()
        # Three bits of mantissa, and a smallest step of 2^-9.
        bound = 2.0**-4 * x.abs() + 2.0**-10 * scale[:, None] + 2 * drift + 4 * EPS32 * x.abs()
        assert (error <= bound).all(), "codes are off"
    assert (codes.view(torch.uint8)[untouched] == 0x5A).all(), "codes of other slots are written"
    assert torch.equal(scales[untouched], poison_of(scales.shape)[untouched]), (
        "scales of other slots are written"
    )


CASES = [
    Append((0,), 1, 4, 1, 64, 32),
    Append((5, 0, 39), 1, 8, 2, 128, 64, gap=16, shared=True),
    Append((3, 0), 3, 3, 1, 80, 40, dtype="float32", interleaved=True),
    Append((15, 16, 17), 2, 7, 1, 64, 16, page=16, gap=8),
    Append((0, 63, 64), 3, 4, 4, 96, 24, page=64, interleaved=True, dtype="float32", fused=False),
    Append((127, 128, 300), 1, 8, 1, 256, 64, page=128),
    Append((1, 37), 4, 6, 2, 40, 5, gap=3),  # the second sequence ends beyond the capacity
    Append((1, 2), 3, 2, 2, 17, 7, interleaved=True, gap=3),
    Append((3, 17), 2, 4, 4, 192, 32, page=16, value_size=128),
    Append((0, 38), 3, 5, 3, 24, 0, value_size=17, fused=False),  # no rotation
    Append((15, 3, 17), 2, 2, 1, 64, 0, page=16, dtype="float32"),
    Append((0, 13), 5, 1, 1, 16, 8, page=16),
    Append((2,), 2, 20, 18, 16, 4, gap=8),  # more heads than a block has
    Append((3, 38), 4, 4, 2, 64, 24, fp8=True, gap=16),
    Append((15, 3, 17), 2, 3, 3, 80, 40, page=16, value_size=64, fp8=True, interleaved=True, dtype="float32"),
    Append((64,), 2, 2, 2, 128, 0, page=64, fp8=True),
]


def append_here(case: Append) -> None:
    append(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_queries_turn_and_keys_and_values_are_appended(interpreted, case):
    interpreted(append_here, case)


PAGED = Append((15, 3, 17), 2, 7, 2, 40, 12, page=16, gap=8)
PLAIN = Append((1, 38), 3, 6, 2, 40, 12, gap=3)
MANY = Append((2, 1), 2, 18, 17, 16, 4, gap=3)
STILL = replace(PAGED, pairs=0, value_size=24)
MUTANTS = [
    (Mutant("key_turned_by_the_first_token", "rope_append.py", "row_of(sin_ptr, sequence, t,", "row_of(sin_ptr, sequence, 0 * t,"), PLAIN),
    (Mutant("angles_of_the_first_sequence", "rope_append.py", "row_of(cos_ptr, sequence, t,", "row_of(cos_ptr, 0 * sequence, t,"), PLAIN),
    (Mutant("values_turned", "rope_append.py", "None, None, SIZE_V, 0, False, BLOCK_H, 1, BLOCK_V", "cos_row, sin_row, SIZE_V, PAIRS, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R"), PLAIN),
    (Mutant("keys_not_turned", "rope_append.py", "head < KV_HEADS, cos_row, sin_row, SIZE, PAIRS, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R", "head < KV_HEADS, cos_row, sin_row, SIZE, 0, INTERLEAVED, BLOCK_H, BLOCK_P, 64"), PLAIN),
    (Mutant("capacity_ignored", "rope_append.py", "position < CAPACITY", "position < CAPACITY + 9"), PLAIN),
    (Mutant("one_key_head_too_many", "rope_append.py", "head < KV_HEADS, cos_row", "head <= KV_HEADS, cos_row"), PLAIN),
    (Mutant("one_value_head_too_many", "rope_append.py", "head < KV_HEADS, None", "head <= KV_HEADS, None"), PLAIN),
    (Mutant("second_block_of_keys_lost", "rope_append.py", "head = (block - Q_BLOCKS) * BLOCK_H", "head = 0 * block"), MANY),
    (Mutant("second_block_of_values_lost", "rope_append.py", "head = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H", "head = 0 * block"), MANY),
    (Mutant("second_block_of_queries_lost", "rope_append.py", "head = block * BLOCK_H + lane", "head = lane"), MANY),
    (Mutant("length_ignored", "rope_append.py", "tl.load(lengths_ptr + sequence) + t", "tl.load(lengths_ptr + sequence) * 0 + t"), PLAIN),
    (Mutant("length_of_the_first", "rope_append.py", "tl.load(lengths_ptr + sequence) + t", "tl.load(lengths_ptr) + t"), PLAIN),
    (Mutant("page_given_away_written", "rope_append.py", "        if page >= 0:\n            if block", "        if page >= -1:\n            if block"), PAGED),
    (Mutant("first_page_only", "cache.py", "tl.load(row + position // PAGE", "tl.load(row + 0 * position"), PAGED),
    (Mutant("slot_of_a_contiguous_cache", "cache.py", "slot = (position % PAGE)", "slot = position"), PAGED),
    (Mutant("table_of_the_first_sequence", "cache.py", "sequence.to(tl.int64) * stride_pages\n        page = tl.load(row + position", "sequence.to(tl.int64) * 0\n        page = tl.load(row + position"), PAGED),
    (Mutant("values_in_the_page_of_keys", "rope_append.py", "row_of(values_ptr, page, slot, stride_vp", "row_of(values_ptr, page, slot, stride_kp"), STILL),
    (Mutant("queries_counted_without_rotation", "rope_append.py", "// BLOCK_H if PAIRS else 0", "// BLOCK_H"), STILL),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Append) -> None:
    append(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_appending_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", [PLAIN, PAGED, MANY, STILL], ids=str)
@pytest.mark.matrix
def test_appending_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"q": tensor(2, 3, 64)}, r"q must be torch.float16 \[batch, seq, heads, size\] with adjacent elements, got torch.float16 \[2, 3, 64\]"),
    ({"k": tensor(2, 3, 2, 64)}, r"k must be torch.float16 \[2, 3, 1, 64\] with adjacent elements, got torch.float16 \[2, 3, 2, 64\]"),
    ({"v": tensor(2, 3, 1, 32)}, r"v must be torch.float16 \[2, 3, 1, 64\] with adjacent elements, got torch.float16 \[2, 3, 1, 32\]"),
    ({"keys": tensor(2, 1, 8, 32)}, "keys must have heads of 64 as k, got 32"),
    ({"values": tensor(2, 1, 9, 64)}, r"keys and values must agree except for size, got \[2, 1, 8, 64\] and \[2, 1, 9, 64\]"),
    ({"keys": tensor(2, 1, 64, 8).transpose(2, 3)}, r"keys must be \[batch or pages, kv_heads, slots, size\] with adjacent elements"),
    ({"keys": tensor(2, 1, 8, 64, dtype=torch.bfloat16)}, "keys must be torch.float16, got torch.bfloat16"),
    ({"keys": tensor(3, 1, 8, 64), "values": tensor(3, 1, 8, 64)}, "keys must hold 2 sequences, got 3"),
    ({"pages": tensor(2, 4, dtype=torch.int32)}, "a page must hold one of 16, 64, 128 tokens, got 8"),
    ({"pages": tensor(3, 4, dtype=torch.int32), "keys": tensor(2, 1, 16, 64), "values": tensor(2, 1, 16, 64)}, r"pages must be int32 \[2, pages\] with adjacent elements, got torch.int32 \[3, 4\]"),
    ({"lengths": tensor(2, dtype=torch.int64)}, r"lengths must be a dense int32 \[2\], got torch.int64 \[2\]"),
    ({"sin": tensor(3, 31)}, r"sin must be \[2 or 1, 3, 32\] with adjacent elements, got \[3, 31\]"),
    ({"cos": None}, "without a rotation there is neither cos nor sin, and q is not written to out"),
    ({"cos": None, "sin": None, "out": tensor(2, 3, 4, 64)}, "without a rotation there is neither cos nor sin, and q is not written to out"),
    ({"cos": tensor(3, 33), "sin": tensor(3, 33)}, "rope_append: at most 32 pairs fit in a head of 64, got 33"),
    ({"out": tensor(2, 3, 2, 64)}, r"out must be torch.float16 \[2, 3, 4, 64\] with adjacent elements, got torch.float16 \[2, 3, 2, 64\]"),
    ({"arch": "sm_70"}, "rope_append: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_rope_append_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(2, 3, 4, 64),
        "k": tensor(2, 3, 1, 64),
        "v": tensor(2, 3, 1, 64),
        "cos": tensor(3, 32),
        "sin": tensor(3, 32),
        "lengths": tensor(2, dtype=torch.int32),
        "keys": tensor(2, 1, 8, 64),
        "values": tensor(2, 1, 8, 64),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        rope_append.plan(**arguments)


def test_queries_that_do_not_turn_are_returned_as_they_are():
    q, k, cache = tensor(2, 3, 4, 64), tensor(2, 3, 1, 64), tensor(2, 1, 8, 64)
    lengths = tensor(2, dtype=torch.int32)
    plan = rope_append.plan(q, k, k, None, None, lengths, cache, cache, arch="sm_90")
    assert plan.output is q
    assert plan.grid == (6, 2)
