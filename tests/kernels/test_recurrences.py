# SPDX-License-Identifier: Apache-2.0
"""Recurrences against float64, token by token: chunks that end anywhere, states that come in or do not, groups, parts of wider tensors, and mistakes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_attention import normal
from kernel_checks import EPS32, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, causal_conv1d, gated_delta_rule, ssm_scan


@dataclass(frozen=True)
class Tokens:
    """`seq` tokens of `batch` sequences. size and other: features and states, key and value, channels and taps."""

    seq: int
    size: int
    other: int
    batch: int = 2
    heads: int = 4
    groups: int = 2
    has_state: bool = True
    option: bool = True  # d, a norm of queries and keys, silu
    channels: bool = False
    gap: int = 0
    dtype: str = "float16"
    fade: float = 0.1

    def __str__(self) -> str:
        flags = "".join(f"-{n}" for n in ("has_state", "option", "channels") if getattr(self, n))
        return f"{self.batch}x{self.seq}x{self.heads}of{self.groups}x{self.size}x{self.other}-{self.dtype}-gap{self.gap}{flags}"


def placed(generator: torch.Generator, case: Tokens, *sizes: int) -> torch.Tensor:
    """Random tokens [batch, seq, *sizes] as part of something wider that is NaN."""
    rows = normal(generator, case.batch * case.seq, sizes[0] * sizes[1])
    view = surrounded(rows.to(getattr(torch, case.dtype)), case.gap, 0)
    return view.unflatten(1, sizes).unflatten(0, (case.batch, case.seq))


def wide(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.double().repeat_interleave(heads // x.shape[2], 2)


def check(
    package: ModuleType, name: str, case: Tokens, operands: tuple[Any, ...], options: dict[str, Any],
    expected: tuple[torch.Tensor, torch.Tensor], sizes: tuple[torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    """Launch twice on a poisoned output; AssertionError unless y and the state are right and repeatable. `sizes` are the magnitudes of their terms."""
    kernel, rows = getattr(package, name), case.batch * case.seq
    width, states = expected[0].numel() // rows, []

    def planned(views: list[torch.Tensor]) -> Any:
        out = (
            views[0].view(expected[0].shape)
            if not case.gap
            else views[0].unflatten(1, expected[0].shape[2:]).unflatten(0, expected[0].shape[:2])
        )
        plan = kernel.plan(*operands, **options, out=out, arch="sm_80")
        plan.arguments["after_ptr"].fill_(float("nan"))
        states.append(plan.arguments["after_ptr"])
        return plan

    dtype = getattr(torch, case.dtype)
    (y,) = launched_twice(lambda pattern: [Guarded(rows, width, dtype, case.gap, 0, pattern)], planned)
    assert torch.equal(*states), "two runs in different orders differ"
    if case.has_state and states[0].numel():
        assert_in_place(kernel, operands, options, states[0])
    # In chunks a factor is taken in two parts of float16, whose smallest numbers are 2^-24 apart.
    least = 2.0**-24 if case.seq > 1 and case.dtype == "float16" else 0.0
    drift = 2.0**-14 if case.seq > 1 and name != "causal_conv1d" else 64 * EPS32
    for got, want, size in zip((y, states[0]), expected, sizes, strict=True):
        want, size = want.reshape(got.shape), size.reshape(got.shape)
        flat = [t.flatten(0, -2) if t.ndim > 2 else t for t in (got, want, drift * size + least)]
        assert_close(actual=flat[0], expected=flat[1], drift=flat[2])
    stated = kernel.reference(*operands, **options, compute=torch.float64)
    for got, want, size in zip(stated, expected, sizes, strict=True):
        assert ((got.double() - want).abs() <= 2.0**-9 * size + 1e-6).all(), (
            "differs from the stated definition"
        )


def assert_in_place(
    kernel: Any, operands: tuple[Any, ...], options: dict[str, Any], expected: torch.Tensor
) -> None:
    """The same states are written where those before lie, some units of 16 bytes behind the tensor that is given, and nothing around them; of sequences
    that are nobody's, the last ones, nothing is read or written, and results are those of a state of zeros.
    """
    *others, state = operands
    unit = 16 // state.itemsize
    room = torch.empty(state.numel() + 10 * unit, dtype=state.dtype)
    begun = {}
    for theirs in (len(state), len(state) - 1):
        lies, given = (room[i * unit :][: state[:theirs].numel()].view(state[:theirs].shape) for i in (7, 2))
        room.fill_(float("nan"))
        lies.copy_(state[:theirs])
        base = torch.tensor([5, len(state) - theirs])
        y, _ = kernel.plan(*others, given, **options, after=given, base=base, arch="sm_80").launch()
        assert torch.equal(lies, expected[:theirs]), "in place the state is another"
        assert room[: 7 * unit].isnan().all()
        assert room[7 * unit + lies.numel() :].isnan().all()
        begun[theirs] = y
    kept = torch.cat([state[:-1], torch.zeros_like(state[-1:])])
    of_nobody, _ = kernel.plan(*others, kept, **options, arch="sm_80").launch()
    assert torch.equal(begun[len(state) - 1], of_nobody), "a sequence that is nobody's begins from something"
    assert torch.equal(begun[len(state)][:-1], of_nobody[:-1]), "sequences have other bits beside nobody's"


def scan(package: ModuleType, case: Tokens) -> None:
    generator = torch.Generator().manual_seed(case.seq + case.size)
    x = placed(generator, case, case.heads, case.size)
    b, c = (placed(generator, case, case.groups, case.other) for _ in range(2))
    dt = torch.rand(case.batch, case.seq, case.heads, generator=generator)
    a = -case.fade * torch.rand(case.heads, generator=generator) - case.fade
    d = normal(generator, case.heads).float() if case.option else None
    shape = (case.batch, case.heads, case.size, case.other)
    state = normal(generator, *shape).float() if case.has_state else None
    h = torch.zeros(shape, dtype=torch.float64) if state is None else state.double()
    size, ys, terms = h.abs(), [], []
    for t in range(case.seq):
        step, token = dt[:, t].double(), x[:, t].double()
        write, read = (wide(m, case.heads)[:, t, :, None] for m in (b, c))
        left, new = (step * a.double()).exp()[..., None, None], (step[..., None] * token)[..., None] * write
        h, size = left * h + new, left * size + new.abs()
        own = 0 if d is None else d.double()[:, None] * token
        ys.append((h * read).sum(-1) + own)
        terms.append((size * read.abs()).sum(-1) + (0 if d is None else own.abs()))
    check(
        package,
        "ssm_scan",
        case,
        (x, dt, a, b, c, d, state),
        {},
        (torch.stack(ys, 1), h),
        (torch.stack(terms, 1), size),
    )


def delta(package: ModuleType, case: Tokens) -> None:
    generator = torch.Generator().manual_seed(case.seq + case.size)
    q, k = (placed(generator, case, case.groups, case.size) for _ in range(2))
    v = placed(generator, case, case.heads, case.other)
    scale = 0.3
    if not case.option:
        q, k = (x.clone() for x in (q, k))
        k.copy_(k.float() / k.float().norm(dim=-1, keepdim=True))
    rates = (case.batch, case.seq, case.heads, *([case.size] if case.channels else []))
    g = -case.fade * torch.rand(rates, generator=generator)
    beta = torch.rand(rates[:3], generator=generator)
    shape = (case.batch, case.heads, case.size, case.other)
    state = normal(generator, *shape).float() if case.has_state else None
    h = torch.zeros(shape, dtype=torch.float64) if state is None else state.double()
    size, ys, terms = h.abs(), [], []
    for t in range(case.seq):
        query, key = (wide(m, case.heads)[:, t] for m in (q, k))
        if case.option:
            query, key = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (query, key))
        left = g[:, t].double().exp()
        left = (left if case.channels else left[..., None])[..., None]
        h, size, rate, value = left * h, left * size, beta[:, t].double()[..., None], v[:, t].double()
        change = rate * (value - (key[..., None] * h).sum(2))
        most = rate * (value.abs() + (key.abs()[..., None] * size).sum(2))
        h = h + key[..., None] * change[:, :, None]
        size = torch.maximum(size, h.abs()) + (key.abs()[..., None] * most[:, :, None]) / 4
        ys.append(scale * (query[..., None] * h).sum(2))
        terms.append(scale * (query.abs()[..., None] * size).sum(2))
    options = {"scale": scale, "normed": case.option}
    check(
        package,
        "gated_delta_rule",
        case,
        (q, k, v, g, beta, state),
        options,
        (torch.stack(ys, 1), h),
        (torch.stack(terms, 1), size),
    )


def convolve(package: ModuleType, case: Tokens) -> None:
    generator = torch.Generator().manual_seed(case.seq + case.size)
    x = placed(generator, case, 1, case.size).squeeze(2)
    weight = surrounded(normal(generator, case.size, case.other).half(), case.gap, 0)
    bias = normal(generator, case.size).float() if case.option else None
    before = normal(generator, case.batch, case.size, case.other - 1).half() if case.has_state else None
    tokens = torch.cat(
        [torch.zeros(case.batch, case.other - 1, case.size) if before is None else before.mT, x], 1
    ).double()
    windows = torch.stack([tokens[:, i : i + case.seq] for i in range(case.other)], -1)
    y = (windows * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    size = (windows * weight.double()).abs().sum(-1) + (0 if bias is None else bias.double().abs())
    y = y / (1 + (-y).exp()) if case.option else y
    after = tokens[:, case.seq :].mT
    check(
        package,
        "causal_conv1d",
        case,
        (x, weight, bias, before),
        {"silu": case.option},
        (y, after),
        (size, after.abs()),
    )


RUNS = {"scan": scan, "delta": delta, "convolve": convolve}
CASES = [
    ("scan", Tokens(1, 24, 40, gap=8)),
    ("scan", Tokens(1, 16, 16, heads=3, groups=1, has_state=False, option=False, dtype="float32")),
    ("scan", Tokens(32, 40, 24)),
    ("scan", Tokens(71, 16, 40, gap=8, fade=3.0)),
    ("scan", Tokens(33, 33, 17, heads=3, groups=3, has_state=False, option=False, dtype="float32")),
    ("delta", Tokens(1, 24, 40, gap=8)),
    ("delta", Tokens(1, 40, 33, channels=True, option=False)),
    ("delta", Tokens(1, 16, 16, heads=3, groups=1, has_state=False, dtype="float32")),
    ("delta", Tokens(16, 40, 24)),
    ("delta", Tokens(18, 33, 17, heads=3, groups=3, has_state=False, option=False, dtype="float32")),
    ("delta", Tokens(39, 16, 40, gap=8, fade=3.0)),
    ("convolve", Tokens(1, 530, 4, gap=8)),
    ("convolve", Tokens(1, 20, 1, has_state=False, option=False)),
    ("convolve", Tokens(2, 130, 4, gap=3)),
    ("convolve", Tokens(35, 20, 3, has_state=False, option=False, dtype="float32")),
]  # fmt: skip


def run(name: str, case: Tokens) -> None:
    RUNS[name](nnfront_kernels, case)


@pytest.mark.parametrize(("name", "case"), few_of(CASES, 4), ids=str)
def test_recurrence_matches_float64(interpreted, name, case):
    interpreted(run, name, case)


SCAN, DELTA, CONV = Tokens(71, 16, 40, gap=8), Tokens(39, 16, 40, gap=8), Tokens(19, 130, 4, gap=8)
ONE_SCAN, ONE_DELTA, ONE_CONV = (replace(case, seq=1) for case in (SCAN, DELTA, CONV))
MUTANTS = [
    ("scan", SCAN, "recurrence.py", "at[:, None] >= at[None, :]", "at[:, None] > at[None, :]", "own_token_unread"),
    ("scan", SCAN, "recurrence.py", "acc))\n    part = b", "acc * 0))\n    part = b", "first_part_of_a_product_alone"),
    ("scan", SCAN, "recurrence.py", "tl.dot(a, (b - part.to(tl.float32)).to(a.dtype), tl.dot(a, part, acc))", "tl.dot(a, part, acc)", "second_part_of_a_product_lost"),
    ("scan", SCAN, "ssm_scan.py", "* tl.exp(sums)[:, None]", "* tl.exp(last)", "what_was_before_fades_as_a_whole"),
    ("scan", SCAN, "ssm_scan.py", "(steps * tl.exp(last - sums))", "(steps * tl.exp(sums))", "tokens_fade_backwards"),
    ("scan", SCAN, "ssm_scan.py", "h * tl.exp(last))", "h)", "state_does_not_fade"),
    ("scan", SCAN, "ssm_scan.py", "mask=inside_t, other=0.0).to(tl.float32)\n            in_x", "mask=inside_t, other=0.5).to(tl.float32)\n            in_x", "tokens_beyond_the_last_step"),
    ("scan", SCAN, "ssm_scan.py", "head // SHARED * stride_bg", "0 * stride_bg", "group_of_the_first_head"),
    ("scan", SCAN, "ssm_scan.py", "+ skip * x.to(tl.float32)", "+ 0 * x.to(tl.float32)", "d_dropped_in_chunks"),
    ("scan", ONE_SCAN, "ssm_scan.py", "+ skip * x\n", "\n", "d_dropped"),
    ("scan", ONE_SCAN, "ssm_scan.py", "h * tl.exp(step * rate)", "h * tl.exp(rate)", "step_left_out"),
    ("scan", ONE_SCAN, "ssm_scan.py", "tl.num_programs(1) + head) * SIZE", "tl.num_programs(1)) * SIZE", "state_of_the_first_head"),
    ("delta", DELTA, "gated_delta_rule.py", "range(0, CHUNK - 1)", "range(0, CHUNK - 2)", "system_solved_up_to_the_last_but_one"),
    ("delta", DELTA, "gated_delta_rule.py", "& (at[:, None] > j)", "& (at[:, None] >= j)", "token_finds_itself"),
    ("delta", DELTA, "gated_delta_rule.py", "* (beta * of_key)[:, None]", "* of_key[:, None]", "beta_of_the_system_dropped"),
    ("delta", DELTA, "gated_delta_rule.py", "(now * of_key)[:, None]", "of_key[:, None]", "what_was_before_does_not_fade"),
    ("delta", DELTA, "gated_delta_rule.py", "(tl.exp(last - sums) * of_key)", "of_key", "tokens_do_not_fade"),
    ("delta", DELTA, "gated_delta_rule.py", "tl.sqrt_rn(squares + 1e-6)", "tl.sqrt_rn(squares + 1e-1)", "another_epsilon"),
    ("delta", ONE_DELTA, "gated_delta_rule.py", "(value - tl.sum(h * key, axis=0))", "value", "nothing_is_corrected"),
    ("delta", replace(ONE_DELTA, channels=True), "gated_delta_rule.py", "tl.load(g_head + dk, mask", "tl.load(g_head + 0 * dk, mask", "rate_of_the_first_channel"),
    ("scan", ONE_SCAN, "ssm_scan.py", "moved(after_ptr, base_ptr, 0)", "after_ptr", "base_of_the_next_state_left_out"),
    ("delta", ONE_DELTA, "gated_delta_rule.py", "moved(state_ptr, base_ptr, 0)", "state_ptr", "base_of_the_state_left_out"),
    ("scan", ONE_SCAN, "ssm_scan.py", "s < theirs(STATES, base_ptr)", "s < STATES", "states_of_nobody"),
    ("delta", ONE_DELTA, "gated_delta_rule.py", "dv < theirs(SIZE_V, base_ptr)", "dv < SIZE_V", "columns_of_nobody"),
    ("convolve", ONE_CONV, "causal_conv1d.py", "mask=held & (source < 0)", "mask=inside & (source < 0)", "tokens_of_nobody_read"),
    ("convolve", ONE_CONV, "causal_conv1d.py", "mask=held)", "mask=inside_c)", "tokens_of_nobody_written"),
    ("scan", ONE_SCAN, "recurrence.py", "tl.num_programs(2) - tl.load(base_ptr + 1)", "tl.load(base_ptr + 1)", "nobodys_counted_as_theirs"),
    ("convolve", ONE_CONV, "causal_conv1d.py", "moved(state_ptr, base_ptr, 0)", "state_ptr", "base_left_out"),
    ("convolve", CONV, "causal_conv1d.py", "source >= 0", "source > 0", "first_token_skipped"),
    ("convolve", CONV, "causal_conv1d.py", "t + (i - WIDTH + 1)", "t + (WIDTH - 1 - i)", "taps_ahead"),
    ("convolve", CONV, "causal_conv1d.py", "SEQ + i - WIDTH + 1", "SEQ + i - WIDTH", "state_a_token_early"),
    ("convolve", ONE_CONV, "causal_conv1d.py", "(batch * CHANNELS + c)", "(0 * batch + c)", "state_of_the_first_sequence"),
    ("convolve", ONE_CONV, "causal_conv1d.py", "y / (1.0 + tl.exp(-y))", "1 / (1.0 + tl.exp(-y))", "sigmoid"),
]  # fmt: skip


def run_mutant(mutant: Mutant, name: str, case: Tokens) -> None:
    RUNS[name](package(mutant), case)


def mistakes() -> list[Any]:
    return [
        pytest.param(Mutant(f"recurrence_{why}", file, old, new), name, case, id=why)
        for name, case, file, old, new, why in MUTANTS
    ]


@pytest.mark.parametrize(("mutant", "name", "case"), mistakes())
@pytest.mark.matrix
def test_mutant_of_a_recurrence_is_caught(interpreted, mutant, name, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, name, case)


@pytest.mark.parametrize(
    ("name", "case"), sorted({(name, case) for name, case, *_ in MUTANTS}, key=str), ids=str
)
@pytest.mark.matrix
def test_recurrence_without_the_mistake_passes(interpreted, name, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), name, case)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


RATES, STATE = tensor(2, 3, 4, dtype=torch.float32), tensor(2, 4, 16, 24, dtype=torch.float32)
SCANNED = {
    "x": tensor(2, 3, 4, 16),
    "dt": RATES,
    "a": tensor(4),
    "b": tensor(2, 3, 2, 24),
    "c": tensor(2, 3, 2, 24),
    "state": STATE,
}
RULED = {
    "q": tensor(2, 3, 2, 16),
    "k": tensor(2, 3, 2, 16),
    "v": tensor(2, 3, 4, 24),
    "g": RATES,
    "beta": RATES,
    "state": STATE,
}
CONVOLVED = {"x": tensor(2, 3, 20), "weight": tensor(20, 4), "state": tensor(2, 20, 3)}
WRONG = [
    (ssm_scan, SCANNED, {"x": tensor(2, 3, 64)}, r"x and b must have 4 axes, got \[2, 3, 64\]"),
    (ssm_scan, SCANNED, {"b": tensor(2, 3, 3, 24)}, "ssm_scan: heads must be a multiple of groups, got 4 and 3"),
    (ssm_scan, SCANNED, {"c": tensor(2, 3, 2, 24, dtype=torch.float32)}, "c must be torch.float16 as x, got torch.float32"),
    (ssm_scan, SCANNED, {"dt": tensor(2, 3)}, r"dt must be \[2, 3, 4\], got \[2, 3\]"),
    (ssm_scan, SCANNED, {"state": tensor(2, 4, 16, 24)}, "state must be torch.float32, got torch.float16"),
    (ssm_scan, SCANNED, {"state": tensor(2, 4, 24, 16, dtype=torch.float32).mT}, r"state must be a dense \[2, 4, 16, 24\], got"),
    (ssm_scan, SCANNED, {"x": tensor(2, 3, 4, 300)}, "features of a head must be 1 to 256, got 300"),
    (ssm_scan, SCANNED, {"arch": "sm_70"}, "arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, got 'sm_70'"),
    (gated_delta_rule, RULED, {"k": tensor(2, 3, 2, 8)}, r"k must be \[2, 3, 2, 16\] with adjacent elements, got \[2, 3, 2, 8\]"),
    (gated_delta_rule, RULED, {"beta": tensor(2, 3)}, r"g and beta must be \[2, 3, 4\], got"),
    (gated_delta_rule, RULED, {"g": tensor(2, 3, 4, 16)}, "gated_delta_rule: with a rate for each channel there must be one token, got 3"),
    (gated_delta_rule, RULED, {"q": tensor(2, 3, 2, 16, dtype=torch.float64)}, "dtype must be one of float16, bfloat16, float32, got 'float64'"),
    (causal_conv1d, CONVOLVED, {"weight": tensor(20, 17)}, "causal_conv1d: there must be 1 to 16 taps, got 17"),
    (causal_conv1d, CONVOLVED, {"bias": tensor(4)}, r"bias must be a dense \[20\], got \[4\]"),
    (ssm_scan, SCANNED, {"after": tensor(2, 4, 16, 23, dtype=torch.float32)}, r"after must be a dense \[2, 4, 16, 24\], got"),
    (causal_conv1d, CONVOLVED, {"after": tensor(2, 20, 3, dtype=torch.float32)}, "after must be torch.float16, got torch.float32"),
    (gated_delta_rule, RULED, {"base": tensor(4, dtype=torch.int64)}, r"base must be int64 \[2\], got torch.int64 \[4\]"),
    (ssm_scan, SCANNED, {"state": tensor(1, 4, 16, 24, dtype=torch.float32)}, r"state must be a dense \[2, 4, 16, 24\], got \[1, 4, 16, 24\]"),
    (ssm_scan, SCANNED, {"state": tensor(3, 4, 16, 24, dtype=torch.float32), "base": tensor(2, dtype=torch.int64)}, r"state must be a dense \[2, 4, 16, 24\], got \[3, 4, 16, 24\]"),
    (causal_conv1d, CONVOLVED, {"state": tensor(2, 3, 20).mT}, r"state must be a dense \[2, 20, 3\], got"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "given", "changes", "message"), WRONG, ids=[m[-30:] for *_, m in WRONG])
def test_a_kernel_of_a_recurrence_says_what_does_not_fit(kernel, given, changes, message):
    with pytest.raises(KernelError, match=message):
        kernel.plan(**{"arch": "sm_90", **given, **changes})


def test_one_token_takes_the_recurrence_and_more_take_chunks():
    for kernel in (ssm_scan, gated_delta_rule):
        shape = replace(kernel.KERNEL.typical, seq=1)
        assert kernel.choose(shape, "bfloat16", "sm_90").block_m == 1
        assert kernel.choose(replace(shape, seq=2), "bfloat16", "sm_90").block_m > 1
