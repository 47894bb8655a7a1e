# SPDX-License-Identifier: Apache-2.0
"""Every shipped config compiled for GPUs that are not there, and its machine code against the rules and the budgets."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kernel_budgets
import nnfront_kernels
import pytest
import triton
from few_of import few_of
from kernel_budgets import (
    DRIFT,
    Build,
    broken_rules,
    builds,
    compile_build,
    load,
    missing_file,
    over_budget,
    relatives,
)
from kernel_cases import SPLIT
from kernel_mutants import Mutant, package
from nnfront_kernels import moe_routing
from nnfront_kernels.common import ARCHS, Config
from nnfront_kernels.inspect import Report, report
from nnfront_kernels.inspect import main as inspect_main
from nnfront_kernels.rms_norm import NormShape
from nnfront_kernels.sampling import SampleShape
from nnfront_kernels.softmax import SoftmaxShape
from nnfront_kernels.spilled import SPILLED, TRITON
from nnfront_kernels.tiles import MatmulShape, resident

KERNELS = nnfront_kernels.KERNELS
ALL = [build for kernel in KERNELS for build in builds(kernel)]
# `make test` compiles the first config of some kernels for sm_90, `make test-all` of each kernel for each arch, and caches in 8 bits for one.
NARROW = [b for b in ALL if getattr(b.shape, "fp8", False)]
PLAIN = [
    b
    for b in ALL
    if not isinstance(b.shape, MatmulShape)
    or (b.shape.k == 4096 and not b.shape.gated and not b.wide and not b.shape.zero_points)
]
FEW = list({(b.kernel, b.arch): b for b in reversed(PLAIN) if b not in NARROW}.values())
FEW += list({b.kernel: b for b in reversed(NARROW) if b.arch == "sm_90"}.values())


def marked(found: Sequence[Build]) -> list[Any]:
    """Some builds for sm_90, and all others as part of the matrix."""
    home = [b for b in found if b.arch == "sm_90"]
    return few_of(home, 5) + few_of([b for b in found if b.arch != "sm_90"], 0)


FALLBACKS = [
    Build("matmul_small_m", "sm_90", nnfront_kernels.matmul_small_m.UNALIGNED, MatmulShape(64, 4095, 4095)),
    Build("matmul", "sm_80", nnfront_kernels.matmul.UNALIGNED, MatmulShape(4095, 4095, 4095, aligned=False)),
    Build("matmul", "sm_90", nnfront_kernels.matmul.UNALIGNED, MatmulShape(4095, 4095, 4095, aligned=False)),
    Build("layer_norm", "sm_90", nnfront_kernels.layer_norm.CONFIGS[-1], NormShape(16, 20000, residual=True)),
    Build("softmax", "sm_90", nnfront_kernels.softmax.CONFIGS[-1], SoftmaxShape(16, 20000)),
    Build("sampling", "sm_90", nnfront_kernels.sampling.CONFIGS[0], SampleShape(64, 50257)),
    Build("sampling", "sm_90", nnfront_kernels.sampling.CONFIGS[0], SampleShape(64, 128256, filtered=False)),
    Build("sampling", "sm_90", nnfront_kernels.sampling.CONFIGS[0], SampleShape(64, 128256, greedy=True)),
]


def complaints(build: Build, found: Report) -> list[str]:
    budgets = load()
    known_spills = budgets.get(str(build), {}).get("spills", 0)
    return broken_rules(build, found, known_spills) + over_budget(build, found, budgets)


@pytest.mark.parametrize("build", marked(FEW), ids=str)
def test_machine_code_keeps_the_rules_and_the_budget(compiled, build):
    assert complaints(build, compiled(compile_build, build)) == []


RELATIVES = [build for kernel in KERNELS for build in relatives(kernel)]


@pytest.mark.parametrize("build", few_of(RELATIVES, 0), ids=str)
def test_machine_code_for_a_gpu_with_the_configs_of_another_keeps_the_rules_and_the_budget_and_fits(
    compiled, build
):
    found, kernel = compiled(compile_build, build), next(k for k in KERNELS if k.name == build.kernel)
    assert complaints(build, found) == []
    assert found.registers <= build.config.registers * DRIFT
    assert found.shared_bytes <= kernel.shared_bytes(build.config) + 64  # barriers


@pytest.mark.slow
@pytest.mark.parametrize("build", [build for build in ALL if build not in FEW], ids=str)
def test_machine_code_of_every_config_keeps_the_rules_and_the_budget(compiled, build):
    assert complaints(build, compiled(compile_build, build)) == []


def test_the_installed_version_of_triton_has_budgets():
    assert missing_file() == ""


def test_a_version_without_budgets_is_told_how_to_write_them(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_budgets, "FILE", tmp_path / "budgets_triton_4_0.json")
    assert missing_file().startswith(f"Triton {triton.__version__} has no budgets: the rules are checked")
    assert "# writes budgets_triton_4_0.json" in missing_file()
    spilling = SimpleNamespace(
        spills=1, shared_bytes=0, registers=1, serialized=False, mma={}, loads={}, loop={}
    )
    assert "1 spill instructions" in broken_rules(FEW[0], spilling)
    assert over_budget(FEW[0], spilling, load()) == []


@pytest.mark.parametrize("build", [b for b in FEW if b.kernel == "matmul_tma"], ids=str)
def test_tiles_are_moved_by_the_copy_engine(compiled, build):
    assert "UTMALDG" in compiled(compile_build, build).loads


def chosen(name: str, rows: int, group: int = 0) -> Build:
    """The build of what a kernel chooses for a product of so many rows."""
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
    shape = MatmulShape(rows, 4096, 4096, group=group)
    return Build(name, "sm_90", kernel.choose(shape, "bfloat16", "sm_90"), shape)


@pytest.mark.parametrize(
    ("build", "barriers"),
    few_of(
        [
            (chosen("matmul_small_m", 1), 0),
            (chosen("matmul_int4", 32, 128), 2),
            (chosen("matmul_small_m", 64), 2),
            (chosen("matmul_int4", 16, 128), 2),
            (chosen("matmul_int4", 64, 128), 4),
        ],
        3,
    ),
    ids=str,
)
def test_a_step_of_k_waits_for_the_other_warps_no_more_often_than_it_must(compiled, build, barriers):
    """A product whose warps hold different parts of its sums than the next one's passes them through shared memory: 19 barriers a step."""
    found = compiled(compile_build, build).loop
    assert sum(n for opcode, n in found.items() if opcode.startswith("BAR")) <= barriers
    if build.shape.m == 1:
        assert not any(opcode.startswith(("LDS", "STS")) for opcode in found)


@pytest.mark.parametrize("build", [chosen("matmul_small_m", 1), chosen("matmul_small_m", 64)], ids=str)
def test_several_blocks_of_few_rows_are_on_an_sm_at_once(compiled, build):
    found, arch = compiled(compile_build, build), ARCHS[build.arch]
    threads = 32 * build.config.num_warps
    resident = min(65536 // (found.registers * threads), arch.shared_bytes_sm // (found.shared_bytes + 1024))
    assert resident >= (5 if build.shape.m == 1 else 2)


@pytest.mark.parametrize("build", marked(FEW), ids=str)
def test_no_thread_has_more_registers_than_choose_reckons_with(compiled, build):
    assert compiled(compile_build, build).registers <= build.config.registers


def blocks_of_an_sm(build: Build, registers: int) -> int:
    kernel = next(kernel for kernel in KERNELS if kernel.name == build.kernel)
    config = replace(build.config, registers=registers)
    return resident(config, ARCHS[build.arch], kernel.shared_bytes(config))


def test_no_fewer_blocks_are_on_an_sm_than_choose_reckons_with():
    """By the registers in the budgets, which machine code is held to. A single row whose K is no multiple of a step has 124, and 96 are reckoned with."""
    normed, budgets = {b for b in ALL if getattr(b.shape, "norm", False)}, load()
    fewer = [
        b
        for b in ALL
        if b not in normed
        and blocks_of_an_sm(b, budgets[str(b)]["registers"]) < blocks_of_an_sm(b, b.config.registers)
    ]
    assert {(b.kernel, b.config.block_m, b.shape.k) for b in fewer} <= {("matmul_small_m", 1, 4096 + 16)}


@pytest.mark.parametrize("build", [b for b in ALL if getattr(b.shape, "norm", False)], ids=str)
def test_choose_reckons_with_the_registers_that_a_norm_takes(build):
    """Those of the budgets, which machine code is held to."""
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == build.kernel)
    shape = build.shape
    if isinstance(shape, MatmulShape):
        shape = replace(shape, m=min(shape.m, build.config.block_m))
    chosen_config = kernel.choose(shape, build.dtype, build.arch)
    assert load()[str(build)]["registers"] <= chosen_config.registers


def paged(kernel: str, fp8: bool) -> Build:
    """The first build of a kernel of attention over pages."""
    found = (b for b in ALL if (b.kernel, b.arch) == (kernel, "sm_90") and b.shape.page)
    return next(b for b in found if b.shape.fp8 == fp8)


PAGED = paged("attention_decode", False)


@pytest.mark.parametrize(
    ("build", "beside"),
    [
        (PAGED, 0),
        (replace(PAGED, shape=replace(PAGED.shape, page=16)), 0),
        (paged("attention_decode", True), 0),
        (paged("attention_prefill", False), 2 * 128 * 128),  # a block of queries
    ],
    ids=str,
)
def test_keys_of_pages_are_on_their_way_some_steps_ahead(compiled, build, beside):
    """Where a step waits for the table of pages first, the compiler keeps one step of keys and values, and not the stages of the config."""
    step = 2 * (1 if build.shape.fp8 else 2) * build.config.block_n * build.shape.size
    assert compiled(compile_build, build).shared_bytes - beside >= 3 * step


def test_spills_are_owned_up_to_one_by_one():
    spilling = SimpleNamespace(
        spills=11, shared_bytes=0, registers=1, serialized=False, mma={}, loads={}, loop={}
    )
    assert "11 spill instructions" in broken_rules(FEW[0], spilling, 10)
    assert "11 spill instructions" not in broken_rules(FEW[0], spilling, 11)


def test_spills_in_a_loop_are_never_taken():
    """Once for each block they cost nothing; that pages are asked for ahead is not what they come from."""
    spilling = SimpleNamespace(
        spills=3,
        shared_bytes=0,
        registers=1,
        serialized=False,
        mma={},
        loads={},
        loop={"LDL.64": 2, "STL": 1},
    )
    assert "3 of them in the loop" in broken_rules(FEW[0], spilling, 3)


@pytest.mark.parametrize(("zero_points", "most"), [(False, 4), (True, 6)])
def test_what_changes_hands_in_the_loop_of_a_product_of_few_rows_is_found(zero_points, most):
    shape = MatmulShape(64, 4096, 4096, group=128, zero_points=zero_points)
    build = next(b for b in ALL if b.kernel == "matmul_int4" and b.arch == "sm_90" and b.config.block_m == 64)
    found = {"spills": 0, "shared_bytes": 0, "registers": 1, "serialized": False, "mma": {}, "loads": {}}
    for bars in (most, most + 1):
        report = SimpleNamespace(**found, loop={"BAR.SYNC.DEFER_BLOCKING": bars})
        said = f"{bars} barriers in the loop: something changes hands through shared memory"
        assert (said in broken_rules(replace(build, shape=shape), report)) == (bars > most)


@pytest.mark.slow
@pytest.mark.parametrize("spill", SPILLED.get(TRITON, ()), ids=str)
def test_what_is_left_out_for_its_spills_spills(compiled, spill):
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == spill.kernel)
    group = spill.group or 0
    shape = MatmulShape(16, 4096, 4096, group=group, zero_points=bool(spill.zero_points))
    configs = kernel.candidates(shape, spill.arch) if kernel.candidates else kernel.configs[spill.arch]
    (config,) = [c for c in configs if c.block_m == spill.block_m]
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
    config = replace(config, split_k=4, block_k=group or config.block_k)
    # With one tile above the other or several: of some kernels one of the two spills.
    shapes = (shape, replace(shape, m=SPLIT[spill.kernel]))
    found = [compiled(compile_build, Build(spill.kernel, spill.arch, config, s, dtype)) for s in shapes]
    assert max(report.spills for report in found) > 0


@pytest.mark.parametrize("build", marked(FEW), ids=str)
def test_choose_reckons_with_the_shared_memory_that_is_used(compiled, build):
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == build.kernel)
    reckoned = kernel.shared_bytes(build.config)
    assert compiled(compile_build, build).shared_bytes <= reckoned + 64  # barriers


def routing_spills(arch: str) -> list[int]:
    (experts,), options = moe_routing.example(moe_routing.KERNEL.typical, "int32")
    plans = moe_routing.launches(experts, **options, arch=arch).plans
    return [report(plan, arch).spills for plan in plans]


@pytest.mark.parametrize("arch", few_of(ARCHS))
def test_no_kernel_of_the_routing_spills(compiled, arch):
    assert compiled(routing_spills, arch) == [0, 0, 0]


def limited_gate_spills(arch: str) -> list[int]:
    """Of every config, with what experts may have between their products besides an activation."""
    kernel = nnfront_kernels.grouped_matmul.KERNEL
    more = {"activation": "silu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    found = []
    for config in kernel.configs[arch]:
        arguments, options = kernel.example(kernel.shape_for(kernel.typical, config), "bfloat16")
        found.append(
            report(kernel.plan(*arguments, **options, **more, arch=arch, config=config), arch).spills
        )
    return found


@pytest.mark.parametrize("arch", few_of(ARCHS))
def test_limits_of_gates_do_not_spill(compiled, arch):
    assert set(compiled(limited_gate_spills, arch)) == {0}


@pytest.mark.parametrize("build", few_of(FALLBACKS, 2), ids=str)
def test_what_the_budgets_leave_out_does_not_spill(compiled, build):
    assert compiled(compile_build, build).spills == 0


def rules_broken_by(mutant: Mutant, build: Build) -> list[str]:
    return broken_rules(build, compile_build(build, package(mutant)))


SM_90 = Build("matmul", "sm_90", Config(128, 256, 64, 8, 4), MatmulShape(4096, 4096, 4096))
FP8_SM_90 = Build(
    "matmul_fp8", "sm_90", Config(128, 128, 128, 8, 4), MatmulShape(4096, 4096, 4096), "float8_e4m3fn"
)
MUTANTS = [
    ("sums_left_in_the_tensor_core", "SUMMED if arch == \"sm_90\" else 0", "0", FP8_SM_90, "sums stay in the tensor core"),
    ("divisibility_lost", "do_not_specialize=[\"M\"]", "do_not_specialize=[\"M\", \"stride_wn\", \"K\"]", SM_90, "narrow loads"),
    ("too_large_a_tile", "", "", replace(SM_90, config=Config(256, 256, 64, 8, 4)), "bytes of shared memory"),
    ("too_few_warps", "", "", replace(SM_90, config=Config(128, 256, 64, 4, 3)), "spill instructions"),
    ("too_few_warps_serialize", "", "", replace(SM_90, config=Config(128, 256, 64, 4, 3)), "wgmma is serialized"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "build", "complaint"), few_of(MUTANTS, 2), ids=[m[0] for m in MUTANTS]
)
def test_bad_machine_code_is_caught(compiled, name, old, new, build, complaint):
    broken = compiled(rules_broken_by, Mutant(name, f"{build.kernel}.py" if old else "", old, new), build)
    assert any(complaint in rule for rule in broken), broken


def inspected(name: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        inspect_main([name, "--arch", "sm_90"])
    return out.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "quantize_fp8",
        "moe_routing",
        "moe_combine",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("matmul_fp8", "grouped_matmul")),
    ],
)
def test_inspect_shows_a_line_for_each_config_and_marks_the_choice(compiled, name):
    text = compiled(inspected, name)
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
    assert text.count("registers ") == len(kernel.configs["sm_90"])
    assert text.count("sm_90 * ") == 1
