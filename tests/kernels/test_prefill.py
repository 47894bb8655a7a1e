# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts and of chunks after a cache against float64 softmax, query by query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_attention import answer, biases, normal, stored
from kernel_checks import Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, attention_prefill
from nnfront_kernels.attention_prefill import PrefillShape
from nnfront_kernels.common import Config


@dataclass(frozen=True)
class Prefill:
    """Sequences of `seqs` queries. `before` None has keys beside the queries, else a cache; page 0 is contiguous."""

    seqs: tuple[int, ...]
    before: tuple[int, ...] | None = None
    heads: int = 2
    kv_heads: int = 1
    size: int = 64
    value_size: int = 0
    page: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    gap: int = 0
    scale: float | None = None
    fp8: bool = False
    rows: int = 32  # of a tile
    step: int = 16
    bias: bool = False

    def __str__(self) -> str:
        flags = "".join(
            f"-{name}{getattr(self, name)}"
            for name in ("page", "window", "soft_cap", "sinks", "gap", "value_size", "fp8", "bias")
            if getattr(self, name)
        )
        both = "" if self.causal else "-both"
        return f"{self.seqs}after{self.before}-{self.heads}of{self.kv_heads}x{self.size}{both}{flags}"


def prefill(package: ModuleType, case: Prefill) -> None:
    """Launch twice, blocks in both orders, on poisoned outputs; AssertionError unless y is right and repeatable."""
    generator = torch.Generator().manual_seed(sum(case.seqs) + case.heads)
    tokens, value_size = sum(case.seqs), case.value_size or case.size
    q = surrounded(normal(generator, tokens * case.heads, case.size).half(), case.gap, 0)
    q = q.unflatten(0, (tokens, case.heads))
    earlier = case.before or (0,) * len(case.seqs)
    totals = [b + s for b, s in zip(earlier, case.seqs, strict=True)]
    first = [max(b + 1 - case.window, 0) if case.window else 0 for b in earlier]
    k, v = (
        stored(generator, case.kv_heads, totals, size, first, case.page, case.gap, case.fp8)
        for size in (case.size, value_size)
    )
    keys, values, before = k.cache, v.cache, None
    if case.before is None:
        keys, values = (
            surrounded(
                torch.cat([t.transpose(0, 1) for t in each.tokens]).flatten(0, 1).half(), case.gap, 0
            ).unflatten(0, (tokens, case.kv_heads))
            for each in (k, v)
        )
    else:
        before = torch.tensor(case.before, dtype=torch.int32)
    sinks = normal(generator, case.heads).float() * 2 if case.sinks else None
    starts = torch.tensor([sum(case.seqs[:i]) for i in range(len(case.seqs) + 1)], dtype=torch.int32)
    bias = biases(tuple(totals), case.heads, max(case.seqs)) if case.bias else None
    options = {
        "longest": max(case.seqs),
        "before": before,
        "pages": None if case.before is None else k.pages,
        "key_scales": k.scales,
        "value_scales": v.scales,
        "scale": case.scale,
        "causal": case.causal,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
        "bias": bias,
    }
    (y,) = launched_twice(
        lambda pattern: [Guarded(tokens * case.heads, value_size, torch.float16, case.gap, 0, pattern)],
        lambda views: package.attention_prefill.plan(
            q,
            keys,
            values,
            starts,
            **options,
            out=views[0].unflatten(0, (tokens, case.heads)),
            arch="sm_80",
            config=Config(case.rows, case.step, 0, 4, 1),
        ),
    )
    expected, drift = [], []
    for b, seq in enumerate(case.seqs):
        for t in range(seq):
            at, position = torch.arange(totals[b]), earlier[b] + t
            seen = at <= position if case.causal else at >= 0
            if case.window:
                seen &= at > position - case.window
            scales = v.token_scales[b] if v.token_scales else None
            own = None if bias is None else bias[b, :, t, : totals[b]]
            query = q[int(starts[b]) + t].double()
            row, off = answer(query, k.tokens[b], v.tokens[b], seen, case, sinks, scales, own)
            expected.append(row)
            drift.append(off)
    assert_close(actual=y, expected=torch.cat(expected), drift=torch.cat(drift))
    stated = package.attention_prefill.reference(q, keys, values, starts, **options, compute=torch.float64)
    assert_close(actual=stated.flatten(0, 1), expected=torch.cat(expected), drift=torch.cat(drift))


CASES = [
    Prefill((1,)),
    Prefill((15, 1, 17), heads=3, sinks=True),
    Prefill((33,), heads=7, size=80, gap=8),
    Prefill((40, 5), heads=4, kv_heads=2, window=1),
    Prefill((50,), heads=1, window=20, soft_cap=3.0),
    Prefill((20, 0, 9), heads=8, size=128, causal=False, sinks=True),
    Prefill((3, 20), (40, 16), size=96, page=16),
    Prefill((17, 1), (0, 63), heads=4, page=64, window=30, sinks=True, soft_cap=5.0, gap=8),
    Prefill((9,), (120,), size=256, page=128),
    Prefill((5, 30), (33, 2), heads=2, kv_heads=2, window=24),
    Prefill((33, 9), (40, 3), heads=3, page=16, bias=True, soft_cap=3.0, window=30),
    Prefill((40, 9), heads=4, kv_heads=2, bias=True, sinks=True),
    Prefill((18,), size=192, value_size=128, scale=0.1),
    Prefill((12,), (7,), heads=3, causal=False, page=16),
    Prefill((70,), heads=1, step=32, rows=16),
    Prefill((2, 16), (126, 1), heads=7, size=128, page=128, window=1),
    Prefill((1, 5), (63, 16), heads=3, size=80, page=64, soft_cap=2.0, sinks=True),
    Prefill((33, 2), (0, 40), heads=3, fp8=True, gap=16),
    Prefill((3, 20), (40, 16), heads=4, kv_heads=2, size=96, page=16, fp8=True, window=21, sinks=True),
    Prefill((17,), (64,), size=192, value_size=128, page=64, fp8=True, soft_cap=4.0),
]


def prefill_here(case: Prefill) -> None:
    prefill(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_prefill_matches_float64(interpreted, case):
    interpreted(prefill_here, case)


# Chunks of every length after caches of every length, on both sides of the end of a page.
MORE = [
    Prefill(
        (s, 1, 40), (b, 0, 7), heads, kv, size, value_size, page, window=(None, 1, 17, 33)[turn % 4], sinks=turn % 2 == 1,
        soft_cap=4.0 if turn % 3 == 1 else None, gap=16 * (turn % 2), fp8=turn % 5 == 3,
    )
    for turn, (s, b, ((heads, kv), (size, value_size), page)) in enumerate(
        (s, b, kind)
        for s in (1, 16, 31, 65)
        for b in (0, 15, 64)
        for kind in (
            ((1, 1), (64, 0), 16), ((3, 1), (80, 0), 64), ((4, 1), (96, 0), 128), ((7, 1), (128, 0), 0),
            ((8, 2), (256, 0), 16), ((8, 1), (192, 128), 64), ((4, 4), (128, 0), 128), ((3, 3), (192, 0), 0),
        )
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_prefill_matches_float64_on_the_full_grid(interpreted, case):
    interpreted(prefill_here, case)


HERE = Prefill((17, 1), (20, 33), heads=6, kv_heads=2, size=80, page=16, window=22, sinks=True, gap=8)
PLAIN = Prefill((37, 5), heads=3, soft_cap=3.0)
BOTH = replace(PLAIN, causal=False)
MUTANTS = [
    (Mutant("next_key_seen", "attention.py", "(at[None, :] <= high[:, None])", "(at[None, :] <= high[:, None] + 1)"), PLAIN),
    (Mutant("window_one_too_narrow", "attention_prefill.py", "low = position + 1 - WINDOW", "low = position + 2 - WINDOW"), HERE),
    (Mutant("steps_cut_by_the_window_unmasked", "attention_prefill.py", "tl.maximum(last + 1 - WINDOW, 0), BLOCK_N", "tl.maximum(first + 1 - WINDOW, 0), BLOCK_N"), replace(HERE, window=60, before=(70, 33))),
    (Mutant("diagonal_unmasked", "attention_prefill.py", "full_end = (first + 1 if CAUSAL", "full_end = (last + 1 if CAUSAL"), PLAIN),
    (Mutant("last_step_skipped", "attention_prefill.py", "end = last + 1 if CAUSAL else length", "end = last if CAUSAL else length"), PLAIN),
    (Mutant("end_of_all_keys_lost", "attention_prefill.py", "end = last + 1 if CAUSAL else length", "end = last + 1 if CAUSAL else length - 1"), BOTH),
    (Mutant("before_ignored", "attention_prefill.py", "before = tl.load(before_ptr + sequence)", "before = 0 * tl.load(before_ptr + sequence)"), HERE),
    (Mutant("keys_of_the_first_sequence", "attention_prefill.py", "k_head += first_token.to(tl.int64) * stride_ks", "k_head += 0 * first_token.to(tl.int64)"), PLAIN),
    (Mutant("rows_of_the_next_sequence", "attention_prefill.py", "inside_m = t < seq", "inside_m = t <= seq"), PLAIN),
    (Mutant("one_head_of_a_group", "attention_prefill.py", "kv_head * SHARED + lane % SHARED", "kv_head * SHARED + 0 * lane"), HERE),
    (Mutant("prefill_heads_of_the_first_group", "attention_prefill.py", "keys_ptr + kv_head.to(tl.int64) * stride_kh", "keys_ptr + 0 * kv_head.to(tl.int64)"), HERE),
    (Mutant("tiles_missing", "attention_prefill.py", "cdiv(longest * (heads // kv_heads), config.block_m)", "(longest * (heads // kv_heads) // config.block_m)"), PLAIN),
    (Mutant("padding_of_a_whole_step_read", "attention.py", "tl.load(k_ptrs, mask=dk < SIZE_K, other=0.0)", "tl.load(k_ptrs)"), replace(HERE, window=None, before=(40, 33))),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Prefill) -> None:
    prefill(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_prefill_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", sorted({case for _, case in MUTANTS}, key=str), ids=str)
@pytest.mark.matrix
def test_prefill_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"q": tensor(9, 64)}, r"q must be \[tokens, heads, size\] with adjacent elements, got \[9, 64\]"),
    ({"keys": tensor(8, 2, 64)}, r"keys must be \[9, kv_heads, size\] with adjacent elements, or a cache, got \[8, 2, 64\]"),
    ({"values": tensor(9, 1, 64)}, r"values must be \[9, kv_heads, size\] with adjacent elements, or a cache, got \[9, 1, 64\]"),
    ({"values": tensor(9, 2, 64, dtype=torch.bfloat16)}, "values must be torch.float16, got torch.bfloat16"),
    ({"before": tensor(2, dtype=torch.int32)}, r"before, pages, scales and base are for a cache, and keys are \[tokens, kv_heads, size\]"),
    ({"keys": tensor(9, 2, 80), "values": tensor(9, 2, 80)}, "keys must have heads of 64 as q, got 80"),
    ({"keys": tensor(3, 2, 9, 64), "values": tensor(3, 2, 9, 64)}, "keys must hold 2 sequences, got 3"),
    ({"starts": tensor(3)}, r"starts must be a dense int32 \[3\], got torch.float16 \[3\]"),
    ({"window": 4, "causal": False}, "attention_prefill: a window needs causal attention"),
    ({"out": tensor(9, 4, 32)}, r"out must be torch.float16 \[9, 4, 64\] with adjacent elements, got torch.float16 \[9, 4, 32\]"),
    ({"arch": "sm_70"}, "attention_prefill: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_attention_prefill_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(9, 4, 64),
        "keys": tensor(9, 2, 64),
        "values": tensor(9, 2, 64),
        "starts": tensor(3, dtype=torch.int32),
        "longest": 9,
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        attention_prefill.plan(**arguments)


@pytest.mark.parametrize(("changes", "dtype", "message"), [
    ({}, "float32", "dtype must be one of float16, bfloat16, got 'float32'"),
    ({"size": 72}, "float16", "the size of a head must be one of 64, 80, 96, 128, 192, 256, got 72"),
    ({"batch": 2**16}, "float16", "there must be less than 65536 sequences, got 65536"),
])  # fmt: skip
def test_attention_prefill_refuses(changes, dtype, message):
    shape = replace(PrefillShape(1, 1, 1, 1, 64), **changes)
    assert attention_prefill.accepts(shape, dtype, "sm_90") == message
