# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of rows, each with its own adapter, against float64 matrix by matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, SUM, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, add_low_rank
from nnfront_kernels.ahead import compile_plan
from nnfront_kernels.inspect import plan_for, report

import nnfront as nn


@dataclass(frozen=True)
class LowRank:
    adapter: tuple[int, ...] = (1, -1, 0, 3, 2)
    n: int = 65
    k: int = 129
    rank: int = 8
    seq: int = 1
    splits: int = 1
    gap: int = 0
    adapters: int = 3
    wide: bool = False  # numbers of adapters in int64
    in_place: bool = False


CASES = (
    LowRank(),
    LowRank(splits=3, k=1100, rank=16),
    LowRank(seq=3, wide=True, gap=5),
    LowRank(rank=20, n=300, splits=2, k=513),
    LowRank(rank=1, n=1, k=1),
    LowRank(in_place=True, rank=64, n=130),
    LowRank(adapter=(-1, -1, 7)),
)


def run(kernels: ModuleType, case: LowRank) -> None:
    """Launch twice on poisoned outputs; AssertionError unless rows are right, and those without an adapter as they were."""
    generator = torch.Generator().manual_seed(case.k)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).half()

    rows = len(case.adapter) * case.seq
    y, x = surrounded(normal(rows, case.n), case.gap, 0), surrounded(normal(rows, case.k), case.gap, 0)
    a, b = normal(case.adapters, case.rank, case.k), normal(case.adapters, case.n, case.rank)
    adapter = torch.tensor(case.adapter, dtype=torch.int64 if case.wide else torch.int32)
    config = replace(kernels.add_low_rank.CONFIGS[0], split_k=case.splits)
    before = y.clone()
    shrink = kernels.add_low_rank.shrink(x, a, adapter, case.n, arch="sm_80", config=config)
    shrink.output.fill_(math.nan)
    shrink.launch()
    assert shrink.arguments["arrived_ptr"] is None or not shrink.arguments["arrived_ptr"].any()

    def planned(views: list[torch.Tensor]):
        if case.in_place:
            views[0].copy_(before)
        source = views[0] if case.in_place else y
        return kernels.add_low_rank.expand(
            source, shrink.output, b, adapter, out=views[0], arch="sm_80", config=config
        )

    (found,) = launched_twice(
        lambda pattern: [Guarded(rows, case.n, torch.float16, case.gap, 0, pattern)], planned
    )
    expected, drift = before.double(), torch.zeros(rows, case.n, dtype=torch.float64)
    for row in range(rows):
        number = case.adapter[row // case.seq]
        if 0 <= number < case.adapters:
            first, second = a[number].double(), b[number].double()
            expected[row] += second @ (first @ x[row].double())
            unit = SUM * EPS32 * math.sqrt(case.k + case.rank)
            drift[row] = unit * (second.abs() @ (first.abs() @ x[row].double().abs()))
        else:
            assert torch.equal(found[row], before[row])
    assert_close(actual=found, expected=expected, drift=drift + 2 * EPS32 * expected.abs())
    stated = kernels.add_low_rank.reference(before, x, a, b, adapter, compute=torch.float64)
    assert_close(actual=stated, expected=expected, drift=drift)
    whole = kernels.add_low_rank.launch(before, x, a, b, adapter, arch="sm_80", config=config)
    assert torch.equal(whole, found)


def run_here(case: LowRank) -> None:
    run(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 4), ids=str)
def test_each_row_has_the_changes_of_its_adapter(interpreted, case):
    interpreted(run_here, case)


FILE = "add_low_rank.py"
MUTANTS = [
    (Mutant("adapter_of_the_row", FILE, "tl.load(adapter_ptr + row // SEQ).to(tl.int64)\n    y =", "tl.load(adapter_ptr + row // SEQ * 0).to(tl.int64)\n    y ="), CASES[0]),
    (Mutant("none_is_the_last", FILE, "    if (number >= 0) & (number < ADAPTERS):\n        rank = tl.arange(0, WIDTH)", "    if number < ADAPTERS:\n        rank = tl.arange(0, WIDTH)"), CASES[0]),
    (Mutant("first_ranks_twice", FILE, "rank = tl.program_id(2) * BLOCK_R +", "rank = 0 * BLOCK_R +"), CASES[3]),
    (Mutant("later_splits_forgotten", FILE, "range(split * depth, end", "range(0 * depth, end"), CASES[1]),
    (Mutant("edge_of_k_unmasked", FILE, "x = tl.load(x_row + at, mask=at < end, other=0.0)", "x = tl.load(x_row + at, mask=at < end + 1, other=0.0)"), CASES[2]),
    (Mutant("y_dropped", FILE, "        y += tl.sum(b", "        y = tl.sum(b"), CASES[0]),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: LowRank) -> None:
    run(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mistakes_are_found(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


def facts(rank: int) -> list[tuple[int, bool, str]]:
    """Of both launches: spills, whether all matrices are read 16 bytes at a time, and what comes before the wait."""
    shape = replace(add_low_rank.KERNEL.typical, rank=rank)
    (y, x, a, b, adapter), _ = add_low_rank.example(shape, "bfloat16")
    first = add_low_rank.shrink(x, a, adapter, shape.n, arch="sm_90")
    plans = [first, add_low_rank.expand(y, first.output, b, adapter, arch="sm_90")]
    found = [report(plan, "sm_90") for plan in plans]
    return [
        (r.spills, any(name.endswith(".128") for name in r.loads), "".join(r.order).split("WAIT")[0])
        for r in found
    ]


@pytest.mark.parametrize("rank", few_of([16, 64, 256]))
def test_matrices_are_read_in_wide_loads_and_nothing_before_earlier_launches_have_ended(compiled, rank):
    assert compiled(facts, rank) == [(0, True, "")] * 2


def same_kernel(rows: int) -> bool:
    shapes = [replace(add_low_rank.KERNEL.typical, rows=n, adapters=n, seq=1) for n in (1, rows)]
    made = [
        compile_plan(plan_for(add_low_rank.KERNEL, s, "bfloat16", "sm_90", add_low_rank.CONFIGS[0]), "sm_90")
        for s in shapes
    ]
    return made[0].asm["ptx"] == made[1].asm["ptx"]


def test_no_number_of_rows_or_adapters_is_compiled_anew(compiled):
    assert compiled(same_kernel, 48)


def changed_in_a_program(seq: int) -> tuple[float, set[str]]:
    """How far a product with adapters by the kernels is from the CPU's in float64, and the kernels that ran."""

    class Product(nn.Module):
        def __init__(self) -> None:
            self.proj = nn.Linear(32, 48, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.proj(x)

    torch.manual_seed(0)
    shapes = {"proj.weight": (48, 32), "proj.weight.lora_a": (3, 4, 32), "proj.weight.lora_b": (3, 48, 4)}
    x, adapter = torch.randn(4, seq, 32).half(), torch.tensor([2, -1, 0, 7], dtype=torch.int32)
    weights = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    found = []
    for dtype, target in (("float16", "cuda"), ("float64", "cpu")):
        with nn.default_dtype(dtype):
            ir = Product().export({"forward": {"x": nn.spec.Tensor(["batch", "seq", 32], dtype)}})
        ir = nn.passes.add_adapters(ir, {"proj.weight": 4}, 3)
        executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target=target)
        kind = getattr(torch, dtype)
        session = executable.load({name: weight.to(kind) for name, weight in weights.items()})
        found.append(session["forward"](x.to(kind), adapter).double())
        if target == "cuda":
            kernels = {run.kernel for run in executable.program.methods["forward"].body.instructions}
    return float((found[0] - found[1]).abs().max() / found[1].abs().max()), kernels


@pytest.mark.parametrize("seq", [3, 70])  # more rows than the kernel takes in a call: torch's products
def test_a_program_with_adapters_runs_on_the_kernel_and_agrees_with_the_cpu(interpreted, seq):
    off, kernels = interpreted(changed_in_a_program, seq)
    assert off < 1e-3  # a product and a change are rounded to float16, 5e-4 each at most
    assert "triton_add_low_rank" in kernels


x = torch.empty(4, 32, dtype=torch.float16, device="meta")
a, b = torch.empty(2, 8, 32, dtype=torch.float16, device="meta"), torch.empty(2, 16, 8, dtype=torch.float16, device="meta")  # fmt: skip
numbers = torch.empty(4, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((x[:, :16], x, a, b[:1], numbers), r"b must be \[2, 16, 8\] and y torch.float16, got \[1, 16, 8\]"),
        ((x[:, :16], x, a.mT, b.mT, numbers), r"b must be \[2, 16, 32\]"),
        ((x[:, :16], x, a, b, numbers[:3]), "rows must be a multiple of the 3 sequences, got 4"),
        ((x[:, :16], x, a, b, numbers.float()), r"adapter must be dense int32 or int64 \[sequences\], got torch.float32 \[4\]"),
        ((x[:, :16], x, a.float(), b, numbers), r"a must be torch.float16 \[2, 8, 32\] and dense, got torch.float32"),
        ((x[:, :16], x, torch.empty(2, 257, 32, dtype=torch.float16, device="meta"), torch.empty(2, 16, 257, dtype=torch.float16, device="meta"), numbers), "the rank must be 1 to 256, got 257"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(given, text):
    with pytest.raises(KernelError, match=text):
        add_low_rank.launch(*given, arch="sm_90")
