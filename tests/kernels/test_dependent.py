# SPDX-License-Identifier: Apache-2.0
"""Launches that begin before those before them have ended: in machine code, what touches memory that others write comes after the wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_mutants import Mutant, package
from nnfront_kernels import dependent
from nnfront_kernels.ahead import build
from nnfront_kernels.common import Config
from nnfront_kernels.inspect import plan_for, report

PRODUCTS = ("matmul_small_m", "matmul_int4", "matmul_int8", "matmul_fp8")
# Of prompts, or before the first token: what a gap between two of their launches costs is little of what they take.
ALONE = ("matmul", "matmul_tma", "unpack_weight", "softmax", "rope", "attention_prefill")
ROWS = tuple(kernel.name for kernel in nnfront_kernels.KERNELS if kernel.name not in PRODUCTS + ALONE)


def plan_of(name: str, arch: str, mutant: Mutant | None = None, **options: Any) -> Any:
    kernels = nnfront_kernels if mutant is None else package(mutant)
    kernel = next(kernel for kernel in kernels.KERNELS if kernel.name == name)
    shape = kernel.typical
    if name in PRODUCTS:
        shape, options = replace(shape, m=16), {"constant_weights": True, **options}
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
    return plan_for(kernel, shape, dtype, arch, **options)


def order_of(name: str, arch: str, mutant: Mutant | None = None) -> tuple[str, ...]:
    return report(plan_of(name, arch, mutant), arch).order


def wrong(name: str, order: tuple[str, ...]) -> str:
    """What is wrong with the order; "" if nothing."""
    if order.count("WAIT") != 1:
        return f"it waits {order.count('WAIT')} times"
    if "NEXT" not in order:
        return "the next launch may not start before this one has ended"
    before, after = order[: order.index("WAIT")], order[order.index("WAIT") :]
    if early := set(before) - {"FETCH"}:
        return f"{', '.join(sorted(early))} before the wait"
    if name in PRODUCTS:
        if not before:
            return "no weight is fetched before the wait"
        if "LOAD" not in after[: after.index("NEXT")]:
            return "the next launch starts before the product"
    return ""


def dependents() -> set[str]:
    names = [kernel.name for kernel in nnfront_kernels.KERNELS]
    return {name for name in names if plan_of(name, "sm_90").dependent}


def test_every_kernel_waits_itself_but_for_those_that_are_named(compiled):
    assert compiled(dependents) == {*PRODUCTS, *ROWS}


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_100", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", few_of(PRODUCTS + ROWS, 4))
def test_only_weights_are_touched_before_earlier_launches_have_ended(compiled, name, arch):
    assert wrong(name, compiled(order_of, name, arch)) == ""


SMALL = "matmul_small_m"
WAIT = "    wait_for_earlier(PDL)\n"
MUTANTS = [
    (Mutant("no_wait", "matmul_small_m.py", WAIT, ""), SMALL, "it waits 0 times"),
    (Mutant("late_wait", "rms_norm.py", WAIT, "    tl.store(y_ptr, tl.load(x_ptr))\n" + WAIT), "rms_norm", "LOAD, STORE before the wait"),
    (Mutant("late_fetch", "matmul_small_m.py", "2 * K, FETCH)\n" + WAIT, "2 * K, 0)\n" + WAIT), SMALL, "no weight is fetched before the wait"),
    (Mutant("no_next", "split_k.py", "    let_next_start(PDL)\n", ""), SMALL, "the next launch may not start before this one has ended"),
    (Mutant("early_next", "matmul_small_m.py", WAIT, WAIT + "    tl.extra.cuda.gdc_launch_dependents()\n"), SMALL, "the next launch starts before the product"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "name", "complaint"), few_of(MUTANTS, 2), ids=[str(m[0]) for m in MUTANTS]
)
def test_a_wait_in_the_wrong_place_is_found(compiled, mutant, name, complaint):
    assert wrong(name, compiled(order_of, name, "sm_90", mutant)) == complaint


def facts(name: str, arch: str) -> tuple[bool, bool, int]:
    plan = plan_of(name, arch)
    return plan.dependent, build(plan, arch)[0]["pdl"], order_of(name, arch).count("WAIT")


@pytest.mark.parametrize(
    ("arch", "found"), [("sm_80", (False, False, 0)), ("sm_90", (True, True, 1))], ids=str
)
def test_kernels_say_whether_they_wait_themselves_and_do_not_where_they_cannot(compiled, arch, found):
    for name in (SMALL, "rms_norm"):
        assert compiled(facts, name, arch) == found


def planned_in_the_interpreter() -> list[bool]:
    return [plan_of(name, "sm_90").dependent for name in PRODUCTS + ROWS]


def test_no_interpreted_kernel_waits(interpreted):
    assert not any(interpreted(planned_in_the_interpreter))


def launched(arch: str) -> dict[str, Any]:
    """What Triton's own launch is told."""
    from nnfront_kernels.common import jit

    seen: dict[str, Any] = {}
    plan = plan_of("rms_norm", arch)

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: seen.update(given)

    jit(replace(plan, kernel=Kernel()))
    return {"launch_pdl": seen.get("launch_pdl"), "PDL": seen["PDL"]}


def test_tritons_launch_is_told_of_kernels_that_wait(compiled):
    assert compiled(launched, "sm_90") == {"launch_pdl": True, "PDL": True}
    assert compiled(launched, "sm_80") == {"launch_pdl": None, "PDL": False}


def lines() -> list[int]:
    row = Config(1, 8, 1024, 4, 2)
    groups = Config(16, 128, 128, 4, 4)
    found = [dependent.lines_ahead(row, 16, arch) for arch in ("sm_80", "sm_90")]
    return [*found, dependent.lines_ahead(row, 0, "sm_90"), dependent.lines_ahead(groups, 4, "sm_90")]


def test_the_first_steps_of_a_row_are_fetched_in_lines_of_128_bytes(compiled):
    assert compiled(lines) == [0, 16, 0, 2]  # 1024 of 2 bytes; three steps of 64 bytes


def fetched_weights_are_the_same() -> bool:
    """Weights that an earlier launch may have written are not fetched early."""
    x, w = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16)
    plans = [
        nnfront_kernels.matmul_small_m.plan(x, w, arch="sm_90", constant_weights=constant)
        for constant in (True, False)
    ]
    return [plan.constants["FETCH"] for plan in plans] == [16, 0]


def test_weights_that_a_launch_may_write_are_not_fetched_before_it_has_ended(compiled):
    assert compiled(fetched_weights_are_the_same)
