# SPDX-License-Identifier: Apache-2.0
"""Rehearsing a program without data finds every kernel that calls of any size launch, and says what it cannot foresee."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_kernels import ahead
from nnfront_kernels.common import Plan, launched_by, planning_for
from nnfront_models import llama, mamba, mamba2, qwen3_moe, rwkv, t5

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cuda.ahead.call_sizes import grid
from nnfront.backends.cuda.ahead.enumerate_kernels import enumerate_plans, kernels_of
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.backends.device import META, default_device, overriding_device
from nnfront.dims import evaluate
from nnfront.engine.params import Sampling
from nnfront.errors import LowerError
from nnfront.llm.sampling import Sampler
from nnfront.lower import Program
from nnfront.runtime.method import Method
from nnfront.state.contiguous import make_cache

ROOM = 64


@cache
def program(model: str, quant: str | None = None, room: int = ROOM) -> Program:
    """A language model of two layers with heads that the kernels take."""
    file: Any = {"llama": llama, "experts": qwen3_moe}[model]
    config = dataclasses.replace(file.TINY, dtype="bfloat16", head_dim=64, max_position_embeddings=room)
    ir = file.build(config).export(file.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda:sm_90").program


@cache
def foreseen(model: str, quant: str | None) -> set[str]:
    plans, notes = enumerate_plans(program(model, quant), {}, {"batch": [1, 2, 3, 4, 8, 16, 32, 64]})
    assert notes == {}
    return set(plans)


def empty(type: Any) -> torch.Tensor:
    shape = [evaluate(size, {}) for size in type.shape]
    return torch.empty(shape, dtype=getattr(torch, type.dtype), device=META)


def launched(program: Program, name: str, batch: int, seq: int, earlier: int, room: int = ROOM) -> list[Plan]:
    """The plans of one call of a method as it is, on tensors without data."""
    plans: list[Plan] = []
    method = program.methods[name]
    weights: dict[str, dict[str, Any]] = {"weight": {}, "transformed": {}}
    for weight in method.weights:
        weights[weight.role][weight.name] = empty(weight.type)
    with overriding_device(META), planning_for("sm_90"), launched_by(plans.append):
        ready = Method(method, weights, {})
        args: list[Any] = [torch.empty(batch, 1 if name == "decode" else seq, dtype=torch.int64, device=META)]
        if name != "logits":
            args.append(
                make_cache(method.arguments[1].type, {"batch": batch, "max_seq": room}, program.target)
            )
            with default_device(META):
                for layer in args[1] if earlier else ():
                    layer.reserve(earlier)
        ready(*args)
    return plans


@pytest.mark.parametrize(
    ("model", "quant"), few_of([("experts", None), ("llama", None), ("llama", "int4")]), ids=str
)
def test_every_kernel_of_any_call_was_foreseen(model: str, quant: str | None) -> None:
    @settings(max_examples=8, deadline=None)
    @given(
        st.sampled_from(["logits", "prefill", "decode"]),
        st.integers(1, 50),
        st.integers(1, 44),
        st.integers(0, 20),
    )
    def check(name: str, batch: int, seq: int, earlier: int) -> None:
        plans = launched(program(model, quant), name, batch, seq, earlier)
        assert plans
        assert {ahead.key_of(plan, "sm_90") for plan in plans} <= foreseen(model, quant)

    check()


def test_kernels_of_long_sequences_are_foreseen() -> None:
    room = 1 << 17
    long = program("llama", None, room)
    found = set(enumerate_plans(long, {}, {"batch": [1, 4], "seq": [1]})[0])
    keys = [
        {ahead.key_of(plan, "sm_90") for plan in launched(long, "decode", batch, 1, earlier, space)}
        for batch in (1, 4)
        for earlier, space in ((10, 100), (3000, 4096), (9000, room), (40_000, 50_000), (room - 1, room))
    ]
    assert len(set.union(*keys)) > max(map(len, keys))  # lengths do make a difference
    assert all(each <= found for each in keys)


def test_nothing_is_foreseen_that_no_call_launches() -> None:
    plans, _ = enumerate_plans(
        program("llama"), {}, {"batch": [2], "seq": [5], "earlier": [3], "max_seq": [ROOM]}
    )
    found = {
        ahead.key_of(plan, "sm_90")
        for name in ("logits", "prefill", "decode")
        for plan in launched(program("llama"), name, 2, 5, 3)
    }
    assert set(plans) == found


def test_paged_caches_have_kernels_of_their_own() -> None:
    sizes = {"batch": [2], "seq": [5], "earlier": [3]}
    plain, paged = (
        set(enumerate_plans(program("llama"), {}, {**sizes, "page_size": [size]})[0]) for size in (0, 16)
    )
    names = Counter(
        plan.kernel.__name__
        for key, plan in enumerate_plans(program("llama"), {}, {**sizes, "page_size": [16]})[0].items()
        if key not in plain
    )
    assert names == {"rope_append_kernel": 1, "attention_decode_kernel": 1, "attention_prefill_kernel": 1}
    assert len(paged) == len(plain)


def test_caches_in_8_bits_have_kernels_of_their_own() -> None:
    sizes = {"batch": [2], "seq": [5], "earlier": [3]}
    plain, coded = (enumerate_plans(program("llama"), {}, {**sizes, "kv_bits": [bits]})[0] for bits in (0, 8))
    names = Counter(plan.kernel.__name__ for key, plan in coded.items() if key not in plain)
    assert names == {"rope_append_kernel": 1, "attention_decode_kernel": 1, "attention_prefill_kernel": 1}


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 64},
        {"temperature": 1.2, "top_p": 0.5},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
    ],
    ids=str,
)
def test_common_ways_to_draw_a_token_are_foreseen(options: dict[str, Any], penalty: float) -> None:
    sizes = {"batch": [1], "seq": [1], "earlier": [0]}
    without, _ = enumerate_plans(program("llama"), {}, sizes)
    foreseen, _ = enumerate_plans(program("llama"), {}, sizes, draws=True)
    sampler = Sampler(
        Sampling(**options, repetition_penalty=penalty, seed=1), [torch.tensor([1])] * 3, on_kernel=True
    )
    plans: list[Plan] = []
    logits = program("llama").methods["decode"]
    dtype = logits.slots[logits.result.slot].type.dtype  # type: ignore[union-attr]
    with planning_for("sm_90"), launched_by(plans.append):
        for _ in range(2):
            sampler(torch.zeros(3, 1, llama.TINY.vocab_size, dtype=getattr(torch, dtype))[:, -1])
    keys = {ahead.key_of(plan, "sm_90") for plan in plans}
    assert keys
    assert keys <= foreseen.keys() - without.keys()


class Either(nn.Module):
    """Different products in the two ways of a branch that only data decides."""

    def __init__(self) -> None:
        self.up = nn.Linear(64, 128, bias=False, dtype="float16")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.cond(op.sum(x) > 0.0, lambda: self.up(x), lambda: op.silu(self.up(x)))


def either() -> Program:
    ir = Either().export({"forward": {"x": spec.Tensor(["n", 64], "float16")}})
    return nn.compile(ir, target="cuda:sm_90").program


def test_both_ways_of_a_branch_are_foreseen() -> None:
    plans, notes = enumerate_plans(either(), {}, {"n": [4]})
    assert sorted(plan.constants["ACTIVATION"] for plan in plans.values()) == ["none", "silu"]
    assert notes == {}


SQUARE = """
def forward[n, m, k](x: input float16[n, m, 64], w: weight float16[32, 64]) -> float16[k, k, 32] {
    rows: float16[k, k, 64] = match_shape(x, float16[k, k, 64])
    y: float16[k, k, 32] = linear(rows, w)
    return y
}
"""


def test_special_cases_are_foreseen_each_with_its_own_sizes() -> None:
    file: Any = llama
    config = dataclasses.replace(file.TINY, dtype="bfloat16", head_dim=64, max_position_embeddings=ROOM)
    ir = nn.passes.lift_transform_params(
        file.build(config).export(file.export_spec(config)), shared_transform=True
    )
    ir = nn.passes.special_cases(ir, "decode", [{"batch": 1}, {"batch": (2, 8)}])
    cases = nn.compile(ir, target="cuda:sm_90").program
    plans, notes = enumerate_plans(cases, {}, {"batch": [1, 4, 16], "seq": [1]})
    assert notes == {}
    for batch in (1, 4, 16):
        keys = {ahead.key_of(plan, "sm_90") for plan in launched(cases, "decode", batch, 1, 5)}
        assert keys <= set(plans)


def test_sizes_that_a_match_defines_are_known_and_calls_that_it_refuses_left_out() -> None:
    compiled = nn.compile(nn.ir.parse(SQUARE), target="cuda:sm_90").program
    plans, notes = enumerate_plans(compiled, {}, {"n": [5, 128], "m": [5]})
    assert [plan.arguments["M"] for plan in plans.values()] == [25]
    assert notes == {}


def test_an_instruction_that_cannot_be_called_without_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(run: Any) -> Any:
        return lambda x, *rest: x.sum().item()

    lying = tuple(
        replace(kernel, bind=make) if kernel.name == "triton_product" else kernel
        for kernel in CudaBackend.kernels
    )
    monkeypatch.setattr(CudaBackend, "kernels", lying)
    plans, notes = enumerate_plans(either(), {}, {"n": [4, 8]})
    assert plans == {}
    assert list(notes) == ["forward"]
    assert re.fullmatch(r"(linear|product) at up: .*meta.*", notes["forward"])


@pytest.mark.parametrize(("rows", "launches"), [(64, 1), (65, 0)])
def test_products_that_are_left_to_cublas_have_no_kernels(rows: int, launches: int) -> None:
    ir = nn.Linear(64, 32, bias=False, dtype="float16").export(
        {"forward": {"x": spec.Tensor(["n", 64], "float16")}}
    )
    plans, _ = enumerate_plans(nn.compile(ir, target="cuda:sm_90").program, {}, {"n": [rows]})
    assert len(plans) == launches


def test_a_target_without_an_architecture_has_no_kernels_ahead() -> None:
    ir = Either().export({"forward": {"x": spec.Tensor(["n", 64], "float16")}})
    assert kernels_of(nn.compile(ir, target="cuda").program, {}) is None


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            {"rows": [1]},
            "no method has a dim 'rows' that calls bind\n  help: dims are 'batch', 'seq', 'max_seq'",
        ),
        ({"kv_bits": [4]}, "'kv_bits' can be 0 or 8, got 4"),
        ({"seq": []}, "no size is given for 'seq'"),
        ({"seq": [1, ROOM + 1]}, f"'seq' cannot be {ROOM + 1}, expected between 1 and {ROOM}"),
    ],
)
def test_sizes_that_no_call_has_are_refused(sizes: dict[str, list[int]], text: str) -> None:
    with pytest.raises(LowerError, match=text):
        enumerate_plans(program("llama"), {}, sizes)


def test_the_grid_has_every_power_of_two_that_kernels_tell_apart() -> None:
    points = list(grid(program("llama").methods["prefill"], {}, {}))
    assert {1, 2, 4, 8, 16, 32, ROOM} <= {point["seq"] for point in points}
    assert {2**i for i in range(14)} <= {point["batch"] for point in points}
    assert any(point["batch"] % 2 and point["batch"] > 1 for point in points)
    assert {point["max_seq"] for point in points} == {ROOM}
    assert all(point["earlier"] + point["seq"] <= ROOM for point in points)
    assert {0, 1, 2, 4, 8, 16, 32, ROOM - 1} <= {point["earlier"] for point in points if point["seq"] == 1}


def test_no_cache_of_a_method_is_filled_beyond_its_own_room() -> None:
    ir = t5.build(t5.TINY).export(t5.export_spec(t5.TINY))
    decode = nn.compile(ir, target="cuda:sm_90").program.methods["decode"]
    rooms = {"max_source": [128], "max_seq": [32], "batch": [2]}
    assert {point["earlier"] for point in grid(decode, {}, rooms)} == {0, 1, 2, 4, 8, 16, 31}


def test_nothing_is_collected_while_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def build(plan: Plan, arch: str) -> Any:
        seen.append(gc.isenabled())
        raise LowerError("stop here")

    monkeypatch.setattr(ahead, "build", build)
    monkeypatch.setattr(ahead, "can_compile", lambda: True)
    with pytest.raises(LowerError, match="stop here"):
        kernels_of(either(), {})
    assert seen
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("file", "writes"),
    few_of(
        [(rwkv, [False, False, True, True]), (mamba, [False, True]), (t5, [False, True]), (mamba2, [])], 2
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_captured_calls_copy_of_caches_for_torch_is_foreseen(file, writes):
    """States of two dtypes; one that no kernel writes where it lies; tokens; nothing."""
    config = dataclasses.replace(file.TINY, dtype="bfloat16")
    ir = file.build(config).export({"decode": file.export_spec(config)["decode"]})
    ready = nn.compile(
        nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda:sm_90"
    ).program
    dims = {binding.symbol.name for binding in ready.methods["decode"].dims}
    plans, _ = enumerate_plans(ready, {}, {name: [256] for name in dims - {"batch"}})
    copies = [plan for plan in plans.values() if plan.kernel.__name__ == "copy_rows_kernel"]
    assert sorted(plan.constants["WRITES"] for plan in copies) == writes
