# SPDX-License-Identifier: Apache-2.0
"""bench/gpu.sh as far as it goes without a GPU: its cases, the order of its parts, its results file and its table."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import nnfront_kernels
import pytest
import torch
from nnfront_kernels.common import Plan

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


def dry(parts: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """What some parts print and keep."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "gpu.json"
        done = bench("--dry", "--parts", parts, "--out", str(out))
        return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.ahead.with_args(dry)
@pytest.mark.parametrize("parts", ["full,sanitizer,speed"])
def test_every_kernel_runs_small_and_gets_a_line(compiled, parts):
    done, results = compiled(dry, parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["kernel"] for row in results["rows"]} == {k.name for k in nnfront_kernels.KERNELS}
    assert results["wrong"] == []
    assert results["skipped"] == ["compute-sanitizer: a dry run"]
    assert set(results["machine"]) == {"date", "card", "python", "torch", "triton", "cuda"}
    assert "interpreter" in results["machine"]["card"]
    for row in results["rows"]:
        assert f"| {row['kernel']} {row['dtype']} |" in done.stdout


def test_edge_cases_run_for_the_kernels_that_are_asked_for():
    done = bench("--dry", "--parts", "edges", "--only", "matmul_small_m")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "edges: " in done.stdout
    assert "WRONG" not in done.stdout


@pytest.mark.ahead.with_args(dry)
@pytest.mark.parametrize("parts", ["runtime"])
def test_the_runtime_is_looked_at_line_by_line(compiled, parts):
    done, results = compiled(dry, parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["runtime"] == [
        f"ok    {what}, pages of 16"
        for what in ("replayed steps have the bits of others", "steps are replayed")
    ]


def test_what_there_is_no_time_for_is_listed():
    done = bench("--dry", "--parts", "full", "--only", "moe_combine", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("skipped moe_combine") == 1


def test_a_wrong_result_is_reported_and_fails():
    code = "import run, nnfront_kernels, right\n" + (
        "record = right.RECORDS['moe_combine']\n"
        "object.__setattr__(record, 'launch', lambda *a, **o: record.plan(*a, **o).launch().mul_(2))\n"
        "raise SystemExit(run.main(['--dry', '--parts', 'full', '--only', 'moe_combine']))"
    )
    folder = str(SCRIPT.parent / "gpu")
    environment = {**ENVIRONMENT, "TRITON_INTERPRET": "1", "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG moe_combine" in done.stdout


@pytest.fixture
def parts(monkeypatch):
    """The modules of bench/gpu, without running anything."""
    monkeypatch.syspath_prepend(SCRIPT.parent / "gpu")
    return importlib.import_module("run"), importlib.import_module("cases")


def test_an_unknown_part_is_refused(parts, capsys):
    with pytest.raises(SystemExit):
        parts[0].parse(["--parts", "ful"])
    assert (
        "parts are edges, full, sanitizer, cubin, runtime, speed, model, got ful" in capsys.readouterr().err
    )


def test_results_are_kept_part_by_part(parts, monkeypatch, tmp_path):
    def run_part(part, *arguments):
        if part == "speed":
            raise KeyboardInterrupt
        arguments[-1]["skipped"].append(part)

    monkeypatch.setattr(parts[0], "run_part", run_part)
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        parts[0].main(["--dry", "--parts", "edges,full,speed", "--out", str(out)])
    assert json.loads(out.read_text())["skipped"] == ["edges", "full"]


@pytest.mark.parametrize("arch", nnfront_kernels.ARCHS)
def test_full_sizes_cover_every_kernel_of_an_arch(parts, arch):
    names = {run.kernel for run in parts[1].full(arch)}
    assert names == {kernel.name for kernel in nnfront_kernels.KERNELS if arch in kernel.configs}


def test_kernels_are_compiled_and_launched_by_the_launcher_of_artefacts(parts):
    results = {"wrong": []}
    importlib.import_module("launcher").dry("sm_90", ["moe_combine"], results)
    assert results["wrong"] == []
    (row,) = results["launches"]
    assert row["kernel"] == "moe_combine_kernel"
    assert row["bytes"] > 1000


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
    results = {"wrong": [], "skipped": []}
    launcher.compared(run, "sm_90", "cpu", results)
    assert [failure["why"] for failure in results["wrong"]] == wrong
    assert y.tolist() == [1.0] * 4, "what one launch makes is left behind"
    assert [(row["kernel"], row["bytes"]) for row in results["launches"]] == [("K", 4)]


@pytest.fixture
def model(parts):
    return importlib.import_module("model")


def test_a_decode_step_reads_all_weights_but_the_embeddings_and_every_token(model):
    config = model.SMALL  # 259 rows of 64 embeddings, 1 layer, 1 key head of 32
    assert model.decode_bytes(10**6, config, 7, None) == 10**6 - 2 * 259 * 64 + 7 * 2 * 32 * 2
    assert model.decode_bytes(10**6, config, 7, "float8_e4m3fn") == 10**6 - 2 * 259 * 64 + 7 * 2 * (32 + 4)


def test_the_work_of_a_prompt_counts_products_and_pairs(model):
    # q and o of 64 x 64, k and v of 64 x 32, three of 64 x 96; 2 heads of 32, 1 + 2 + 3 pairs, two products
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert model.prefill_flops(model.SMALL, 3) == 2 * 3 * weights + 2 * 2 * 6 * 2 * 32
