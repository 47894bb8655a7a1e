# SPDX-License-Identifier: Apache-2.0
"""What a captured launch must not do: take lengths from anywhere but device memory, wait for the host, or allocate what it does not return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from few_of import few_of
from kernel_attention import normal
from nnfront_kernels import (
    KERNELS,
    attention_decode,
    attention_latent,
    attention_prefill,
    rope_append,
    split_k,
    ssm_scan,
)
from nnfront_kernels.common import KernelError, Plan, launched_by, planning_for
from nnfront_kernels.inspect import report
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, HEADS, KV_HEADS, SIZE, SLOTS = 3, 4, 2, 64, 128
GENERATOR = torch.Generator().manual_seed(0)


def random(*size: int) -> torch.Tensor:
    return normal(GENERATOR, *size).half()


def operands(paged: bool, fp8: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Keys, values and options of a cache of random tokens."""
    first, slots = (BATCH * SLOTS // 16, 16) if paged else (BATCH, SLOTS)
    cache = [random(first, KV_HEADS, slots, SIZE) for _ in range(2)]
    options: dict[str, torch.Tensor] = {}
    if paged:
        options["pages"] = torch.randperm(first, generator=GENERATOR).view(BATCH, -1).int()
    if fp8:
        cache = [x.to(torch.float8_e4m3fn) for x in cache]
        for name in ("key_scales", "value_scales"):
            options[name] = random(first, KV_HEADS, slots).float().abs() + 0.5
    return cache, options


def decode(paged: bool, fp8: bool) -> tuple[Any, list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """A kernel, its operands with lengths left out, its options, and the counts that lie in device memory."""
    cache, options = operands(paged, fp8)
    return attention_decode, [random(BATCH, HEADS, SIZE), *cache], options, [torch.zeros(BATCH).int()]


def prefill(paged: bool, fp8: bool) -> tuple[Any, list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    cache, options = operands(paged, fp8)
    before = torch.zeros(BATCH).int()
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    options |= {"longest": 5, "before": before}
    return attention_prefill, [random(9, HEADS, SIZE), *cache], options, [starts, before]


def append(paged: bool, fp8: bool) -> tuple[Any, list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    cache, options = operands(paged, fp8)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    tokens = [random(BATCH, 2, count, SIZE) for count in heads]
    tables = [random(BATCH, 2, 32).float() for _ in range(2)]
    return rope_append, [*tokens, *tables, *cache], options, [torch.zeros(BATCH).int()]


MAKERS = [decode, prefill, append]
COUNTS = {
    "decode": [([1, 40, 128],), ([17, 0, 2],)],
    "prefill": [([0, 4, 4, 9], [0, 90, 16]), ([0, 1, 6, 6], [31, 0, 100])],
    "append": [([0, 15, 126],), ([127, 63, 8],)],
}


def planned(made: tuple[Any, list[torch.Tensor], dict[str, Any], list[torch.Tensor]]) -> Plan:
    module, tensors, options, counts = made
    at = 5 if module is rope_append else 3
    return module.plan(*tensors[:at], counts[0], *tensors[at:], **options, arch="sm_90")


def written_down(plan: Plan) -> dict[str, Any]:
    """All of a plan that a captured launch holds; of tensors where they are."""
    held = {**plan.arguments, **plan.constants, "grid": plan.grid, "config": plan.config}
    fresh = ("y_ptr", "partial_ptr", "arrived_ptr")
    return {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for name, value in held.items()
        if name not in fresh
    }


@pytest.mark.parametrize("fp8", [False, True], ids=["16bits", "8bits"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_launch_is_the_same_whatever_the_lengths(make, paged, fp8):
    made = make(paged, fp8)
    plans = []
    for contents in COUNTS[make.__name__]:
        for tensor, values in zip(made[3], contents, strict=True):
            tensor.copy_(torch.tensor(values))
        plans.append(written_down(planned(made)))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_lengths_are_not_even_read_for_a_plan(make):
    module, tensors, options, counts = make(True, False)
    nowhere = {id(tensor): tensor.to("meta") for tensor in counts}
    options = {name: nowhere.get(id(value), value) for name, value in options.items()}
    planned((module, tensors, options, [nowhere[id(tensor)] for tensor in counts]))


def test_only_a_base_lets_a_cache_hold_fewer_sequences_than_there_are_queries():
    module, (q, keys, values), options, (counts,) = decode(False, False)
    base = torch.zeros(4, dtype=torch.int64)
    module.plan(q, keys[:2], values[:2], counts, **options, base=base, arch="sm_90")
    with pytest.raises(KernelError, match="keys must hold 3 sequences, got 2"):
        module.plan(q, keys[:2], values[:2], counts, **options, arch="sm_90")
    with pytest.raises(KernelError, match="keys must hold 2 sequences, got 3"):
        module.plan(q[:2], keys, values, counts[:2], **options, base=base, arch="sm_90")


def elsewhere(made: tuple[Any, list[torch.Tensor], dict[str, Any], list[torch.Tensor]]) -> Any:
    """The same operands, but for a cache that holds nothing and a base which says where the other one lies."""
    module, tensors, options, counts = made
    scales = [options[name] for name in SCALES if name in options]
    cache = [*tensors[-2:], *scales]
    empty = [torch.full_like(t, math.nan) for t in cache]
    units = [(t.data_ptr() - e.data_ptr()) / 16 for t, e in zip(cache, empty, strict=True)]
    base = torch.tensor([*units, 0, 0][:4], dtype=torch.float64)
    assert base.frac().abs().max() == 0
    there = dict(zip(SCALES, empty[2:], strict=False))
    return module, [*tensors[:-2], *empty[:2]], {**options, **there, "base": base.long()}, counts


SCALES = ("key_scales", "value_scales")


def launched_again(make: Callable[..., Any], paged: bool, fp8: bool) -> None:
    module, tensors, options, counts = made = make(paged, fp8)
    at = 5 if module is rope_append else 3
    plan = planned(elsewhere(made))
    near = {"rtol": 2.0**-3, "atol": 2.0**-7} if fp8 else {"rtol": 2.0**-9, "atol": 2.0**-10}
    for contents in COUNTS[make.__name__]:
        for tensor, values in zip(counts, contents, strict=True):
            tensor.copy_(torch.tensor(values))
        limits = {name: value for name, value in options.items() if name != "longest"}
        stated = module.reference(*tensors[:at], counts[0], *tensors[at:], **limits)
        y = plan.launch()
        found = [y, *tensors[at:], *(options[n] for n in ("key_scales", "value_scales") if fp8)]
        if module is not rope_append:
            stated, found = (stated,), [y]
            last = int(counts[0][-1]) if module is attention_prefill else None
            stated, found = (stated[0][:last],), [y[:last]]
        for mine, his in zip(found, stated, strict=True):
            torch.testing.assert_close(mine.float(), his.float(), **near)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("paged", "fp8"), few_of([(True, False), (False, True)]), ids=["paged", "8bits"])
def test_one_plan_stays_right_as_sequences_grow(interpreted, make, paged, fp8):
    interpreted(launched_again, make, paged, fp8)


def with_and_without_base(name: str, shape: Any) -> tuple[Any, Any]:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    tensors, options = kernel.example(shape, "bfloat16")
    base = torch.empty(2 if name == "ssm_scan" else 4, dtype=torch.int64, device="meta")
    plans = (kernel.plan(*tensors, **options, base=given, arch="sm_90") for given in (None, base))
    return tuple(report(plan, "sm_90") for plan in plans)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("module", "sizes"),
    few_of(
        [
            (attention_decode, {"page": 0}),
            (attention_decode, {"page": 64}),
            (attention_decode, {"page": 64, "fp8": True}),
            (attention_latent, {"page": 64}),
            (attention_prefill, {"before": 1024}),
            (rope_append, {"page": 0}),
            (ssm_scan, {"seq": 1}),
        ],
        1,
    ),
)
def test_a_base_costs_a_load_of_its_own_for_each_buffer_and_nothing_else(compiled, module, sizes):
    shape = replace(module.KERNEL.typical, **sizes)
    plain, based = compiled(with_and_without_base, module.KERNEL.name, shape)
    of_one = module is attention_latent  # a state has one too, and how many sequences are nobody's is another
    buffers = {"LDG.64": 4 if getattr(shape, "fp8", False) else 1 if of_one else 2}
    assert based.loads == {**plain.loads, **buffers}
    assert (based.shared_bytes, based.spills) == (plain.shared_bytes, 0)
    assert based.registers <= plain.registers
    assert based.instructions - plain.instructions <= 32


# What makes no launch and waits for nothing: memory that holds nothing yet, and views.
FRESH = ("aten.empty.memory_format", "aten.empty_strided.default")
VIEWS = ("detach", "expand", "slice", "transpose", "unsqueeze", "view", "as_strided", "select")
# Tensors between the launches of a kernel that has several, or that are gathered in: from the graph's own memory.
BETWEEN = {"moe_routing": 5, "add_low_rank": 1, "sampling": 2, "sampling_parts": 6}


class Noted(TorchDispatchMode):
    """Every call of torch that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def calls_of_torch(work: Callable[[], object]) -> list[str]:
    """What `work` calls of torch's but views."""
    with Noted() as noted:
        work()
    return [call for call in noted.calls if call.split(".")[1] not in VIEWS]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_launch_of_any_kernel_reads_nothing_on_the_host_and_allocates_its_results_alone(kernel):
    """Captured, it is the kernel's launches and nothing else: no fill, no copy, no value that the host waits for. Tensors without values would raise where one is read."""
    arguments, options = kernel.example(kernel.typical, kernel.dtypes[0])
    workspaces: dict[Any, Any] = {}

    def lend(sizes: split_k.Sizes, device: torch.device) -> split_k.Workspace:
        if sizes not in workspaces:
            workspaces[sizes] = split_k.allocated(sizes, device)
        return workspaces[sizes]

    plans: list[Plan] = []
    made: list[Any] = []
    with planning_for("sm_90"), launched_by(plans.append), split_k.lending(lend):
        kernel.launch(*arguments, **options)  # workspaces are there from here on
        launches = len(plans)
        calls = calls_of_torch(lambda: made.append(kernel.launch(*arguments, **options)))
    results = made[0] if isinstance(made[0], tuple) else made
    given = {id(each) for each in (*arguments, *options.values())}
    fresh = [each for each in results if isinstance(each, torch.Tensor) and id(each) not in given]
    assert launches >= 1
    assert len(plans) == 2 * launches
    assert set(calls) <= set(FRESH)
    assert len(calls) == len(fresh) + BETWEEN.get(kernel.name, 0)


def test_what_a_launch_may_not_do_is_seen():
    x = torch.ones(2)
    assert calls_of_torch(lambda: torch.zeros(3)) == ["aten.zeros.default"]
    assert calls_of_torch(lambda: x[0].item()) == ["aten._local_scalar_dense.default"]
    assert calls_of_torch(lambda: x.clone().view(torch.int32)) == ["aten.clone.default"]
