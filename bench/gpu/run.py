# SPDX-License-Identifier: Apache-2.0
"""The parts of bench/gpu.sh, each a process with a budget: what faults or hangs is one case, and what there was no time for is listed.

Parts that time nothing run at the same time, before the others, which have the GPU to themselves.

A part writes a line of JSON when a case begins and one when it ends, and what it printed at its end. A process that ends in the middle of a
case, or behind one after which the device takes no more work, or that says nothing for too long, is begun again behind that case.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton
from nnfront_kernels import KERNELS
from table import model_table, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# By call: the seconds of each part.
CALLS: dict[int, dict[str, float]] = {
    1: {"model": 390, "runtime": 130},
    2: {"first": 100, "edges": 240, "full": 240, "architectures": 240},
    3: {"speed": 520},
    4: {"cubin": 260, "sanitizer": 260},
}
BUDGETS = {part: seconds for parts in CALLS.values() for part, seconds in parts.items()}
UNTIMED = ("first", "edges", "full", "architectures")
SILENCE = 100.0  # seconds after which a case hangs
GRACE = 15.0  # seconds that a part has to end its last case
KINDS = ("wrong", "skipped", "rows", "launches", "model", "runtime")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    out = Path(options.out or os.environ.get("OUT") or ROOT / "bench" / "results" / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "machine": machine(options.dry),
        "ceilings": {},
        "parts": {},
        "compiled_here": {},
    }
    results |= {kind: [] for kind in KINDS}
    for parts in turns(options.parts):
        started = time.monotonic()
        with ThreadPoolExecutor(len(parts)) as pool:
            running = {pool.submit(run_part, part, options, out): part for part in parts}
            for ended in as_completed(running):
                part, seconds, here = running[ended], round(time.monotonic() - started, 1), {}
                for line in ended.result():
                    gather(line, results)
                    here |= line.get("compiled_here", {})
                results["compiled_here"][part] = here
                results["parts"][part] = seconds
                (out / f"call_{'_'.join(options.parts)}.json").write_text(
                    json.dumps(results, indent=1) + "\n"
                )
                why = f", {len(here)} kernels compiled here: {next(iter(here.values()))}" if here else ""
                print(f"{part}: {seconds:.0f} s{why}", flush=True)
    if results["rows"]:
        print(table(results))
    if results["model"]:
        print(model_table(results["model"]))
    for line in results["runtime"]:
        print(line)
    for failure in results["wrong"]:
        print(f"WRONG {failure['case']}: {failure['why']}")
    for case in results["skipped"]:
        print(f"skipped {case}")
    return 1 if results["wrong"] else 0


def turns(parts: Sequence[str]) -> list[list[str]]:
    """Which parts run at the same time, in order."""
    together = [part for part in parts if part in UNTIMED]
    return [turn for turn in (together, *([part] for part in parts if part not in UNTIMED)) if turn]


def gather(line: dict[str, Any], results: dict[str, Any]) -> None:
    """Add what one case has found."""
    results["ceilings"] |= line.get("ceilings", {})
    for kind in KINDS:
        results[kind] += line.get(kind, [])


def run_part(part: str, options: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Run a part until its cases or its seconds are over; return the lines of cases that have ended."""
    file, log = out / f"{part}.jsonl", out / f"{part}.log"
    file.write_text("")
    log.write_text("")
    # A rehearsal has all the time that it takes: how fast kernels are interpreted says nothing of a GPU.
    usual, silence = (math.inf, math.inf) if options.dry else (BUDGETS[part], SILENCE)
    seconds = usual if options.seconds is None else options.seconds
    deadline = time.monotonic() + seconds
    while True:
        begun_before = begun(file)
        left = max(deadline - time.monotonic(), 0.0)
        command = [sys.executable, str(HERE / "part.py"), part, str(file), f"--skip={begun_before}"]
        command += [f"--seconds={left}", *options.passed]
        why = watched(command, file, log, deadline + GRACE, silence)
        if why is None:
            break
        case, is_stuck = unfinished(file), begun(file) == begun_before
        if is_stuck or not has_told(file):
            told = {
                "case": f"{part} {case or 'before its next case'}",
                "why": f"{why}\n{printed(log)[-1500:]}",
            }
            append(file, {"ended": case, "wrong": [told]})
        if is_stuck or time.monotonic() > deadline:
            break
    found = [line for line in read(file) if "begun" not in line]
    if said := printed(log):
        append(file, {"printed": said})
    log.unlink()  # so that the files of a call are few
    return found


def watched(command: Sequence[str], file: Path, log: Path, deadline: float, silence: float) -> str | None:
    """Run a process; None if it ends well, else what was wrong with it: also if it says nothing for so many seconds."""
    with log.open("a") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        size, changed = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if (found := file.stat().st_size) != size:
                size, changed = found, now
            if now > deadline or now - changed > silence:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return (
                    "it was not done in time" if now > deadline else f"nothing happened for {silence:.0f} s"
                )
    code = process.returncode
    return None if code == 0 else f"the process ended with {signal.Signals(-code).name if code < 0 else code}"


def append(file: Path, line: dict[str, Any]) -> None:
    """Write a line that is there whatever happens next."""
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def begun(file: Path) -> int:
    return sum("begun" in line for line in read(file))


def unfinished(file: Path) -> str | None:
    """The case that has begun and not ended."""
    lines = read(file)
    return lines[-1].get("begun") if lines else None


def has_told(file: Path) -> bool:
    """Whether the last case has ended, and said what was wrong: a process that ends then has seen that the device takes no more work."""
    lines = read(file)
    return bool(lines and lines[-1].get("wrong"))


def printed(log: Path) -> str:
    return log.read_text(errors="replace")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [kernel.name for kernel in KERNELS]
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("call", nargs="?", type=int, choices=list(CALLS), help="its parts; all without one")
    parser.add_argument("--dry", action="store_true", help="small, in the interpreter, without a GPU")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="kernels")
    parser.add_argument("--parts", help=f"of {', '.join(BUDGETS)}")
    parser.add_argument("--configs", action="store_true", help="time every config, not only the chosen one")
    parser.add_argument("--seconds", type=float, help="of each part, instead of its budget")
    parser.add_argument("--out", help="folder for results; default $OUT or bench/results/gpu")
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",") if options.parts else list(CALLS.get(options.call, BUDGETS))
    unknown = sorted(set(options.parts) - set(BUDGETS))
    if unknown:
        parser.error(f"parts are {', '.join(BUDGETS)}, got {', '.join(unknown)}")
    options.passed = ["--dry"] * options.dry + ["--configs"] * options.configs + ["--only", *options.only]
    return options


def machine(dry: bool) -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "card": "none: interpreter, arguments planned for sm_90" if dry else torch.cuda.get_device_name(0),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


if __name__ == "__main__":
    raise SystemExit(main())
