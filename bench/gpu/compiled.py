# SPDX-License-Identifier: Apache-2.0
"""Machine code for the GPU's machine, compiled where there is none: of edge cases, full sizes, architectures, the runtime and the model, each a file beside its facts.

bench/gpu.sh --compile [--arch sm_90] [--only KERNEL ...] [--dry]     # --dry: small sizes
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import architectures
import model
import runtime
import torch
from cases import edges, full, small
from nnfront_kernels import KERNELS, ahead
from nnfront_kernels.common import ARCHS, Plan, launched_by
from right import RECORDS, edge

from nnfront.backends.cuda.ahead.cubin import CompiledKernels, read_cubin
from nnfront.backends.cuda.ahead.launcher import Launcher, launcher_for

FOLDER = Path(__file__).resolve().parent / "kernels"


def brought(arch: str, folder: Path = FOLDER) -> CompiledKernels | None:
    """The machine code of a folder for a GPU; None if there is none."""
    cubins = [
        read_cubin(json.loads(facts.read_text()), facts.with_suffix(".cubin").read_bytes())
        for facts in sorted(folder.glob(f"{arch}/*.json"))
    ]
    return CompiledKernels(arch, tuple(cubins)) if cubins else None


def launcher(kernels: CompiledKernels | None) -> Launcher | None:
    """What launches them on the GPU that is here; None, and Triton launches, without any."""
    return None if kernels is None else launcher_for(kernels, torch.device("cuda", 0))


def write(facts: dict[str, Any], image: bytes, folder: Path) -> None:
    """Keep one kernel."""
    place = folder / facts["arch"] / facts["key"]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".json").write_text(json.dumps(facts))
    place.with_suffix(".cubin").write_bytes(image)


class Keeping:
    """A launcher that compiles each plan, if that has not been done, and launches nothing."""

    def __init__(self, arch: str, folder: Path) -> None:
        self._arch, self._folder = arch, folder

    def __call__(self, plan: Plan) -> None:
        key = ahead.key_of(plan, self._arch)
        if not (self._folder / self._arch / f"{key}.json").exists():
            write(*ahead.build(plan, self._arch), self._folder)


def work(arch: str, names: Sequence[str], dry: bool) -> Iterator[tuple[Any, ...]]:
    """What has plans: edge cases, full sizes and, with all kernels, architectures and models, as `one` takes them."""
    accepted = [k.name for k in KERNELS if k.name in names and arch in k.configs]
    yield from (("edge", name, case) for name, case in edges(accepted))
    runs = [run for run in full(arch) if run.kernel in accepted]
    small_ones = dict.fromkeys(small(run, is_half) for run in runs for is_half in (False, True))
    yield from (("run", run) for run in (small_ones if dry else (*runs, *small_ones)))
    if set(names) == set(RECORDS):
        yield from (("architecture", *small_one) for small_one in architectures.models(dry))
        yield from (("model", *program) for part in (model, runtime) for program in part.programs(dry))


def one(arch: str, folder: Path, kind: str, *what: Any) -> None:
    """Compile what one case launches."""
    keep = Keeping(arch, folder)
    with launched_by(keep):
        if kind == "architecture":
            for plan in architectures.plans(*what, arch):
                keep(plan)
        elif kind == "model":
            for plan in model.plans(*what, arch).values():
                keep(plan)
        elif kind == "edge":
            edge(*what, arch, "cpu")  # nothing is launched, so it is found to be wrong
        else:
            (run,) = what
            arguments, options = RECORDS[run.kernel].example(run.shape, run.dtype)
            RECORDS[run.kernel].launch(*arguments, **options, arch=arch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh --compile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--arch", default="sm_90", choices=list(ARCHS))
    parser.add_argument("--only", nargs="+", default=[kernel.name for kernel in KERNELS])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(argv)
    with ahead.without_paths(), ProcessPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        waiting = [
            pool.submit(one, options.arch, options.out, *case)
            for case in work(options.arch, options.only, options.dry)
        ]
        failed = [str(job.exception()) for job in waiting if job.exception()]
    made = [*(options.out / options.arch).glob("*.cubin")]
    size = sum(file.stat().st_size for file in made)
    print(f"{len(made)} kernels for {options.arch}, {size / 1e6:.1f} MB in {options.out}")
    for why in failed:
        print(f"not compiled: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
