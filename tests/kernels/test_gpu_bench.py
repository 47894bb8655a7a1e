# SPDX-License-Identifier: Apache-2.0
"""bench/gpu.sh as far as it goes without a GPU: its cases, the order of its parts, its results file and its table."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import nnfront_kernels
import pytest
import torch
from kernel_checks import EPS32, SUM, hopper_drift
from nnfront_kernels import Kernel
from nnfront_kernels.common import Plan
from nnfront_kernels.quantized import FP8
from torch.utils._pytree import tree_map

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


def dry(parts: str, *only: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """What some parts print and keep."""
    with TemporaryDirectory() as folder:
        done = bench("--dry", "--parts", parts, *only, "--out", folder)
        kept = Path(folder) / f"call_{parts.replace(',', '_')}.json"
        return done, json.loads(kept.read_text()) if kept.exists() else {}


@pytest.mark.matrix
@pytest.mark.parametrize("parts", ["full,sanitizer,speed"])
def test_every_kernel_runs_small_and_gets_a_line(compiled, parts):
    done, results = compiled(dry, parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["kernel"] for row in results["rows"]} == {k.name for k in nnfront_kernels.KERNELS}
    assert results["wrong"] == []
    assert set(results["parts"]) == set(parts.split(","))
    assert results["skipped"] == []  # the fault that was made on purpose is looked for, too
    assert set(results["machine"]) == {"date", "card", "python", "torch", "triton", "cuda"}
    assert "interpreter" in results["machine"]["card"]
    for row in results["rows"]:
        assert f"| {row['kernel']} {row['dtype']} |" in done.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("parts", ["runtime,architectures,model"])
def test_models_and_the_runtime_are_looked_at_line_by_line(compiled, parts):
    done, results = compiled(dry, parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["wrong"] == []
    assert [line for line in results["runtime"] if "steps" in line] == [
        f"ok    {what}, pages of 16"
        for what in ("replayed steps have the bits of others", "steps are replayed")
    ]
    others = [line.removeprefix("ok    ") for line in results["runtime"] if "steps" not in line]
    assert [line.partition(":")[0] for line in others] == [
        "mamba2  pages None",  # nothing of it is timed, so it is first
        "mamba2  pages 16",
        "weights arrive, first",
        "weights arrive, again",
        "prefill takes what is planned",
        "decode takes what is planned",
        "a cache that fits leaves room for its calls",
        "a cache that does not fit is refused",
    ]
    assert {row["what"].split()[0] for row in results["model"]} == {"prefill", "decode", "first"}


@pytest.mark.matrix
def test_edge_cases_and_machine_code_of_the_kernels_that_are_asked_for():
    done, results = dry("first,edges,cubin", "--only", "matmul_small_m", "moe_combine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["wrong"] == []
    assert {row["kernel"] for row in results["launches"]} == {"matmul_small_m_kernel", "moe_combine_kernel"}


@pytest.fixture
def parts(monkeypatch):
    """The modules of bench/gpu, without running anything."""
    monkeypatch.syspath_prepend(SCRIPT.parent / "gpu")
    return importlib.import_module("run"), importlib.import_module("cases")


def test_the_parts_of_each_call_take_less_than_nine_minutes(parts):
    run = parts[0]
    for given in run.CALLS.values():
        assert sum(max(given[part] for part in turn) for turn in run.turns([*given])) + run.GRACE < 540
    assert list(run.CALLS[1]) == ["model", "runtime"]


def test_parts_that_time_nothing_run_at_the_same_time_and_before_the_others(parts):
    assert parts[0].turns(["model", "edges", "speed", "full"]) == [["edges", "full"], ["model"], ["speed"]]


def test_an_unknown_part_is_refused(parts, capsys):
    with pytest.raises(SystemExit):
        parts[0].parse(["--parts", "ful"])
    assert "parts are model, runtime, first, edges, full, " in capsys.readouterr().err


# A part of five cases: the second one faults, the third hangs, the fourth is wrong and leaves a device that takes no more work.
FAULTY = """
import json, os, sys, time
skip = int(sys.argv[3].removeprefix("--skip="))
with open(sys.argv[2], "a", buffering=1) as file:
    say = lambda **line: file.write(json.dumps(line) + "\\n")
    for i in range(skip, 5):
        say(begun=f"case {i}")
        if i == 1:
            print("a fault", flush=True)
            os.abort()
        if i == 2:
            time.sleep(3600)
        if i == 3:
            say(ended=f"case {i}", wrong=[{"case": f"case {i}", "why": "an illegal address"}])
            sys.exit(3)
        say(ended=f"case {i}", rows=[i])
"""


def run_faulty(run, monkeypatch, tmp_path, seconds: float) -> list[dict]:
    """What is said of its cases, by a clock that stands still but while it hangs: 50 seconds for each look at it."""
    passed = 0.0

    def clock() -> float:
        nonlocal passed
        passed += 50.0 * (run.unfinished(tmp_path / "full.jsonl") == "case 2")
        return passed

    (tmp_path / "part.py").write_text(FAULTY)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    return run.run_part("full", SimpleNamespace(seconds=seconds, passed=[], dry=False), tmp_path)


def test_a_case_that_faults_or_hangs_costs_itself_alone(parts, monkeypatch, tmp_path):
    lines = run_faulty(parts[0], monkeypatch, tmp_path, 1e6)
    assert [line.get("rows") for line in lines] == [[0], None, None, None, [4]]
    fault, hang, told = (line["wrong"][0] for line in lines if "wrong" in line)
    assert fault["case"] == "full case 1"
    assert fault["why"].startswith("the process ended with SIGABRT")
    assert "a fault" in fault["why"]
    assert (hang["case"], hang["why"].split("\n")[0]) == ("full case 2", "nothing happened for 100 s")
    assert told == {"case": "case 3", "why": "an illegal address"}
    assert "a fault" in parts[0].read(tmp_path / "full.jsonl")[-1]["printed"]


@pytest.mark.parametrize("before", [[], [{"begun": "case 0"}, {"ended": "case 0", "wrong": [{}]}]])
def test_a_process_that_begins_no_case_is_not_begun_again(parts, monkeypatch, tmp_path, before):
    run, waiting = parts[0], [*before]

    def ended(command, file, *_) -> str:
        while waiting:
            run.append(file, waiting.pop(0))
        return "the process ended with 1"

    monkeypatch.setattr(run, "watched", ended)
    lines = run.run_part("full", SimpleNamespace(seconds=1e6, passed=[], dry=False), tmp_path)
    assert len(lines) == len(before) // 2 + 1
    assert lines[-1]["wrong"] == [{"case": "full before its next case", "why": "the process ended with 1\n"}]


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_call_leaves_no_more_files_than_are_brought_back(parts, monkeypatch, tmp_path, call):
    run = parts[0]

    def watched(command, file, log, *_) -> None:
        run.append(file, {"begun": "case 0"})
        run.append(file, {"ended": "case 0"})
        log.write_text("a warning")

    monkeypatch.setattr(run, "watched", watched)
    monkeypatch.setattr(run, "machine", lambda dry: {})
    assert run.main([str(call), "--out", str(tmp_path)]) == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) <= 8, files
    for part in run.CALLS[call]:
        assert run.read(tmp_path / f"{part}.jsonl")[-1] == {"printed": "a warning"}


def test_a_table_without_ceilings_is_still_one(parts):
    row = {
        "kernel": "softmax",
        "dtype": "float16",
        "shape": {"rows": 1},
        "config": dict.fromkeys(("block_m", "block_n", "block_k", "num_warps", "num_stages", "split_k"), 1),
        "chosen": True,
        "us": 1.0,
        "tflop_s": 1.0,
        "gb_s": 1.0,
        "versus_us": None,
    }
    table = importlib.import_module("table")
    assert "| 1 |  |" in table.table({"machine": {}, "ceilings": {}, "rows": [row]})


def test_a_rehearsal_has_all_the_time_that_it_takes(parts, monkeypatch, tmp_path):
    run, given = parts[0], []
    monkeypatch.setattr(run, "watched", lambda *arguments: given.append(arguments[-2:]))
    for dry in (True, False):
        run.run_part("full", SimpleNamespace(seconds=None, passed=[], dry=dry), tmp_path)
    assert given[0] == (math.inf, math.inf)
    assert given[1][0] < math.inf
    assert given[1][1] == run.SILENCE


def test_a_part_ends_when_its_seconds_are_over(parts, monkeypatch, tmp_path):
    lines = run_faulty(parts[0], monkeypatch, tmp_path, 12.0)
    assert lines[-1]["wrong"][0]["why"].startswith("it was not done in time")
    assert len(lines) == 3


def test_what_there_is_no_time_for_is_listed(parts, monkeypatch, tmp_path, capsys):
    run, part = parts[0], importlib.import_module("part")
    file = tmp_path / "lines"
    file.write_text("")
    part.run("full", file, 0, part.Options(True, ["moe_combine"], False, 0.0, "sm_90"))
    monkeypatch.setattr(run, "run_part", lambda *_: run.read(file))
    assert run.main(["--dry", "--parts", "full", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("skipped full moe_combine") == 1


def test_a_wrong_result_ends_the_process_if_the_device_takes_no_more_work(parts, monkeypatch, tmp_path):
    part = importlib.import_module("part")
    ended: list[int] = []
    monkeypatch.setattr(part, "is_alive", lambda device: False)
    monkeypatch.setattr(part.os, "_exit", ended.append)
    monkeypatch.setattr(
        part,
        "cases",
        lambda *_: [
            part.Case("a", lambda: "off"),
            part.Case("b", lambda: None),
            part.Case("c", lambda: 1 / 0),
            part.Case("d", lambda: {"rows": [7]}),
        ],
    )
    file = tmp_path / "lines"
    file.write_text("")
    part.run("full", file, 0, part.Options(True, [], False, float("inf"), "sm_90"))
    assert ended == [3, 3]
    found = [line for line in parts[0].read(file) if "ended" in line]
    assert [line.get("wrong", [{}])[0].get("why", "")[:20] for line in found] == [
        "off",
        "",
        "ZeroDivisionError: d",
        "",
    ]
    assert found[3]["rows"] == [7]


@pytest.mark.parametrize("arch", nnfront_kernels.ARCHS)
def test_full_sizes_cover_every_kernel_of_an_arch(parts, arch):
    names = {run.kernel for run in parts[1].full(arch)}
    assert names == {kernel.name for kernel in nnfront_kernels.KERNELS if arch in kernel.configs}


def arguments(kernel: Kernel, shape: Any) -> Any:
    """What a launch of a shape is given: shapes of tensors, and other values."""
    given = kernel.example(shape, kernel.dtypes[0])
    return tree_map(lambda value: value.shape if isinstance(value, torch.Tensor) else value, given)


@pytest.mark.parametrize("kernel", nnfront_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_full_sizes_cover_every_way_of_a_kernel_that_its_shape_tells_by_a_flag(parts, kernel):
    runs = [run for run in parts[1].full("sm_90") if run.kernel == kernel.name]
    for field in fields(kernel.typical):
        on = [replace(run.shape, **{field.name: True}) for run in runs] if field.default is False else []
        taken = [shape for shape in on if kernel.accepts(shape, runs[0].dtype, "sm_90") is None]
        if any(
            arguments(kernel, shape) != arguments(kernel, replace(shape, **{field.name: False}))
            for shape in taken
        ):
            assert any(getattr(run.shape, field.name) for run in runs), field.name


@pytest.mark.parametrize(("step", "wrong"), [(1, []), (2, ["K: the launchers differ in y"])])
def test_a_difference_between_the_launchers_is_reported(parts, monkeypatch, step, wrong):
    launcher = importlib.import_module("launcher")
    run, y = parts[1].Run("rms_norm", nnfront_kernels.rms_norm.NormShape(1, 4), "float16"), torch.zeros(4)
    plan = Plan(type("K", (), {}), (1,), {"y": y}, {}, None, y)
    own = type("Own", (), {"compiled_here": {}, "__call__": lambda self, plan: plan.output.add_(step)})()
    record = SimpleNamespace(launch=lambda **options: plan.launch())
    for name, stand_in in {
        "jit": lambda plan: plan.output.add_(1),
        "launcher_for": lambda ahead, device: own,
        "read_cubin": lambda fields, image: SimpleNamespace(image=image),
        "operands": lambda *arguments: ((), {}),
        "RECORDS": {"rms_norm": record},
    }.items():
        monkeypatch.setattr(launcher, name, stand_in)
    monkeypatch.setattr(launcher.ahead, "build", lambda plan, arch: ({}, b"code"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    results = launcher.compared(run, "sm_90", "cpu")
    assert [failure["why"] for failure in results["wrong"]] == wrong
    assert y.tolist() == [1.0] * 4, "what one launch makes is left behind"
    assert [(row["kernel"], row["bytes"]) for row in results["launches"]] == [("K", 4)]


def hopper_sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Products of float8 as Hopper adds them up, in float64: 32 and the sum so far are cut to 13 bits behind the largest; each 128 go into a float32 sum."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for first in range(0, x.shape[1], 128):
        inside = torch.zeros_like(total)
        for at in range(first, min(first + 128, x.shape[1]), 32):
            terms = x[:, None, at : at + 32] * w[None, :, at : at + 32]
            terms = torch.cat([inside[:, :, None], terms], 2)
            step = torch.exp2(terms.abs().amax(2, keepdim=True).log2().floor() - 13)
            inside = ((terms / step).trunc() * step).sum(2)
        total = (total + inside).float().double()
    return total


@pytest.mark.parametrize("k", [16, 129, 257])  # over longer ones cuts of either sign average out
def test_sums_of_float8_may_be_as_short_as_hoppers_tensor_cores_keep_them(k):
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(64, k, generator=generator).to(FP8).double() for _ in range(2))
    off, sizes = (hopper_sums(x, w) - x @ w.T).abs(), x.abs() @ w.abs().T
    usual = SUM * EPS32 * k**0.5 * sizes
    assert (off > usual).any()
    assert (off <= usual + hopper_drift("matmul_fp8", "sm_90", 64) * sizes).all()
    for exact in (("matmul_fp8", "sm_90", 32), ("matmul_fp8", "sm_100", 64), ("matmul", "sm_90", 128)):
        assert hopper_drift(*exact) == 0


FOUND = "Invalid __global__ write of size 4 bytes"


@pytest.mark.parametrize(
    ("code", "said", "must_find", "found"),
    [
        (9, FOUND, True, None),
        (1, f"{FOUND}; RuntimeError: CUDA error", True, None),
        (1, "no module named torch", True, "it did not find a write behind a tensor: no module named torch"),
        (0, "", True, "it did not find a write behind a tensor: "),
        (0, "fine", False, None),
        (9, "Invalid read", False, "Invalid read"),
        (124, "", False, {"skipped": ["compute-sanitizer t: not done after 20 s"]}),
        (
            1,
            "Device not supported",
            False,
            {"skipped": ["compute-sanitizer t: it does not support this device"]},
        ),
    ],
)
def test_a_memory_checker_has_to_find_a_fault_before_it_is_believed(
    parts, monkeypatch, code, said, must_find, found
):
    sanitizer = importlib.import_module("sanitizer")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: name)
    seen: list[tuple[list[str], dict]] = []

    def ran(command, *, env, **options):
        seen.append((command, env))
        return SimpleNamespace(returncode=code, stdout=said, stderr="")

    monkeypatch.setattr(sanitizer.subprocess, "run", ran)
    options = SimpleNamespace(dry=False, deadline=time.monotonic() + 20.4)
    assert sanitizer.checked("t", "", must_find, options) == found
    ((command, env),) = seen
    assert command[:4] == ["timeout", "-k", "5", "20"], "no longer than the part has"
    assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
