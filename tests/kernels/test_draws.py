# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn on the device: which could have been, against the sampler of the CPU; which were, against the definition; and how often."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import Guarded, surrounded
from kernel_launches import launched_twice
from kernel_memory import watched
from kernel_mutants import Mutant, package
from nnfront_kernels import philox, sampling, sampling_parts
from nnfront_kernels.common import Config, Plan

from nnfront.engine.draw import Draw
from nnfront.engine.params import Params

SMALL = Config(1, 256, 1, 4, 1)  # several blocks for few tokens
PARTS = Config(1, 64, 1, 1, 1, split_k=4)
KERNELS = ((sampling, SMALL), (sampling_parts, PARTS))


@dataclass(frozen=True)
class Rows:
    """`logits` says what they are like; limits as in Sampling; with a penalty a third of the tokens was seen."""

    vocab: int
    logits: str = "normal"
    rows: int = 2
    dtype: str = "float32"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    penalty: float = 1.0
    gap: int = 0
    small: bool = False
    parts: int = 0

    def __str__(self) -> str:
        limits = [f"{n}{getattr(self, n)}" for n in ("top_k", "top_p", "min_p") if getattr(self, n)]
        return "-".join(
            [
                f"{self.rows}x{self.vocab}-{self.logits}-{self.dtype}-t{self.temperature}-r{self.penalty}",
                *limits,
                "small" * self.small,
                f"parts{self.parts}" * (self.parts > 0),
            ]
        )


def chances(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """How likely the CPU draws each token: float [batch, vocab] to float64."""
    draw = Draw(Params(temperature, top_k, top_p, min_p), [])
    found = torch.zeros(logits.shape, dtype=torch.float64)
    for row, scores in zip(found, logits, strict=True):
        tokens, each = draw.probabilities(scores.numpy())
        row[tokens] = torch.from_numpy(each)
    return found


def made(rows: Rows) -> torch.Tensor:
    """The logits of a case, strided in a buffer that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(rows.vocab + rows.rows)
    values = 3 * torch.randn(rows.rows, rows.vocab, generator=generator, dtype=torch.float64)
    if rows.logits == "ties":
        values = values.round()
    elif rows.logits == "holes":
        values = values.masked_fill(torch.rand(values.shape, generator=generator) < 0.7, -math.inf)
        values[:, -1] = 1.0
    elif rows.logits == "equal":
        values = torch.full_like(values, -2.5)
    elif rows.logits == "zeros":
        values = torch.where(values > 1, 0.0, -0.0)
        values[:, ::3] = -1.0
    elif rows.logits == "large":
        values = 1e4 * values
    elif rows.logits == "peak":
        values[:, rows.vocab // 2] = 60.0
    return surrounded(values.to(getattr(torch, rows.dtype)), rows.gap, 0)


def planned_last(kernel: ModuleType, logits: torch.Tensor, **options: Any) -> Plan:
    """The last launch of a draw, those before it done."""
    if not hasattr(kernel, "launches"):
        return kernel.plan(logits, **options)
    *earlier, last = kernel.launches(logits, **options)
    for plan in earlier:
        with watched(plan.arguments, backwards=True):
            plan.launch()
    return last


def draw(package: ModuleType, rows: Rows) -> None:
    """Launch twice, in parts if the case says so; AssertionError unless the tokens that could be drawn, and those that were, are right."""
    logits = made(rows)
    generator = torch.Generator().manual_seed(5)
    seen = None
    if rows.penalty != 1.0:
        marks = (torch.rand(logits.shape, generator=generator) < 1 / 3).to(torch.int8)
        seen = surrounded(marks, 0, 0).view(torch.bool)
    steps = torch.tensor([2**40 + 3, 7])[: rows.rows]
    state = torch.stack([torch.arange(rows.rows) * -(2**35) + 11, steps], 1)
    options = {name: getattr(rows, name) for name in ("temperature", "top_k", "top_p", "min_p", "penalty")}
    if rows.parts:
        kernel, config = package.sampling_parts, replace(PARTS, split_k=rows.parts)
        space = kernel.workspace(rows.rows, rows.vocab, torch.device("cpu"), config)
    else:
        kernel, config = package.sampling, SMALL if rows.small else None
        space = kernel.workspace(rows.rows, rows.vocab, torch.device("cpu"))

    def planned(views: list[torch.Tensor]) -> Plan:
        space.scores.fill_(math.nan)
        space.ids.fill_(-77)
        kept = {"kept": views[1].view(torch.bool)} if rows.temperature else {}
        return planned_last(
            kernel, logits, **options, **kept, seen=seen, state=state, out=views[0][:, 0], workspace=space, arch="sm_80", config=config
        )  # fmt: skip

    token, *kept = launched_twice(
        lambda pattern: [
            Guarded(rows.rows, 1, torch.int64, 0, 0, pattern),
            *(
                [Guarded(rows.rows, rows.vocab, torch.uint8, rows.gap, 0, pattern)]
                if rows.temperature
                else []
            ),
        ],
        planned,
    )
    token = token[:, 0]
    assert torch.equal(token, package.sampling.reference(logits, **options, seen=seen, state=state))
    scores = logits.float()
    if seen is not None:
        scores = torch.where(
            seen, torch.where(scores < 0, scores * rows.penalty, scores / rows.penalty), scores
        )
    if rows.temperature == 0:
        assert torch.equal(token, scores.argmax(-1))
        return
    possible = chances(scores, rows.temperature, rows.top_k, rows.top_p, rows.min_p) > 0
    assert torch.equal(kept[0] != 0, possible), "other tokens can be drawn than on the CPU"
    assert possible.gather(1, token[:, None]).all()
    if rows.top_k is rows.top_p is rows.min_p is None:
        # Without the question what can be drawn, nothing is gathered.
        again = kernel.launch(logits, **options, seen=seen, state=state, arch="sm_80", config=config)
        assert torch.equal(again, token)


CASES = [
    *(Rows(v, rows=1, temperature=t) for v, t in ((1, 1.0), (2, 0.7), (1000, 1.3), (1025, 0.01), (4097, 1.0))),
    *(Rows(v, k, temperature=0.0, dtype=d, gap=3, penalty=p) for v, k, d, p in ((1, "normal", "float32", 1.0), (1000, "ties", "float16", 1.0), (4097, "ties", "float32", 1.3), (300, "zeros", "float32", 1.0))),
    Rows(1, rows=1, top_k=1, top_p=0.5, min_p=0.5),
    Rows(1000, rows=1, top_k=50, top_p=0.9, min_p=0.05, dtype="float16", gap=5),
    Rows(1000, top_k=3, rows=1, small=True),
    Rows(4097, rows=1, top_k=1, temperature=0.8),
    Rows(4097, rows=1, top_p=0.95, temperature=0.8, gap=1),
    Rows(4097, rows=1, min_p=0.02, penalty=1.2),
    Rows(9000, "ties", rows=1, top_k=40, top_p=0.7, penalty=0.8),
    Rows(300, "ties", rows=1, top_k=17),
    Rows(300, "ties", rows=1, top_k=299, dtype="float16"),
    Rows(300, "ties", rows=1, top_k=300, top_p=0.6, small=True),
    Rows(300, "ties", rows=1, top_k=10**6),
    Rows(300, "equal", rows=1, top_p=0.3512),
    Rows(300, "equal", rows=1, top_k=7, min_p=1.0),
    Rows(600, "equal", rows=1, top_p=0.777, small=True),
    Rows(300, "zeros", rows=1, top_k=30, top_p=0.5),
    Rows(300, "holes", rows=1, top_k=200, top_p=0.99),
    Rows(300, "holes", rows=1),
    Rows(300, "large", rows=1, top_p=0.9, temperature=2.0),
    Rows(300, "peak", rows=1, top_k=5, top_p=1e-6),
    Rows(300, rows=1, top_p=1.0, min_p=0.0),
    Rows(70, top_k=8, top_p=0.8),
    Rows(300, rows=1, top_p=0.9999),
    Rows(600, rows=1, top_k=400, min_p=0.1, small=True, penalty=1.7),
]  # fmt: skip


IN_PARTS = [
    Rows(1000, "ties", rows=1, top_k=40, top_p=0.7, penalty=0.8, parts=4),
    Rows(1000, parts=4),
    Rows(1000, "ties", temperature=0.0, penalty=1.3, parts=4),
    Rows(300, "equal", rows=1, top_p=0.3512, parts=8),
    Rows(300, "holes", rows=1, top_k=200, top_p=0.99, parts=2),
    Rows(70, top_k=8, top_p=0.8, parts=4, dtype="float16", gap=3),
    Rows(1, rows=1, top_k=1, top_p=0.5, min_p=0.5, parts=2),
    Rows(1025, rows=1, min_p=0.02, parts=2),
]


def draw_here(rows: Rows) -> None:
    draw(nnfront_kernels, rows)


@pytest.mark.parametrize("rows", few_of(CASES, 3) + few_of(IN_PARTS), ids=str)
def test_the_tokens_that_can_be_drawn_are_the_cpus_and_the_token_is_the_definitions(interpreted, rows):
    interpreted(draw_here, rows)


def random_case(seed: int) -> Rows:
    """Some logits and some limits; edges of top_p that rounding could move are unlikely."""
    choose = random.Random(seed)
    vocab = choose.choice([3, 17, 255, 256, 257, 1000, 3000])
    return Rows(
        vocab,
        choose.choice(["normal", "ties", "holes", "equal", "zeros", "peak"]),
        rows=choose.choice([1, 2]),
        dtype=choose.choice(["float16", "float32"]),
        temperature=choose.choice([0.3, 0.9, 2.5]),
        top_k=choose.choice([None, choose.randint(1, vocab)]),
        top_p=choose.choice([None, choose.uniform(0.01, 0.999)]),
        min_p=choose.choice([None, choose.uniform(0.001, 0.9)]),
        penalty=choose.choice([1.0, 0.6, 1.4]),
        gap=choose.choice([0, 3, 16]),
        small=choose.choice([True, False]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [random_case(seed) for seed in range(100)], ids=str)
def test_random_limits_keep_what_the_cpu_keeps(interpreted, rows):
    interpreted(draw_here, rows)


def without_a_token(temperature: float, which: int) -> list[int]:
    kernel, config = KERNELS[which]
    logits = torch.randn(5, 300)
    logits[0, 299] = math.nan
    logits[1, 0] = math.nan
    logits[2] = -math.inf
    logits[3, 7] = math.inf
    logits[4, 9] = 100.0
    state = torch.zeros(5, 2, dtype=torch.int64)
    tokens = kernel.launch(logits, temperature=temperature, top_k=3, state=state, config=config)
    return tokens.tolist()


@pytest.mark.parametrize("which", [0, 1], ids=["one block", "parts"])
def test_a_row_without_a_token_gives_minus_one_and_spares_the_others(interpreted, which):
    assert interpreted(without_a_token, 0.0, which) == [-1, -1, 0, 7, 9]
    assert interpreted(without_a_token, 1.0, which) == [-1, -1, -1, -1, 9]


def advancing(temperature: float, which: int) -> None:
    kernel, config = KERNELS[which]
    logits = torch.tensor([[5.0, 4.0, -3.0], [math.nan, 0.0, 0.0]])
    state = torch.tensor([[3, 2**32 - 1], [4, 9]])
    seen = torch.tensor([[False, False, True], [False, False, False]])
    marks = [seen.clone()]
    for step in range(3):
        options = {"temperature": temperature, "penalty": 2.0, "seen": seen, "state": state}
        stated = sampling.reference(logits, **options)
        token = kernel.launch(logits, **options, advance=True, config=config)
        assert torch.equal(token, stated)
        marks.append(marks[-1].clone())
        marks[-1][0, token[0]] = True
        assert torch.equal(seen, marks[-1])
        assert state[:, 1].tolist() == ([2**32 + step, 10 + step] if temperature else [2**32 - 1, 9])


@pytest.mark.parametrize("which", [0, 1], ids=["one block", "parts"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_advancing_counts_a_step_for_each_draw_and_marks_the_token(interpreted, temperature, which):
    interpreted(advancing, temperature, which)


def test_philox_gives_the_published_words():
    # Random123's kat_vectors, philox4x32 10: counter and key all zero, and all ones in the words that a token and a step reach.
    assert philox.words(torch.tensor([[0, 0]]), 4).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ]


def test_draws_follow_the_distribution():
    """The definition's, for 40,000 steps: Pearson's chi-square stays below its 99.9 % point. The kernel's tokens are the definition's."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0, 1.5, 0.5, -2.0]])
    steps = torch.arange(40_000)
    for options in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}):
        state = torch.stack([torch.full_like(steps, 42), steps], 1)
        tokens = sampling.reference(logits.expand(len(steps), -1), temperature=1.3, state=state, **options)
        p = chances(logits, 1.3, **options)[0]
        counts, likely = torch.bincount(tokens, minlength=8), p * len(steps) > 5
        assert not counts[p == 0].any()
        statistic = ((counts - p * len(steps)) ** 2 / (p * len(steps)))[likely].sum()
        critical = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5}[int(likely.sum()) - 1]
        assert statistic < critical, (options, float(statistic))


def frequencies() -> list[int]:
    logits = torch.tensor([[1.0, 0.0, 0.5, -9.0]]).expand(200, 4)
    state = torch.stack([torch.full((200,), 7), torch.arange(200)], 1)
    return torch.bincount(sampling.launch(logits, temperature=1.0, state=state), minlength=4).tolist()


def test_draws_of_the_kernel_follow_the_distribution_too(interpreted):
    counts = torch.tensor(interpreted(frequencies))
    expected = 200 * torch.tensor([1.0, 0.0, 0.5]).softmax(0)
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # 99.9 % point for two degrees of freedom


def test_rare_exponentials_keep_their_digits():
    # The smallest of 2^22 has about 22 bits of its own; rounding v to 2^-24 would leave it two.
    e = philox.exponentials(torch.tensor([[1, 1]]), 1 << 22)
    assert len((e[e < 1e-5] * 2**40).long().unique()) == int((e < 1e-5).sum())
    assert abs(float(e.mean()) - 1) < 5 / 2048


def exponentials_of_bits() -> torch.Tensor:
    return rows_of_bits(torch.tensor([0, 1, 2**20, 2**25, 42949672, 42949673, 2**31, 2**32 - 2, 2**32 - 1]))


def rows_of_bits(bits: torch.Tensor) -> torch.Tensor:
    import triton
    import triton.language as tl

    @triton.jit
    def exponentials_kernel(bits_ptr, out_ptr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + at, philox.exponential(tl.load(bits_ptr + at).to(tl.uint32)))

    padded = torch.zeros(16, dtype=torch.int64)
    padded[: len(bits)] = bits
    out = torch.empty(16)
    exponentials_kernel[(1,)](padded, out, BLOCK=16)
    return torch.stack([out[: len(bits)].double(), -torch.log1p(-(bits.double() + 0.5) / 2**32)])


def test_exponentials_are_precise_at_both_ends(interpreted):
    got, expected = interpreted(exponentials_of_bits)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)


K = Rows(300, rows=1, top_k=20, small=True)
P = Rows(600, temperature=9.0, top_p=0.9, small=True)
TIES = Rows(300, "equal", rows=1, top_p=0.3512, small=True)
BOTH = Rows(300, rows=1, temperature=3.0, top_k=30, top_p=0.7, small=True)
MIN = Rows(300, rows=1, temperature=2.0, min_p=0.2, small=True)
NOISE = Rows(300, "equal", small=True)
NEAR = Rows(1000, rows=1, temperature=3.0, top_p=0.95, parts=4)
MARKED = Rows(300, min_p=1e-4, penalty=1.7, small=True)
MUTANTS = [
    (Mutant("draw_k_one_less", "token_limits.py", "value_of(largest(scores, count, ROOM, top, top_k.to(tl.float32), False, BLOCK))", "value_of(largest(scores, count, ROOM, top, top_k.to(tl.float32) - 1, False, BLOCK))"), K),
    (Mutant("draw_gathers_too_few", "token_limits.py", "chosen = (at < VOCAB) & (z >= low)", "chosen = (at < VOCAB) & (z > low)"), K),
    (Mutant("draw_blocks_gathered_over_each_other", "token_limits.py", "count += tl.sum(chosen.to(tl.int32), axis=0)", "count = tl.sum(chosen.to(tl.int32), axis=0)"), P),
    (Mutant("draw_p_of_what_was_gathered", "token_limits.py", "total += tl.exp(z - top)\n", "total += tl.where(z >= low, tl.exp(z - top), 0.0)\n"), replace(MIN, top_p=0.5)),
    (Mutant("draw_p_counts_what_k_drops", "token_limits.py", "total = amount(scores, count, ROOM, top, low, True, BLOCK)", "total = total"), BOTH),
    (Mutant("draw_all_equals_kept", "token_limits.py", "inside = inside & ((equal == 0) |", "inside = inside & ((equal >= 0) |"), TIES),
    (Mutant("draw_equals_counted_from_one", "token_limits.py", "tl.cumsum(equal, axis=0) - equal", "tl.cumsum(equal, axis=0)"), TIES),
    (Mutant("draw_edge_counted_twice", "token_limits.py", "value_of(edge + 1)", "value_of(edge)"), TIES),
    (Mutant("draw_min_p_dropped", "token_limits.py", "weight >= min_p", "weight >= 0.0"), MIN),
    (Mutant("draw_near_ones_dropped", "sampling.py", "max(bounds) - 1.0", "max(bounds) + 1.0"), MIN),
    (Mutant("draw_seen_ignored", "token_limits.py", "known = tl.load(seen + at, mask=inside, other=0) != 0", "known = tl.load(seen + at, mask=inside, other=0) > 1"), MARKED),
    (Mutant("draw_negative_divided", "token_limits.py", "tl.where(s < 0, s * factor,", "tl.where(s < 0, s / factor,"), MARKED),
    (Mutant("draw_temperature_dropped", "token_limits.py", "if temperature is not None:\n        s =", "if False:\n        s ="), MIN),
    (Mutant("draw_seen_row_of_the_first", "sampling.py", "seen_ptr + row * stride_seen", "seen_ptr"), MARKED),
    (Mutant("draw_last_block_lost", "token_limits.py", "token = tl.where(better, at, token)", "token = at"), P),
    (Mutant("draw_words_in_wrong_order", "philox.py", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"), NOISE),
    (Mutant("draw_step_above_32_bits_lost", "philox.py", "(step >> 32).to(tl.uint32)", "(step >> 63).to(tl.uint32)"), NOISE),
    (Mutant("draw_same_numbers_for_neighbours", "philox.py", "token % 4 < 2", "token % 4 < 4"), P),
    (Mutant("draw_last_part_lost", "sampling_parts.py", "for part in range(1, PARTS):", "for part in range(1, PARTS - 1):"), NEAR),
    (Mutant("draw_weight_of_one_part", "sampling_parts.py", "tl.sum(all_totals, axis=0)", "tl.max(all_totals, axis=0)"), NEAR),
    (Mutant("draw_parts_over_each_other", "sampling_parts.py", "scores + count + first + lane, z", "scores + first + lane, z"), NEAR),
    (Mutant("draw_largest_of_one_part", "sampling_parts.py", "tl.where(tops == top, firsts, VOCAB)", "tl.where(tops == tops, firsts, VOCAB)"), replace(NEAR, temperature=0.0, top_p=None)),
    (Mutant("draw_first_of_equals_lost", "token_limits.py", "better = (z > best) | (z != z)", "better = (z >= best) | (z != z)"), Rows(600, "equal", temperature=0.0, small=True)),
]  # fmt: skip


def run_mutant(mutant: Mutant, rows: Rows) -> None:
    draw(package(mutant), rows)


@pytest.mark.parametrize(("mutant", "rows"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_draw_is_caught(interpreted, mutant, rows):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, rows)


@pytest.mark.parametrize("rows", sorted({rows for _, rows in MUTANTS}, key=str), ids=str)
@pytest.mark.matrix
def test_the_draw_without_the_mistake_passes(interpreted, rows):
    interpreted(draw_here, rows)
