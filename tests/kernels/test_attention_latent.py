# SPDX-License-Identifier: Apache-2.0
"""Attention over latents against float64 softmax by its definition: poisoned unused slots, chunks of queries, every option, and mistakes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_attention import answer, normal, stored
from kernel_attention import biases as alibi
from kernel_budgets import Build, compile_build
from kernel_checks import Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, attention_latent
from nnfront_kernels.attention_latent import LatentShape
from nnfront_kernels.common import ARCHS, Config


@dataclass(frozen=True)
class Latent:
    """The last `seq` tokens of each sequence are the queries. page 0 is contiguous; `splits`, `step` and `rows` replace what choose picks."""

    lengths: tuple[int, ...]
    heads: int = 4
    size: int = 80
    value_size: int = 64
    seq: int = 1
    page: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: str = ""  # "float16", "float32" or "bool"
    splits: int = 1
    step: int = 32
    rows: int = 16
    gap: int = 0
    scale: float | None = None

    def __str__(self) -> str:
        flags = "".join(
            f"-{name}{getattr(self, name)}"
            for name in ("page", "window", "soft_cap", "sinks", "bias", "splits", "gap", "rows")
            if getattr(self, name)
        )
        return f"{self.lengths}-{self.seq}x{self.heads}x{self.size}of{self.value_size}{flags}"


def biases(generator: torch.Generator, case: Latent) -> torch.Tensor | None:
    """[batch, heads, seq, positions], the same for all heads but for those of floats; what no query may look at is NaN."""
    if not case.bias:
        return None
    batch, longest = len(case.lengths), max(case.lengths)
    if case.bias == "bool":
        seen = torch.rand(batch, 1, case.seq, longest, generator=generator) < 0.6
        return seen.expand(batch, case.heads, case.seq, longest)
    return alibi(case.lengths, case.heads, case.seq, getattr(torch, case.bias))


def attend(package: ModuleType, case: Latent) -> None:
    """Launch twice, blocks in both orders, on poisoned outputs; AssertionError unless y is right and repeatable."""
    generator = torch.Generator().manual_seed(sum(case.lengths) + case.heads)
    batch, rows = len(case.lengths), len(case.lengths) * case.seq * case.heads
    q = surrounded(normal(generator, rows, case.size).half(), case.gap, 0)
    q = q.unflatten(0, (batch, case.seq, case.heads))
    first = [max(n - case.seq + 1 - case.window, 0) if case.window else 0 for n in case.lengths]
    kept = stored(generator, 1, list(case.lengths), case.size, first, case.page, case.gap, fp8=False)
    sinks = normal(generator, case.heads).float() * 2 if case.sinks else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    bias = biases(generator, case)
    options: dict[str, Any] = {
        "value_size": case.value_size,
        "pages": kept.pages,
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
        "bias": bias,
    }
    config = Config(case.rows, case.step, 1, 4, 1, split_k=case.splits)
    workspace: dict[str, Any] = {}

    def planned(views: list[torch.Tensor]) -> Any:
        out = views[0].unflatten(0, (batch, case.seq, case.heads))
        plan = package.attention_latent.plan(
            q, kept.cache, lengths, **options, **workspace, longest=max(case.lengths), out=out, arch="sm_80", config=config
        )  # fmt: skip
        if case.splits > 1:  # the next launch gets this one's counts, as it left them
            parts = (plan.arguments["partial_ptr"], plan.arguments["arrived_ptr"])
            workspace["workspace"] = package.split_k.Workspace(*parts)
        return plan

    (y,) = launched_twice(
        lambda pattern: [Guarded(rows, case.value_size, torch.float16, case.gap, 0, pattern)], planned
    )
    if workspace:
        groups = batch * -(-case.seq * case.heads // case.rows)
        parts = ~workspace["workspace"].partial.view(groups, case.splits, -1).isnan()
        there = parts.all(-1)
        assert torch.equal(there, parts.any(-1)), "some parts lie over others"
        assert there[:, 0].all(), "some parts lie over others"
        assert torch.equal(there, there.cummin(1).values), "a block behind one without steps left a part"
    expected, drift = [], []
    for b, n in enumerate(case.lengths):
        for t in range(case.seq):
            at = torch.arange(n)
            position = n - case.seq + t
            seen = at <= position
            if case.window:
                seen &= at > position - case.window
            own = None if bias is None else bias[b, :, t, :n]
            values = kept.tokens[b][..., : case.value_size]
            line, off = answer(q[b, t].double(), kept.tokens[b], values, seen, case, sinks, bias=own)
            expected.append(line)
            drift.append(off)
    assert_close(actual=y, expected=torch.cat(expected), drift=torch.cat(drift))
    stated = package.attention_latent.reference(q, kept.cache, lengths, **options, compute=torch.float64)
    assert_close(actual=stated.flatten(0, 2), expected=torch.cat(expected), drift=torch.cat(drift))


CASES = [
    Latent((1,)),
    Latent((1, 15, 16, 17), page=16),
    Latent((40, 33), 17, 576, 512, page=64, splits=2, sinks=True),
    Latent((63, 64, 65), 3, page=64, soft_cap=5.0, gap=8),
    Latent((40, 0, 33), 8, 48, 32, splits=2, sinks=True),
    Latent((90, 3, 31), 20, page=16, window=1, splits=2),
    Latent((90, 3, 33, 64), 4, page=16, window=32, splits=3, sinks=True, soft_cap=3.0),
    Latent((65,), 5, 40, 24, page=128, step=64, rows=32, scale=1.0),
    Latent((40, 33), 4, bias="float16", splits=2),
    Latent((40, 33), 4, bias="bool", page=16, sinks=True),
    Latent((7, 40), 5, seq=7),
    Latent((33, 70), 3, seq=33, page=16, rows=32, window=20, gap=16),
    Latent((20, 35), 17, seq=3, splits=2, bias="float32", soft_cap=4.0),
]


def attend_here(case: Latent) -> None:
    attend(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_attention_over_latents_matches_float64(interpreted, case):
    interpreted(attend_here, case)


HERE = Latent(
    (60, 8), 6, seq=5, page=16, window=30, splits=3, sinks=True, soft_cap=3.0, bias="float16", gap=8
)
LONG = Latent((100, 70), 4, page=16)
WIDE = Latent((40, 33), 40, seq=2, splits=2)
MUTANTS = [
    (Mutant("window_one_too_wide", "attention_latent.py", "position + 1 - WINDOW if WINDOW", "position - WINDOW if WINDOW"), HERE),
    (Mutant("window_of_the_tile_cut", "attention_latent.py", "tile * BLOCK_M // HEADS + 1 - WINDOW, 0)", "tile * BLOCK_M // HEADS + 3 - WINDOW, 0)"), HERE),
    (Mutant("later_tokens_seen", "attention_latent.py", "position = before + t", "position = before + t + 1"), HERE),
    (Mutant("end_of_the_first_row", "attention_latent.py", "(tile * BLOCK_M + BLOCK_M - 1) // HEADS, SEQ - 1", "tile * BLOCK_M // HEADS, SEQ - 1"), HERE),
    (Mutant("parts_overlap", "attention_latent.py", "tl.minimum(first + depth * BLOCK_N, stop)", "tl.minimum(first + depth * BLOCK_N + 1, stop)"), HERE),
    (Mutant("rest_of_the_key_ignored", "attention_latent.py", "z = tl.dot(q_rest, rest.T, z, input", "z = tl.dot(q_rest * 0, rest.T, z, input"), HERE),
    (Mutant("rest_read_from_the_values", "attention_latent.py", "tl.load(rows + SIZE_V + dr", "tl.load(rows + dr"), HERE),
    (Mutant("page_of_the_first_step_kept", "attention_latent.py", "page = next_page", "page = page"), LONG),
    (Mutant("page_of_the_step_after", "attention_latent.py", "step_rows(latents_ptr, page,", "step_rows(latents_ptr, next_page,"), HERE),
    (Mutant("second_tile_reads_the_first", "attention_latent.py", "lane = tile * BLOCK_M +", "lane = 0 * tile +"), WIDE),
    (Mutant("tiles_share_parts", "attention_latent.py", "tl.num_programs(0) + tile\n", "tl.num_programs(0)\n"), WIDE),
    (Mutant("latents_of_the_next_sequence", "attention_latent.py", "held & (dv < SIZE_V)", "(dv < SIZE_V)"), HERE),
    (Mutant("bias_in_base_two", "attention.py", "z += bias.to(tl.float32) * 1.4426950408889634", "z += bias.to(tl.float32)"), HERE),
    (Mutant("bias_of_the_first_head", "attention.py", "head.to(tl.int64) * stride_bh", "head.to(tl.int64) * 0"), HERE),
    (Mutant("bias_of_the_first_token", "attention.py", "t.to(tl.int64) * stride_bt", "t.to(tl.int64) * 0"), replace(HERE, bias="bool")),
    (Mutant("bias_of_the_first_sequence", "attention.py", "sequence.to(tl.int64) * stride_bb", "sequence.to(tl.int64) * 0"), replace(HERE, bias="bool")),
    (Mutant("hidden_keys_seen", "attention.py", "tl.where(bias, z, float(\"-inf\"))", "tl.where(bias, z, z)"), replace(HERE, bias="bool")),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Latent) -> None:
    attend(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_attention_over_latents_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", [HERE, LONG, WIDE, replace(HERE, bias="bool")], ids=str)
@pytest.mark.matrix
def test_attention_over_latents_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def build(page: int, heads: int) -> Build:
    shape = LatentShape(32, heads, 512, 64, 8192, page=page)
    return Build("attention_latent", "sm_90", attention_latent.choose(shape, "bfloat16", "sm_90"), shape)


@pytest.mark.parametrize(
    ("build", "held"), few_of([(build(0, 16), 2), (build(16, 16), 2), (build(64, 128), 3)], 2), ids=str
)
def test_each_latent_is_loaded_once_for_keys_and_values_and_some_steps_ahead(compiled, build, held):
    """Where a step waited for the table of pages, one step less would be in memory."""
    found, config = compiled(compile_build, build), build.config
    step = config.block_n * build.shape.size * 2
    assert found.loop["LDGSTS.E.BYPASS.128"] * 16 * 32 * config.num_warps == step
    assert found.shared_bytes >= held * step


def test_few_heads_get_the_tile_that_holds_them_and_a_long_sequence_alone_many_blocks():
    choose = attention_latent.choose
    assert choose(LatentShape(1, 16, 512, 64, 100), "bfloat16", "sm_90").block_m == 16
    assert choose(LatentShape(1, 128, 512, 64, 100), "bfloat16", "sm_90").block_m == 32
    alone = choose(LatentShape(1, 128, 512, 64, 32768), "bfloat16", "sm_90")
    assert alone.split_k * 128 // alone.block_m >= 2 * ARCHS["sm_90"].num_sms
    assert choose(LatentShape(64, 128, 512, 64, 32768), "bfloat16", "sm_90").split_k == 2
    assert choose(LatentShape(1, 128, 512, 64, 4096, seq=512), "bfloat16", "sm_90").split_k == 1


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"q": tensor(2, 4, 80)}, r"q must be \[batch, seq, heads, size\] with adjacent elements, got \[2, 4, 80\]"),
    ({"q": tensor(2, 1, 4, 96)}, "latents must be one head of 96 as q, got 1 of 80"),
    ({"latents": tensor(2, 2, 9, 80)}, "latents must be one head of 80 as q, got 2 of 80"),
    ({"value_size": 80}, "attention_latent: keys must have 1 to 128 elements besides the values, got 0"),
    ({"value_size": 8}, "attention_latent: values must have 16 to 512 elements, got 8"),
    ({"bias": tensor(2, 4, 1, 8)}, r"bias must be \[2, 4, 1, 9\] or longer, with adjacent positions, got \[2, 4, 1, 8\]"),
    ({"bias": tensor(2, 4, 1, 9, dtype=torch.float64)}, "bias must be torch.float16, float32 or bool, got torch.float64"),
    ({"out": tensor(2, 1, 4, 32)}, r"out must be torch.float16 \[2, 1, 4, 64\] with adjacent elements, got torch.float16 \[2, 1, 4, 32\]"),
    ({"q": tensor(2, 1, 4, 80, dtype=torch.float32), "latents": tensor(2, 1, 9, 80, dtype=torch.float32)}, "attention_latent: dtype must be one of float16, bfloat16, got 'float32'"),
    ({"arch": "sm_70"}, "attention_latent: arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, got 'sm_70'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_attention_over_latents_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(2, 1, 4, 80),
        "latents": tensor(2, 1, 9, 80),
        "lengths": tensor(2, dtype=torch.int32),
        "value_size": 64,
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        attention_latent.plan(**arguments)


def test_too_many_sequences_are_refused():
    message = "there must be less than 65536 sequences, got 65536"
    assert attention_latent.accepts(LatentShape(2**16, 1, 64, 16, 1), "float16", "sm_90") == message
