# SPDX-License-Identifier: Apache-2.0
"""Attention over caches against float64 softmax by its definition: poisoned unused slots, every option, and mistakes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_attention import answer, biases, normal, stored
from kernel_checks import Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, attention_decode
from nnfront_kernels.attention_decode import DecodeShape
from nnfront_kernels.common import ARCHS, Config


@dataclass(frozen=True)
class Decode:
    """One query for each sequence. page 0 is contiguous; `splits` and `step` replace what choose picks."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    page: int = 0
    value_size: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    splits: int = 1
    step: int = 32
    gap: int = 0
    scale: float | None = None
    fp8: bool = False
    magnitude: float = 1.0  # of values in 8 bits
    bias: bool = False

    def __str__(self) -> str:
        flags = "".join(
            f"-{name}{getattr(self, name)}"
            for name in ("page", "window", "soft_cap", "sinks", "splits", "gap", "value_size", "fp8", "bias")
            if getattr(self, name)
        )
        return f"{self.lengths}-{self.heads}of{self.kv_heads}x{self.size}{flags}"


def decode(package: ModuleType, case: Decode) -> None:
    """Launch twice, blocks in both orders, on poisoned outputs; AssertionError unless y is right and repeatable."""
    generator = torch.Generator().manual_seed(sum(case.lengths) + case.heads)
    batch, value_size = len(case.lengths), case.value_size or case.size
    q = surrounded(normal(generator, batch * case.heads, case.size).half(), case.gap, 0)
    q = q.unflatten(0, (batch, case.heads))
    first = [max(n - case.window, 0) if case.window else 0 for n in case.lengths]
    k, v = (
        stored(generator, case.kv_heads, list(case.lengths), size, first, case.page, case.gap, case.fp8, by)
        for size, by in ((case.size, 1.0), (value_size, case.magnitude))
    )
    sinks = normal(generator, case.heads).float() * 2 if case.sinks else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    bias = biases(case.lengths, case.heads, 1) if case.bias else None
    options = {
        "pages": k.pages,
        "key_scales": k.scales,
        "value_scales": v.scales,
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
        "bias": bias,
    }
    config = Config(16, case.step, 0, 4, 1, split_k=case.splits)
    kept: dict[str, Any] = {}

    def planned(views: list[torch.Tensor]) -> Any:
        out = views[0].unflatten(0, (batch, case.heads))
        plan = package.attention_decode.plan(
            q,
            k.cache,
            v.cache,
            lengths,
            **options,
            **kept,
            longest=max(case.lengths),
            out=out,
            arch="sm_80",
            config=config,
        )
        if case.splits > 1:  # the next launch gets this one's counts, as it left them
            parts = (plan.arguments["partial_ptr"], plan.arguments["arrived_ptr"])
            kept["workspace"] = package.split_k.Workspace(*parts)
        return plan

    (y,) = launched_twice(
        lambda pattern: [Guarded(batch * case.heads, value_size, torch.float16, case.gap, 0, pattern)],
        planned,
    )
    expected, drift = [], []
    for b, n in enumerate(case.lengths):
        seen = torch.arange(n) >= first[b]
        scales = v.token_scales[b] if v.token_scales else None
        own = None if bias is None else bias[b, :, 0, :n]
        row, off = answer(q[b].double(), k.tokens[b], v.tokens[b], seen, case, sinks, scales, own)
        expected.append(row)
        drift.append(off)
    assert_close(actual=y, expected=torch.cat(expected), drift=torch.cat(drift))
    stated = package.attention_decode.reference(
        q, k.cache, v.cache, lengths, **options, compute=torch.float64
    )
    assert_close(actual=stated.flatten(0, 1), expected=torch.cat(expected), drift=torch.cat(drift))


CASES = [
    Decode((1,)),
    Decode((1, 15, 16, 17), page=16),
    Decode((63, 64, 65), 3, 1, 80, page=64, soft_cap=5.0),
    Decode((127, 128, 129), 7, 1, 96, page=128, sinks=True, gap=8),
    Decode((40, 0, 33), 8, 1, 128, splits=2, sinks=True),
    Decode((100, 5), 2, 2, 256, splits=4, page=16),
    Decode((90, 3, 31), 8, 2, 64, page=16, window=1, splits=2),
    Decode((90, 3, 33, 64), 4, 1, 64, page=16, window=32, splits=3, sinks=True, soft_cap=3.0),
    Decode((200,), 6, 2, 64, window=100, splits=8, gap=16),
    Decode((40, 39), 40, 2, 64, splits=2),  # more heads in a group than a tile has rows
    Decode((65,), 4, 4, 192, value_size=128, page=64, step=64),
    Decode((33, 130), 3, 3, 64, scale=1.0, splits=4, step=16),
    Decode((40, 16, 2), 8, 1, 192, value_size=128, window=17, soft_cap=2.0, sinks=True, splits=2),
    Decode((40, 33), 6, 2, 80, page=16, splits=2, sinks=True, soft_cap=3.0, bias=True),
    Decode((33, 20), 4, 1, 64, fp8=True, bias=True, window=20),
    Decode((1, 40), 4, 1, 64, fp8=True, gap=16),
    Decode((15, 0, 70), 7, 1, 80, page=16, fp8=True, splits=2, sinks=True),
    Decode((65, 64), 6, 2, 96, page=64, fp8=True, window=20, soft_cap=4.0, splits=3),
    Decode((129,), 3, 1, 192, value_size=128, page=128, fp8=True, step=64),
]


def decode_here(case: Decode) -> None:
    decode(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_decode_matches_float64(interpreted, case):
    interpreted(decode_here, case)


# Lengths on both sides of the end of a page, windows of one key and across pages, every number of heads for a key head.
MORE = [
    Decode(
        (n, n + (page or 40) - 1, 2 * (page or 40) + 1), heads, kv, size, page, value_size=value_size,
        window=(None, 1, 20, 64)[turn % 4], splits=1 + turn % 5, sinks=turn % 2 == 1,
        soft_cap=4.0 if turn % 3 == 1 else None, gap=16 * (turn % 2), fp8=turn % 4 == 3,
    )
    for turn, (n, (heads, kv), (size, value_size), page) in enumerate(
        (n, group, sizes, page)
        for n in (1, 17, 65)
        for group in ((1, 1), (3, 1), (4, 1), (7, 1), (8, 1), (8, 2), (33, 1))
        for sizes in ((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (192, 0), (256, 0))
        for page in (0, 16, 64, 128)
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_decode_matches_float64_on_the_full_grid(interpreted, case):
    interpreted(decode_here, case)


HERE = Decode((60, 3), 6, 2, 80, page=16, window=50, splits=3, sinks=True, soft_cap=3.0, gap=8)
LONG = Decode((70,), 2, 1, 64, step=16)
UNEVEN = Decode((60,), 2, 1, 64, splits=3, step=16)  # four steps
SHORT = Decode((40, 0), 2, 1, 64, splits=4, step=16)  # three blocks have steps, and one for the empty one
WIDE = Decode((40, 33), 40, 2, 64, splits=2)
MUTANTS = [
    (Mutant("window_one_too_wide", "attention_decode.py", "tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW - 1, 0)"), HERE),
    (Mutant("own_token_not_seen", "attention_decode.py", "dtype=tl.int32) + length - 1", "dtype=tl.int32) + length - 2"), HERE),
    (Mutant("steps_of_the_last_part_lost", "attention_decode.py", "tl.cdiv(steps, SPLITS)", "steps // SPLITS"), UNEVEN),
    (Mutant("blocks_without_steps_counted", "attention_decode.py", "elif split < active:", "elif split <= active:"), SHORT),
    (Mutant("parts_overlap", "attention_decode.py", "tl.minimum(first + depth * BLOCK_N, length)", "tl.minimum(first + depth * BLOCK_N + 1, length)"), HERE),
    (Mutant("part_left_out", "attention_parts.py", "range(0, active)", "range(1, active)"), HERE),
    (Mutant("parts_in_order_of_arrival", "attention_parts.py", "tl.load(parts + s * SIZE + at", "tl.load(parts + (split + s) % active * SIZE + at"), HERE),
    (Mutant("part_counts_not_reset", "attention_parts.py", "        tl.store(arrived_ptr + group, 0)\n", ""), HERE),
    (Mutant("part_too_early", "attention_parts.py", "== active - 1", "== active - 2"), HERE),
    (Mutant("parts_not_rescaled", "attention_parts.py", "tl.exp2(its - finite)", "tl.exp2(its - its)"), HERE),
    (Mutant("groups_share_parts", "attention_parts.py", "group.to(tl.int64) * (SPLITS * SIZE)", "group.to(tl.int64) * SIZE"), HERE),
    (Mutant("key_head_of_the_first_group", "attention_decode.py", "keys_ptr + kv_head.to(tl.int64) * stride_kh", "keys_ptr + 0 * kv_head.to(tl.int64)"), HERE),
    (Mutant("second_tile_reads_the_first", "attention_decode.py", "lane = tile * BLOCK_M +", "lane = 0 * BLOCK_M +"), WIDE),
    (Mutant("heads_of_the_next_group", "attention_decode.py", "inside_m = lane < SHARED", "inside_m = lane <= SHARED"), WIDE),
    (Mutant("sink_dropped", "attention.py", "total = total * shrink + tl.exp2(sink - new)", "total = total * shrink"), HERE),
    (Mutant("sink_in_base_two", "attention.py", "inside, other=0.0).to(tl.float32) * 1.4426950408889634", "inside, other=0.0).to(tl.float32)"), HERE),
    (Mutant("cap_of_half_the_scores", "attention.py", "2.8853900817779268", "1.4426950408889634"), HERE),
    (Mutant("sums_not_rescaled", "attention.py", "total = total * shrink + tl.sum(weights, axis=1)", "total = total + tl.sum(weights, axis=1)"), LONG),
    (Mutant("values_not_rescaled", "attention.py", "acc * shrink[:, None], input", "acc, input"), LONG),
    (Mutant("padding_of_a_head_read", "attention.py", "held[:, None] & (dv < SIZE_V)", "held[:, None] & (dv < SIZE_V + 1)"), replace(HERE, gap=0)),
    (Mutant("values_beyond_the_length_read", "attention.py", "mask=held[:, None] & (dv < SIZE_V)", "mask=dv < SIZE_V"), HERE),
    (Mutant("page_of_the_first_step_kept", "attention_decode.py", "BLOCK_N, PAGE, True, bias_rows, inside_m,\n            )  # fmt: skip\n            page = next_page", "BLOCK_N, PAGE, True, bias_rows, inside_m,\n            )  # fmt: skip\n            page = page"), replace(LONG, page=16)),
    (Mutant("page_of_the_values_ignored", "attention.py", "step_rows(values_ptr, page,", "step_rows(values_ptr, page * 0,"), HERE),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Decode) -> None:
    decode(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_decoding_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", [HERE, LONG, WIDE, replace(HERE, gap=0), replace(LONG, page=16)], ids=str)
@pytest.mark.matrix
def test_decoding_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def test_a_long_sequence_alone_is_shared_by_many_blocks_and_a_full_batch_by_none():
    choose = attention_decode.choose
    alone = choose(DecodeShape(1, 32, 8, 128, 32768), "bfloat16", "sm_90")
    full = choose(DecodeShape(64, 32, 8, 128, 32768), "bfloat16", "sm_90")
    short = choose(DecodeShape(1, 32, 8, 128, 100), "bfloat16", "sm_90")
    assert alone.split_k * 8 >= 2 * ARCHS["sm_90"].num_sms
    assert (full.split_k, short.split_k) == (1, 1)
    assert choose(DecodeShape(1, 32, 8, 128, 32768, window=512), "bfloat16", "sm_90").split_k == 2


def test_the_number_of_parts_depends_on_classes_of_lengths_and_batches():
    parts = {
        attention_decode.choose(DecodeShape(b, 8, 8, 64, n), "float16", "sm_90").split_k
        for b in (5, 6, 8)
        for n in (2049, 3000, 4096)
    }
    assert len(parts) == 1


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"q": tensor(2, 64)}, r"q must be \[batch, heads, size\] with adjacent elements, got \[2, 64\]"),
    ({"q": tensor(2, 4, 80)}, "keys must have heads of 80 as q, got 64"),
    ({"q": tensor(2, 3, 64)}, "query heads must be a multiple of kv_heads, got 3 and 2"),
    ({"lengths": tensor(3, dtype=torch.int32)}, r"lengths must be a dense int32 \[2\], got torch.int32 \[3\]"),
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"soft_cap": 0.0}, "soft_cap must be above 0, got 0.0"),
    ({"sinks": tensor(3)}, r"sinks must be a dense \[4\], got \[3\]"),
    ({"out": tensor(2, 4, 32)}, r"out must be torch.float16 \[2, 4, 64\] with adjacent elements, got torch.float16 \[2, 4, 32\]"),
    ({"q": tensor(2, 4, 72), "keys": tensor(2, 2, 9, 72), "values": tensor(2, 2, 9, 72)}, "attention_decode: the size of a head must be one of 64, 80, 96, 128, 192, 256, got 72"),
    ({"q": tensor(2, 4, 64, dtype=torch.float32), "keys": tensor(2, 2, 9, 64, dtype=torch.float32), "values": tensor(2, 2, 9, 64, dtype=torch.float32)}, "attention_decode: dtype must be one of float16, bfloat16, got 'float32'"),
    ({"arch": "sm_70"}, "attention_decode: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_attention_decode_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(2, 4, 64),
        "keys": tensor(2, 2, 9, 64),
        "values": tensor(2, 2, 9, 64),
        "lengths": tensor(2, dtype=torch.int32),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        attention_decode.plan(**arguments)


def test_too_many_sequences_are_refused():
    message = "there must be less than 65536 sequences, got 65536"
    assert attention_decode.accepts(DecodeShape(2**16, 1, 1, 64, 1), "float16", "sm_90") == message
