# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead: what is said about a launch is what the machine code and Triton's own launcher say, and keys tell specialisations apart."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nnfront_kernels
import pytest
import torch
import triton
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_budgets import Build
from kernel_mutants import Mutant, package
from nnfront_kernels import ahead, matmul, moe_routing, rms_norm
from nnfront_kernels.ahead import build, describe, fingerprint, key_of, source_hash
from nnfront_kernels.common import ARCHS, WARP, KernelError, Plan, arch_of, planning_for
from nnfront_kernels.inspect import plan_for
from test_compile import FEW, marked
from triton.backends.compiler import GPUTarget
from triton.backends.driver import expand_signature

from nnfront.backends.cuda.ahead.cubin import read_cubin
from nnfront.backends.cuda.ahead.launcher import Layout


def plan_of(build: Build) -> Plan:
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == build.kernel)
    return plan_for(kernel, build.shape, build.dtype, build.arch, build.config)


def machine_code_takes(image: bytes) -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each parameter in order, and the threads of a block, as the assembler wrote them into the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(image)
        command = [triton.knobs.nvidia.cuobjdump.path, "-elf", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Ordinal : (\w+)\s+Offset\s+: (\w+)\s+Size\s+: (\w+)", text)
    parameters = sorted(tuple(int(number, 16) for number in numbers) for numbers in found)
    assert [ordinal for ordinal, _, _ in parameters] == list(range(len(parameters)))
    threads = re.search(r"EIATTR_REQNTID\s+Format:\s+\w+\s+Value:\s+(\w+)", text)
    assert threads is not None
    return [(offset, size) for _, offset, size in parameters], int(threads[1], 16)


# The bytes that driver.c of Triton copies for each type.
COPIED = {"i32": 4, "i64": 8, "fp32": 4, "nvTmaDesc": 128}


def three_views_of_a_launch(plan: Plan, arch: str) -> list[Any]:
    """The sizes of the parameters by the record, by the machine code, and by the signature that Triton's launcher works from."""
    record, image = build(plan, arch)
    layout = Layout.of(read_cubin(record, image).parameters)
    ends = [*layout.offsets[1:], layout.format.size]
    taken, threads = machine_code_takes(image)
    compiled = ahead.compile_plan(plan, arch)
    expanded = expand_signature(
        compiled.src.signature.values(), compiled.metadata.tensordesc_meta, "nvTmaDesc"
    )
    theirs = [8 if kind.startswith("*") else COPIED[kind] for kind in expanded if kind != "constexpr"]
    if not layout.maps:  # the machine code aligns maps to 64, cuda.h to 128
        assert [offset - taken[0][0] for offset, _ in taken] == list(layout.offsets)
    assert all(end - begin >= size for begin, end, (_, size) in zip(layout.offsets, ends, taken, strict=True))
    assert threads == record["threads"] == 32 * compiled.metadata.num_warps
    assert not re.search(rb"/[\w./-]+\.py|nnfront_kernels", image), "a path of this machine"
    return [list(ahead.sizes_of(record["parameters"])), [size for _, size in taken], [*theirs, 8, 8]]


def views_of_build(build: Build) -> list[Any]:
    return three_views_of_a_launch(plan_of(build), build.arch)


@pytest.mark.parametrize("build", marked(FEW), ids=str)
def test_a_launch_passes_what_the_machine_code_takes_and_what_triton_passes(compiled, build):
    ours, machine_codes, tritons = compiled(views_of_build, build)
    assert ours == machine_codes == tritons


def views_of_routing() -> list[Any]:
    (experts,), options = moe_routing.example(moe_routing.KERNEL.typical, "int32")
    plans = moe_routing.launches(experts, **options, arch="sm_90").plans
    return [three_views_of_a_launch(plan, "sm_90") for plan in plans]


def test_so_does_each_launch_of_the_routing(compiled):
    for ours, machine_codes, tritons in compiled(views_of_routing):
        assert ours == machine_codes == tritons


def arguments_by_us_and_by_triton(build: Build) -> bool:
    """Whether the record names the arguments that Triton's binder passes on, in its order: the same objects."""
    plan, limits = plan_of(build), ARCHS[build.arch]
    target = GPUTarget("cuda", limits.target, WARP)
    # This process compiles for named targets only, so the stand-in may stay.
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=int
        )
    )
    bind = plan.kernel.create_binder()[-1]
    bound, kinds, _ = bind(**plan.arguments, **plan.constants, debug=False)
    theirs = [value for value, (kind, _) in zip(bound.values(), kinds, strict=True) if kind != "constexpr"]
    record, _ = ahead.build(plan, build.arch)
    ours = [plan.arguments[parameter["name"]] for parameter in record["parameters"]]
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


@pytest.mark.parametrize("build", few_of([build for build in FEW if build.arch == "sm_90"], 9), ids=str)
def test_arguments_are_passed_in_the_order_of_tritons_binder(compiled, build):
    assert compiled(arguments_by_us_and_by_triton, build)


def built_by_another_triton() -> str:
    """As if Triton passed one pointer fewer behind the arguments."""
    plan = plan_of(next(b for b in FEW if b.kernel == "rms_norm" and b.arch == "sm_90"))
    sizes = ahead.sizes_of
    ahead.sizes_of = lambda parameters: list(sizes(parameters))[:-1]
    try:
        with pytest.raises(KernelError) as error:
            build(plan, "sm_90")
    finally:
        ahead.sizes_of = sizes
    return str(error.value)


def test_a_triton_that_passes_arguments_in_another_way_is_found_when_kernels_are_compiled(compiled):
    what = rf"norm_kernel: Triton {re.escape(triton.__version__)} makes kernels that are launched in another way\n"
    assert re.match(
        what + r"  got parameters of \(8, .*\) bytes and 256 threads, expected \(8, .*\) and 256",
        compiled(built_by_another_triton),
    )


def matmul_plan(
    m: int, n: int, k: int, *, offset: int = 0, dtype: torch.dtype = torch.float16, **options: Any
) -> Plan:
    x = torch.empty(m * k + offset, dtype=dtype, device="meta")[offset:].view(m, k)
    return matmul.plan(x, torch.empty(n, k, dtype=dtype, device="meta"), arch="sm_90", **options)


def keys_of_products(cases: tuple[tuple[Any, ...], ...]) -> list[tuple[str, int]]:
    plans = [
        matmul_plan(m, n, k, offset=offset, dtype=getattr(torch, dtype)) for m, n, k, offset, dtype in cases
    ]
    return [(key_of(plan, "sm_90"), hash(fingerprint(plan))) for plan in plans]


SIZES = st.sampled_from([1, 2, 15, 16, 17, 48, 64, 100, 128, 4096])
PRODUCTS = st.tuples(
    SIZES, SIZES, SIZES, st.sampled_from([0, 1, 8]), st.sampled_from(["float16", "bfloat16"])
)


def test_equal_fingerprints_have_equal_keys(compiled):
    @settings(max_examples=15)
    @given(st.lists(PRODUCTS, min_size=20, max_size=40))
    def check(cases):
        keys: dict[int, str] = {}
        for key, mark in compiled(keys_of_products, tuple(cases)):
            assert keys.setdefault(mark, key) == key

    check()


def distinct_keys() -> list[str]:
    plain = matmul_plan(64, 64, 64)
    half = rms_norm.plan(
        torch.empty(4, 64, dtype=torch.float16, device="meta"),
        torch.empty(64, dtype=torch.float16, device="meta"),
        eps=1e-5,
        arch="sm_90",
    )
    others = [
        matmul_plan(64, 64, 64, offset=1),  # a pointer that 16 does not divide
        matmul_plan(64, 64, 72),  # a number that 16 does not divide
        matmul_plan(64, 64, 1),  # a number that is 1
        matmul_plan(64, 64, 64, dtype=torch.bfloat16),
        matmul_plan(64, 64, 64, activation="silu"),  # a constant
        matmul_plan(
            64, 64, 64, bias=torch.empty(64, dtype=torch.float16, device="meta")
        ),  # a pointer that was None
        replace(plain, config=replace(plain.config, num_warps=2)),
        replace(plain, config=replace(plain.config, num_stages=5)),
        half,
    ]
    return [*(key_of(plan, "sm_90") for plan in (plain, *others)), key_of(plain, "sm_80")]


def test_whatever_changes_the_machine_code_changes_the_key(compiled):
    keys = compiled(distinct_keys)
    assert len(set(keys)) == len(keys)


def keys_of_rows() -> set[str]:
    return {key_of(matmul_plan(m, 64, 64), "sm_90") for m in (100, 128, 65)}


def test_a_number_that_kernels_are_not_specialised_for_does_not_change_the_key(compiled):
    assert len(compiled(keys_of_rows)) == 1


def sources() -> tuple[list[str], list[str]]:
    changed = package(
        Mutant("slower", "epilogue.py", "tl.where(z < 0.0, 0.0, z)", "tl.where(0.0 > z, 0.0, z)")
    )
    same = package(Mutant("comment", "walk.py", "# SPDX", "# Yes, SPDX"))
    packages = (nnfront_kernels, same, changed)
    return (
        [source_hash(p.matmul.matmul_kernel) for p in packages],
        [source_hash(p.rms_norm.norm_kernel) for p in packages],
    )


def test_a_key_follows_the_source_of_a_kernel_and_of_what_it_calls_and_nothing_else(compiled):
    (plain, same, changed), norms = compiled(sources)
    assert plain == same != changed
    assert len(set(norms)) == 1


def key_of_product() -> str:
    x = torch.empty(64, 64, device="meta", dtype=torch.float16)
    return key_of(matmul.plan(x, x, arch="sm_90"), "sm_90")


def test_a_key_is_the_same_in_every_process(compiled):
    places = [str(place) for place in Path(__file__).parents[:2]]
    script = f"import sys\nsys.path[:0] = {places}\nimport test_ahead\nprint(test_ahead.key_of_product())"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == compiled(key_of_product)
    assert re.fullmatch("[0-9a-f]{16}", done.stdout.strip())


def text_of_product() -> str:
    return describe(matmul_plan(100, 64, 72), "sm_90")


def test_a_specialisation_says_what_it_is(compiled):
    first, warps, *lines = compiled(text_of_product).split("\n")
    assert re.fullmatch("matmul_kernel [0-9a-f]{8} for sm_90", first)
    assert re.fullmatch(r"warps \d stages \d", warps)
    assert lines[:2] == ["x_ptr *fp16 % 16", "w_ptr *fp16 % 16"]
    assert {"M i32", "N i32 % 16", "K i32", "bias_ptr = None", "ACTIVATION = 'none'"} <= set(lines)


def test_plans_are_for_a_named_gpu_inside_of_a_block():
    meta = torch.device("meta")
    with planning_for("sm_100"):
        assert arch_of(meta) == "sm_100"
        with planning_for("sm_80"):
            assert arch_of(meta) == "sm_80"
        assert arch_of(meta) == "sm_100"
    with pytest.raises(KernelError, match="kernels run on a GPU, got a tensor on 'meta'"):
        arch_of(meta)
