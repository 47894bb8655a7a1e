# SPDX-License-Identifier: Apache-2.0
"""Decode attention that rotates and stores the new token itself: the same bits as two launches, each of which is held to float64 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_memory import watched
from kernel_mutants import Mutant, package
from nnfront_kernels import attention_decode
from nnfront_kernels.ahead import compile_plan
from nnfront_kernels.common import ARCHS, Config, KernelError
from nnfront_kernels.decode_shape import DecodeShape
from nnfront_kernels.inspect import plan_for, report
from nnfront_kernels.tiles import resident


@dataclass(frozen=True)
class Append:
    """Sequences of so many tokens with the new one; 0 is none."""

    lengths: tuple[int, ...] = (1, 17, 0, 40)
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    value_size: int = 64
    pairs: int = 32
    page: int = 0
    fp8: bool = False
    interleaved: bool = False
    splits: int = 1
    window: int | None = None


CASES = (
    Append(),
    Append(splits=3, page=16),
    Append(splits=2, fp8=True, interleaved=True),
    Append(page=64, fp8=True, pairs=24),
    Append(size=80, value_size=64, pairs=20, interleaved=True, window=20, splits=2),
    Append(pairs=0, page=16),
    Append(heads=18, kv_heads=1, splits=2, lengths=(33, 32)),
)


def tensors(case: Append) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cache of what came before, NaN where nothing is yet, and the new token as views of one projection."""
    generator = torch.Generator().manual_seed(len(case.lengths) + case.size)
    batch, longest = len(case.lengths), max(case.lengths)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).half()

    pages, first, slots = None, batch, longest
    if case.page:
        per = -(-longest // case.page)
        pages = torch.randperm(batch * per, generator=generator).int().view(batch, per)
        first, slots = batch * per, case.page
    sizes = (case.size, case.value_size)
    given: dict[str, Any] = {"pages": pages}
    cache = [torch.full((first, case.kv_heads, slots, size), float("nan")).half() for size in sizes]
    if case.fp8:
        cache = [torch.full(c.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn) for c in cache]
        given |= {
            name: torch.full(cache[0].shape[:3], float("nan")) for name in ("key_scales", "value_scales")
        }
    for b, n in enumerate(case.lengths):
        for p in range(n - 1):
            place = (pages[b, p // case.page], p % case.page) if pages is not None else (b, p)
            for c, size in zip(cache, sizes, strict=True):
                c[place[0], :, place[1]] = normal(case.kv_heads, size).to(c.dtype)
            for name in ("key_scales", "value_scales") if case.fp8 else ():
                given[name][place[0], :, place[1]] = normal(case.kv_heads).float().abs() + 0.5
    widths = (case.heads * case.size, case.kv_heads * case.size, case.kv_heads * case.value_size)
    parts = normal(batch, sum(widths)).split(widths, 1)
    counts = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(parts, counts, strict=True))
    angle = torch.rand(longest, max(case.pairs, 1), generator=generator) * 6
    tables = (angle.cos(), angle.sin()) if case.pairs else (None, None)
    return {"q": q, "keys": cache[0], "values": cache[1]} | given, {
        "k": k,
        "v": v,
        "cos": tables[0],
        "sin": tables[1],
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
    }


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if t is None else t.clone() for name, t in values.items()}


def of_tokens(case: Append, new: dict[str, Any]) -> dict[str, Any]:
    """Rows of the tables for each sequence."""
    at = (new["lengths"] - 1).clamp(min=0).long()
    return {n: None if new[n] is None else new[n][at][:, None] for n in ("cos", "sin")}


def run(kernels: ModuleType, case: Append) -> None:
    """AssertionError unless one launch leaves what two leave, in the cache and in y, and what the definition says."""
    there, new = tensors(case)
    config = Config(16, 16, 0, 4, 1, split_k=case.splits)
    more = {"arch": "sm_80", "config": config, "window": case.window}
    rows = of_tokens(case, new)
    two, one = copied(there), copied(there)
    q4, k4, v4 = (t[:, None] for t in (two.pop("q"), new["k"], new["v"]))
    is_one = new["lengths"] > 0
    before = torch.where(is_one, new["lengths"] - 1, 10**6).int()  # where there is no room
    keys, values = two.pop("keys"), two.pop("values")
    turned = kernels.rope_append.launch(
        q4, k4, v4, *rows.values(), before, keys, values, **two, interleaved=case.interleaved, arch="sm_80"
    )
    expected = kernels.attention_decode.launch(turned[:, 0], keys, values, new["lengths"], **two, **more)
    given = {**rows, "new_keys": new["k"], "new_values": new["v"], "interleaved": case.interleaved}
    args = (one.pop("q"), one.pop("keys"), one.pop("values"), new["lengths"])
    plan = kernels.attention_decode.plan(*args, **one, **given, **more)
    with watched(plan.arguments, backwards=True):  # the block that stores the token does not run last
        y = plan.launch()
    stored = {"keys": (args[1], keys), "values": (args[2], values)}
    stored |= {n: (one[n], two[n]) for n in ("key_scales", "value_scales") if case.fp8}
    for name, (mine, its) in stored.items():
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), f"{name} differ"
    assert torch.equal(y, expected), f"y differs by {float((y - expected).abs().max())}"
    again = copied(there)
    args = (again.pop("q"), again.pop("keys"), again.pop("values"), new["lengths"])
    stated = kernels.attention_decode.reference(
        *args, **again, **given, window=case.window, compute=torch.float64
    )
    assert (y - stated).abs().max() < (0.02 if case.fp8 else 0.004)


def run_here(case: Append) -> None:
    run(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_one_launch_leaves_what_two_leave(interpreted, case):
    interpreted(run_here, case)


FILE = "attention_append.py"
MUTANTS = [
    (Mutant("query_not_rotated", "attention_decode.py", "q = rotated_rows(q, ", "_ = rotated_rows(q, "), CASES[0]),
    (Mutant("sine_of_the_other_sign", FILE, "tl.where(first, -sin, sin)", "tl.where(first, sin, -sin)"), CASES[0]),
    (Mutant("neighbours_for_halves", FILE, "partner = dk ^ 1", "partner = dk"), CASES[2]),
    (Mutant("all_rotated", FILE, "turned = dk < 2 * PAIRS", "turned = dk < SIZE"), CASES[3]),
    (Mutant("stored_too_late", FILE, "position < capacity, PAGE)", "position < capacity - 1, PAGE)"), CASES[0]),
    (Mutant("stored_by_the_first", "attention_decode.py", "(first < length) & (end == length)", "(first == 0) & (length > 0)"), CASES[6]),
    (Mutant("next_position", "attention_decode.py", "tl.maximum(length - 1, 0)", "length"), CASES[1]),
    (Mutant("rows_of_words", FILE, "2 * (page * stride_kp + slot * stride_ks)", "page * stride_kp + slot * stride_ks"), CASES[2]),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Append) -> None:
    run(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mistakes_are_found(interpreted, mutant, case):
    with pytest.raises((AssertionError, IndexError)):
        interpreted(run_mutant, mutant, case)


TYPICAL = DecodeShape(32, 32, 8, 128, 8192, page=64, new=True)


def facts(shape: DecodeShape) -> tuple[int, int, list[int]]:
    """Spills, how many more barriers a step has than without a new token, and how many blocks an SM holds of both."""
    made = [
        plan_for(attention_decode.KERNEL, s, "bfloat16", "sm_90") for s in (shape, replace(shape, new=False))
    ]
    reports = [report(plan, "sm_90") for plan in made]
    bars = [sum(n for opcode, n in r.loop.items() if opcode.startswith("BAR")) for r in reports]
    held = [
        resident(replace(plan.config, registers=r.registers), ARCHS["sm_90"], r.shared_bytes)
        for plan, r in zip(made, reports, strict=True)
    ]
    return reports[0].spills, bars[0] - bars[1], held


def stores_then_waits(shape: DecodeShape) -> bool:
    """In PTX the token is stored before a barrier, and keys are loaded after it."""
    ptx = compile_plan(plan_for(attention_decode.KERNEL, shape, "bfloat16", "sm_90"), "sm_90").asm["ptx"]
    at = ptx.index("st.global")
    return at < ptx.index("bar.sync", at) < ptx.index("cp.async", at) and "cp.async" not in ptx[:at]


@pytest.mark.parametrize("shape", few_of([TYPICAL, replace(TYPICAL, page=0, fp8=True)]), ids=str)
def test_the_steps_of_a_launch_that_stores_the_token_are_those_of_one_that_does_not(compiled, shape):
    spills, more_barriers, held = compiled(facts, shape)
    assert (spills, more_barriers) == (0, 0)
    assert held[0] >= held[1] >= 2


def test_keys_are_asked_for_after_the_new_one_is_stored(compiled):
    assert compiled(stores_then_waits, TYPICAL)


q, cache = torch.empty(2, 4, 64, device="meta"), torch.empty(2, 2, 8, 64, device="meta")
kv, counts = torch.empty(2, 2, 64, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"new_keys": kv}, "a new token has new_keys and new_values, and only such a one is rotated"),
        ({"cos": kv[0], "sin": kv[0]}, "a new token has new_keys and new_values, and only such a one is rotated"),
        ({"new_keys": kv, "new_values": kv, "cos": kv[0]}, "without a rotation there is neither cos nor sin"),
        ({"new_keys": kv, "new_values": kv[:, :1]}, r"new_values must be torch.float16 \[2, 1, 2, 64\] with adjacent elements, got torch.float16 \[2, 1, 1, 64\]"),
        ({"new_keys": kv, "new_values": kv, "cos": kv, "sin": kv}, r"cos must be \[2 or 1, 1, 64\] with adjacent elements, got \[2, 2, 64\]"),
        ({"new_keys": kv, "new_values": kv, "cos": kv[:, :1], "sin": kv[:, :1]}, "at most 32 pairs fit in a head of 64, got 64"),
    ],
)  # fmt: skip
def test_what_is_no_new_token_is_refused(options, text):
    halves = {name: t.half() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    with pytest.raises(KernelError, match=text):
        attention_decode.plan(q.half(), cache.half(), cache.half(), counts, **halves, arch="sm_90")
