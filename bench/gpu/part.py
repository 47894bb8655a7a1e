# SPDX-License-Identifier: Apache-2.0
"""One part of bench/gpu.sh in a process of its own: its cases in order, a line of JSON when each begins and when it ends."""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compiled
import torch
from nnfront_kernels import KERNELS
from nnfront_kernels.common import ARCHS, arch_of
from run import append

from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.cuda.ahead.launcher import Launcher, launching

Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is looked at, and how: what is wrong in words, lists of what was found, or nothing."""

    label: str
    look: Callable[[], Found | str | None]


@dataclass(frozen=True)
class Options:
    """What was asked for, where, and the machine code that was brought along."""

    dry: bool
    only: list[str]
    configs: bool
    deadline: float
    arch: str
    brought: CompiledKernels | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


def kernels(part: str, options: Options) -> Iterable[Case]:
    """Cases of one kernel each."""
    import launcher
    from cases import edges, full, small
    from right import edge, full_size

    accepted = [k.name for k in KERNELS if k.name in options.only and options.arch in k.configs]
    if part == "edges":
        found = [(n, c) for n, c in edges(accepted) if not options.dry or c.dtype != "bfloat16"]
        return [Case(f"edges {n} {c}", partial(edge, n, c, options.arch, options.device)) for n, c in found]
    runs = [run for run in full(options.arch) if run.kernel in accepted]
    if part == "first":
        runs = list({run.kernel: run for run in runs}.values())
    if options.dry or part == "first":
        runs = list(dict.fromkeys(small(run, options.dry) for run in runs))
    if part == "cubin":
        return launcher.cases(runs, options)
    return [Case(f"{part} {run}", partial(full_size, run, options.arch, options.device)) for run in runs]


def speed(options: Options) -> Iterable[Case]:
    from cases import full, small
    from speed import Clock, ceilings, timed

    clock = Clock(options.device)
    yield Case("speed ceilings", lambda: {"ceilings": ceilings(clock)})
    runs = [run for run in full(options.arch) if run.kernel in options.only]
    if options.dry:
        runs = list(dict.fromkeys(small(run, True) for run in runs))
    for run in runs:
        yield Case(f"speed {run}", lambda run=run: {"rows": timed(run, options.arch, clock, options.configs)})


def cases(part: str, options: Options) -> Iterable[Case]:
    """The cases of a part, always in the same order."""
    if part == "speed":
        return speed(options)
    if part in ("first", "edges", "full", "cubin"):
        return kernels(part, options)
    if part == "sanitizer":
        import sanitizer

        return sanitizer.cases(options)
    if part == "architectures":
        import architectures

        return architectures.cases(options)
    if part == "runtime":
        import runtime

        return runtime.cases(options)
    import model

    return model.cases(options)


def run(part: str, file: Path, skip: int, options: Options, launcher: Launcher | None = None) -> None:
    """Look at the cases behind the first `skip` as long as there is time; say what the launcher had to compile for each."""
    known: set[str] = set()
    for index, case in enumerate(cases(part, options)):
        if index < skip:
            continue
        if time.monotonic() > options.deadline:
            append(file, {"skipped": [case.label]})
            continue
        append(file, {"begun": case.label})
        started = time.monotonic()
        try:
            found = case.look()
        except Exception as error:
            where = traceback.format_exc().splitlines()[-3].strip()
            found = f"{type(error).__name__}: {error} ({where})"
        if isinstance(found, str):
            found = {"wrong": [{"case": case.label, "why": found}]}
        found = found or {}
        here = {} if launcher is None else launcher.compiled_here
        new = {key: here[key] for key in here.keys() - known} | found.get("compiled_here", {})
        known |= new.keys()
        seconds = time.monotonic() - started
        append(file, {"ended": case.label, "seconds": seconds, **found, "compiled_here": new})
        if found.get("wrong") and not is_alive(options.device):
            os._exit(3)  # after a fault each call of this process would fail


def is_alive(device: str) -> bool:
    """Whether the device still takes work."""
    try:
        return device == "cpu" or torch.cuda.synchronize() is None
    except RuntimeError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("file", type=Path)
    parser.add_argument("--skip", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--only", nargs="+")
    given = parser.parse_args()
    arch = "sm_90" if given.dry else arch_of(torch.device("cuda", 0))
    if arch not in ARCHS:
        raise SystemExit(f"no kernels for {arch}: they are for {', '.join(ARCHS)}")
    deadline = time.monotonic() + given.seconds
    kernels = None if given.dry else compiled.brought(arch)
    launcher = compiled.launcher(kernels)
    if not given.dry and kernels is None:
        append(given.file, {"compiled_here": {"all": f"no machine code for {arch} was brought along"}})
    options = Options(given.dry, given.only, given.configs, deadline, arch, kernels)
    with launching(launcher):
        run(given.part, given.file, given.skip, options, launcher)


if __name__ == "__main__":
    main()
