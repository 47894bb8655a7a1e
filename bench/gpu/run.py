# SPDX-License-Identifier: Apache-2.0
"""The parts of bench/gpu.sh in order, with a deadline: what there was no time for is listed, never left out silently."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "kernels")]

import launcher  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from cases import edges, full, small  # noqa: E402
from nnfront_kernels import KERNELS  # noqa: E402
from nnfront_kernels.common import ARCHS, arch_of  # noqa: E402
from right import edge, full_size  # noqa: E402
from speed import Clock, ceilings, timed  # noqa: E402
from table import model_table, table  # noqa: E402

PARTS = ("edges", "full", "sanitizer", "cubin", "runtime", "speed", "model")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = "cpu" if options.dry else "cuda"
    arch = "sm_90" if options.dry else arch_of(torch.device("cuda", 0))
    if arch not in ARCHS:
        print(f"no kernels for {arch}: they are for {', '.join(ARCHS)}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"machine": machine(options.dry, arch)}
    results |= {kind: [] for kind in ("wrong", "skipped", "rows", "model")}
    deadline = time.monotonic() + options.seconds
    for part in options.parts:
        started = time.monotonic()
        run_part(part, options, arch, device, deadline, results)
        keep(options, results)
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
    if results["rows"]:
        print(table(results))
    if results["model"]:
        print(model_table(results["model"]))
    for failure in results["wrong"]:
        print(f"WRONG {failure['case']}: {failure['why']}")
    for case in results["skipped"]:
        print(f"skipped {case}")
    return 1 if results["wrong"] else 0


def keep(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the results so far: whatever ends this process must not take along what was measured."""
    out = options.out or (None if options.dry else ROOT / "bench" / "results" / "gpu.json")
    if out:
        Path(out).parent.mkdir(exist_ok=True)
        Path(out).write_text(json.dumps(results, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [kernel.name for kernel in KERNELS]
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="small, in the interpreter, without a GPU")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kernels")
    parser.add_argument("--parts", default=",".join(PARTS), help="default %(default)s")
    parser.add_argument("--configs", action="store_true", help="time every config, not only the chosen one")
    parser.add_argument(
        "--seconds", type=float, default=540, help="stop starting cases then; default %(default)s"
    )
    parser.add_argument("--out", help="results file; default bench/results/gpu.json, none with --dry")
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"parts are {', '.join(PARTS)}, got {', '.join(unknown)}")
    return options


def machine(dry: bool, arch: str) -> dict[str, str]:
    card = f"none: interpreter, arguments planned for {arch}" if dry else torch.cuda.get_device_name(0)
    return {
        "date": datetime.date.today().isoformat(),
        "card": card,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


def run_part(
    part: str, options: argparse.Namespace, arch: str, device: str, deadline: float, results: dict[str, Any]
) -> None:
    if part == "sanitizer":
        sanitize(options, results)
        return
    if part == "runtime":
        look_at_runtime(options, deadline, results)
        return
    if part == "cubin" and options.dry:
        launcher.dry(arch, options.only, results)
        return
    if part == "model":
        time_model(options, deadline, results)
        return
    if part == "edges":
        accepted = [k.name for k in KERNELS if k.name in options.only and arch in k.configs]
        cases = edges(accepted)
        if options.dry:
            cases = [(name, case) for name, case in cases if case.dtype != "bfloat16"]
            each(cases, lambda name, case: edge(name, case, arch, device), deadline, results)
        else:
            in_processes([(name, case, arch, device) for name, case in cases], deadline, results)
        return
    runs = [run for run in full(arch) if run.kernel in options.only]
    if options.dry:
        runs = list(dict.fromkeys(map(small, runs)))
    if part == "full":
        each([(run,) for run in runs], lambda run: full_size(run, arch, device), deadline, results)
        return
    if part == "cubin":
        each(
            [(run,) for run in runs],
            lambda run: launcher.compared(run, arch, device, results),
            deadline,
            results,
        )
        return
    clock = Clock(device)
    results["ceilings"] = ceilings(clock)
    for run in runs:
        if time.monotonic() > deadline:
            results["skipped"].append(f"speed {run}")
            continue
        try:
            results["rows"] += timed(run, arch, clock, options.configs)
        except Exception as error:  # a case that cannot run must not hide the others' numbers
            results["wrong"].append({"case": f"speed {run}", "why": f"{type(error).__name__}: {error}"})


def time_model(options: argparse.Namespace, deadline: float, results: dict[str, Any]) -> None:
    """The whole model; on a machine that has the kernels only, it is listed as skipped."""
    try:
        import model
    except ImportError as error:
        results["skipped"].append(f"model: {error}")
        return
    model.run(options.dry, deadline, results, partial(keep, options, results))


def each(
    cases: Sequence[tuple[Any, ...]],
    check: Callable[..., str | None],
    deadline: float,
    results: dict[str, Any],
) -> None:
    """Run cases one after the other and keep what is wrong; an exception is wrong too."""
    for case in cases:
        label = " ".join(map(str, case))
        if time.monotonic() > deadline:
            results["skipped"].append(label)
            continue
        try:
            why = check(*case)
        except Exception as error:
            why = f"{type(error).__name__}: {error} ({traceback.format_exc().splitlines()[-3].strip()})"
        if why:
            results["wrong"].append({"case": label, "why": why})


def in_processes(work: Sequence[tuple[Any, ...]], deadline: float, results: dict[str, Any]) -> None:
    """Edge cases spend their time in the compiler: eight at a time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        waiting = {pool.submit(edge, *arguments): " ".join(map(str, arguments[:2])) for arguments in work}

        def outcome(future: Any) -> str | None:
            why: str | None = future.result(timeout=max(deadline - time.monotonic(), 0.1))
            return why

        for future, label in waiting.items():
            each([(label,)], lambda _, future=future: outcome(future), deadline, results)
        pool.shutdown(cancel_futures=True)


def look_at_runtime(options: argparse.Namespace, deadline: float, results: dict[str, Any]) -> None:
    """runtime.py in a process of its own: what it says line by line."""
    command = [sys.executable, str(HERE.parent / "runtime.py"), *(["--dry"] if options.dry else [])]
    left = max(min(deadline - time.monotonic(), 180.0), 1.0)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        results["skipped"].append(f"runtime: not done after {left:.0f} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "WRONG "))]
    results["runtime"] = lines
    print("\n".join(lines))
    results["wrong"] += [
        {"case": "runtime", "why": line.removeprefix("WRONG ")} for line in lines if line.startswith("WRONG")
    ]
    if done.returncode and not results["wrong"]:
        results["wrong"].append({"case": "runtime", "why": done.stderr[-1500:]})


def sanitize(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """The edge cases of one process under compute-sanitizer, if it is here."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if options.dry or not tool:
        results["skipped"].append("compute-sanitizer: " + ("a dry run" if options.dry else "not installed"))
        return
    code = (
        f"import sys; sys.path[:0] = {[str(HERE.parent), str(ROOT / 'tests' / 'kernels')]!r}\n"
        "import torch\nfrom cases import edges\nfrom right import edge\n"
        "from nnfront_kernels import KERNELS\nfrom nnfront_kernels.common import arch_of\n"
        "arch = arch_of(torch.device('cuda', 0))\n"
        f"names = [k.name for k in KERNELS if k.name in {options.only!r} and arch in k.configs]\n"
        "for name, case in edges(names)[::3]: print(name, case, edge(name, case, arch, 'cuda'))\n"
    )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        results["skipped"].append("compute-sanitizer: not done after 120 s")
        return
    if done.returncode:
        results["wrong"].append({"case": "compute-sanitizer", "why": (done.stdout + done.stderr)[-1500:]})


if __name__ == "__main__":
    raise SystemExit(main())
