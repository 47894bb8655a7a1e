# SPDX-License-Identifier: Apache-2.0
"""Plans that are remembered: the second of alike launches does no checks, and is the launch that a plan made anew describes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import nnfront_kernels
import pytest
import torch
from nnfront_kernels import matmul, matmul_small_m, remembered, rms_norm
from nnfront_kernels.ahead import fingerprint
from nnfront_kernels.common import KernelError, Plan, launched_by, planning_for
from nnfront_kernels.split_k import Sizes, Workspace, allocated, lending

REMEMBERED = [kernel for kernel in nnfront_kernels.KERNELS if hasattr(kernel.plan, "__wrapped__")]


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def described(plan: Plan, given: list[torch.Tensor]) -> dict[str, Any]:
    """A plan in comparable terms: a tensor is one that was given, by its place, or of a size."""

    def seen(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        places = [i for i, tensor in enumerate(given) if tensor.data_ptr() == value.data_ptr()]
        return places, value.shape, value.stride(), value.dtype

    return {
        "kernel": plan.kernel,
        "grid": plan.grid,
        "config": plan.config,
        "constants": plan.constants,
        "arguments": {name: seen(value) for name, value in plan.arguments.items()},
        "output": seen(plan.output),
        "mark": fingerprint(plan),
    }


def plans_of(name: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """A plan that is remembered and one made anew, of the same tensors, after one of others."""
    kernel = next(kernel for kernel in REMEMBERED if kernel.name == name)
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]

    def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return kernel.example(kernel.typical, dtype, "cpu")

    first, options = arguments()
    kernel.plan(*first, **options, arch="sm_90")
    again, options = arguments()
    given = [value for value in (*again, *options.values()) if isinstance(value, torch.Tensor)]
    found = kernel.plan(*again, **options, arch="sm_90")
    anew = kernel.plan.__wrapped__(*again, **options, arch="sm_90")
    return described(found, given), described(anew, given), found.alike is not None


@pytest.mark.parametrize("name", [kernel.name for kernel in REMEMBERED])
def test_a_remembered_plan_is_the_one_that_would_be_made(compiled, name):
    compiled(same_plans, name)


def same_plans(name: str) -> None:
    found, anew, was_remembered = plans_of(name)
    assert was_remembered
    assert found == anew


def test_what_a_decode_step_and_a_prompt_launch_is_remembered():
    assert {kernel.name for kernel in REMEMBERED} >= {
        *("rms_norm", "layer_norm", "gated_activation", "quantize_fp8", "rope", "rope_append"),
        *("matmul", "matmul_small_m", "matmul_int4", "matmul_int8", "matmul_fp8"),
        *("attention_decode", "attention_prefill"),
    }


def calls_of(run: Callable[[], object]) -> int:
    """How many functions of Python a function calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def host_work() -> None:
    x, w = half(512, 256), half(256, 256)
    launches: list[tuple[Callable[[], object], int]] = [
        (lambda: matmul.launch(x, w, residual=half(512, 256)), 100),
        (lambda: matmul_small_m.launch(x[:1], w), 50),
        (lambda: rms_norm.launch(x, w[0], eps=1e-5), 25),
    ]
    with planning_for("sm_90"), launched_by(fingerprint):
        for launch, least in launches:
            first = calls_of(launch)
            launch()
            assert first > least
            assert calls_of(launch) <= 20


def test_the_second_of_alike_launches_does_none_of_the_checks(compiled):
    """On any machine: calls of Python, most of which a plan made anew spends on checks and on choosing a config."""
    compiled(host_work)


def refusals() -> None:
    x, w = half(64, 64), half(64, 64)
    plain = [matmul.plan(x, w, arch="sm_90") for _ in range(2)][1]
    assert plain.alike is not None
    for other, options in (
        ((half(65, 64), w), {}),
        ((half(64 * 64 + 1)[1:].view(64, 64), w), {}),
        ((x, half(64, 128)[:, ::1][:, :64]), {}),
        ((x.bfloat16(), w.bfloat16()), {}),
        ((x, w), {"activation": "silu"}),
        ((x, w), {"residual": half(64, 64)}),
        ((x, w), {"scale": 2.0}),
        ((x, w), {"config": replace(plain.config, num_warps=8)}),
    ):
        assert matmul.plan(*other, **options, arch="sm_90").alike is None, options
    assert matmul.plan(x, w, arch="sm_80").alike is None
    with planning_for("sm_100"):
        assert matmul.plan(x, w).alike is None
    with planning_for("sm_80"):
        assert matmul.plan(x, w).alike is None
    with pytest.raises(KernelError, match="w must have shape"):
        matmul.plan(x, half(64, 65), arch="sm_90")


def test_calls_that_differ_in_anything_but_values_are_planned_anew(compiled):
    compiled(refusals)


def same_tensor_twice() -> None:
    x, w, residual = half(96, 64), half(64, 64), half(96, 64)
    matmul.plan(x, w, residual=x, arch="sm_90")
    found = matmul.plan(x, w, residual=residual, arch="sm_90")
    assert found.arguments["residual_ptr"] is residual
    assert found.arguments["x_ptr"] is x


def test_a_tensor_that_was_given_twice_is_not_taken_for_one(compiled):
    compiled(same_tensor_twice)


def workspaces() -> None:
    x, w = half(1, 8192), half(64, 8192)
    lent: list[tuple[Sizes, Workspace]] = []

    def lend(sizes: Sizes, device: torch.device) -> Workspace:
        lent.append((sizes, allocated(sizes, device)))
        return lent[-1][1]

    with lending(lend):
        plans = [matmul_small_m.plan(x, w, arch="sm_90") for _ in range(2)]
    (first, _), (second, _) = lent
    assert first == second
    for plan, (_, workspace) in zip(plans, lent, strict=True):
        assert plan.arguments["partial_ptr"] is workspace.partial
        assert plan.arguments["arrived_ptr"] is workspace.arrived


def test_a_workspace_is_lent_for_each_launch(compiled):
    compiled(workspaces)


def few_plans() -> None:
    usual = remembered.MAX_PLANS
    remembered.MAX_PLANS = 2
    try:
        planned = remembered.remembered(matmul.plan.__wrapped__)
        w = half(64, 64)
        for rows in (16, 32, 48):
            planned(half(rows, 64), w, arch="sm_90")
        assert planned(half(48, 64), w, arch="sm_90").alike is not None
        assert planned(half(16, 64), w, arch="sm_90").alike is None
    finally:
        remembered.MAX_PLANS = usual


def test_so_many_are_kept(compiled):
    compiled(few_plans)


def parts() -> None:
    """A plan that reads a part of what it was given."""

    def plan(x: torch.Tensor) -> Plan:
        made = rms_norm.plan.__wrapped__(x, None, eps=0.0, arch="sm_90")
        return replace(made, arguments={**made.arguments, "x_ptr": x[1:]})

    planned = remembered.remembered(plan)
    assert [planned(half(4, 64)).alike for _ in range(2)] == [None, None]


def test_a_plan_with_memory_of_unknown_origin_is_made_anew(compiled):
    compiled(parts)
