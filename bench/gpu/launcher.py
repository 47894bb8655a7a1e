# SPDX-License-Identifier: Apache-2.0
"""Every kernel through both launchers: Triton's own, and nnfront's of machine code compiled ahead. Same bits, and what a launch costs the host.

Each plan runs twice from the same memory, and every tensor that it was given is compared afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Run, full, small
from nnfront_kernels import ahead
from nnfront_kernels.common import Plan, jit, launched_by
from right import RECORDS, operands

from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, read_cubin
from nnfront.backends.cuda.ahead.driver import Driver
from nnfront.backends.cuda.ahead.launcher import Launcher, launcher_for

HERE = Path(__file__).resolve()

LAUNCHES = 50  # fewer than the driver queues
FEW = 4  # kernels that a rehearsal compiles in one process: more say nothing for so long, on a busy machine, that they seem to hang


def cases(runs: Sequence[Run], options: Any) -> list[Any]:
    """A case for each run; without a GPU one for a few kernels each, on a driver that launches nothing."""
    from part import Case

    if options.dry:
        names = list(dict.fromkeys(run.kernel for run in runs))
        few = [names[i : i + FEW] for i in range(0, len(names), FEW)]
        return [Case(f"cubin {', '.join(some)}", partial(dry, options.arch, some)) for some in few]
    return [Case(f"cubin {run}", partial(compared, run, options.arch, options.device)) for run in runs]


def compared(run: Run, arch: str, device: str) -> dict[str, Any]:
    """Run a kernel's plans through both launchers: a row for each in `launches`, and what is wrong in `wrong`."""
    results: dict[str, Any] = {"wrong": [], "skipped": [], "launches": []}
    arguments, options = operands(run, arch, device)

    def both(plan: Plan) -> None:
        cubin = read_cubin(*ahead.build(plan, arch))
        own = launcher_for(CompiledKernels(arch, (cubin,)), torch.device(device, 0))
        before = [tensor.clone() for tensor in tensors(plan)]
        seen = []
        for launch in (jit, own):
            restore(plan, before)
            launch(plan)
            seen.append([tensor.clone() for tensor in tensors(plan)])
        names = [name for name, _ in given(plan)]
        differ = [name for name, one, two in zip(names, *seen, strict=True) if not same(one, two)]
        if all(map(same, before, seen[0])):  # the memory held the result already: nothing is shown
            results["skipped"].append(f"cubin {run}: {plan.kernel.__name__} changed nothing")
        if differ or own.compiled_here:
            why = f"the launchers differ in {', '.join(differ)}" if differ else str(own)
            results["wrong"].append({"case": f"cubin {run}", "why": f"{plan.kernel.__name__}: {why}"})
        row = {
            "case": str(run),
            "kernel": plan.kernel.__name__,
            "triton_us": host_microseconds(jit, plan),
            "own_us": host_microseconds(own, plan),
            "bytes": len(cubin.image),
        }
        restore(plan, seen[0])  # the next kernel reads what one launch has made
        results["launches"].append(row)
        print(
            f"{row['kernel']} {run}: {row['triton_us']:.1f} us a launch by Triton, {row['own_us']:.1f} us here"
        )

    with launched_by(both):
        RECORDS[run.kernel].launch(*arguments, **options, arch=arch)
    return results


def host_microseconds(launch: Callable[[Plan], None], plan: Plan) -> float:
    """What one launch takes the host, the queue being short."""
    launch(plan)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        launch(plan)
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / LAUNCHES * 1e6


def given(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a plan by name, those behind descriptors too."""
    for name, value in plan.arguments.items():
        tensor = getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def tensors(plan: Plan) -> list[torch.Tensor]:
    return [tensor for _, tensor in given(plan)]


def restore(plan: Plan, values: list[torch.Tensor]) -> None:
    """Set all that the kernel may write to."""
    for tensor, value in zip(tensors(plan), values, strict=True):
        tensor.copy_(value)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def dry(arch: str, kernels: list[str]) -> dict[str, Any]:
    """Compile and launch in a process of its own: this one's kernels are interpreted."""
    command = [sys.executable, str(HERE), arch, *kernels]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"wrong": [{"case": "cubin", "why": (done.stdout + done.stderr)[-1500:]}]}
    return {"launches": json.loads(done.stdout)}


def main(arch: str, kernels: list[str]) -> int:
    """Launch one small run of each kernel on a driver that writes down what it gets; print a row for each plan."""
    from fake_driver import FakeDriver

    rows: list[dict[str, Any]] = []

    def launched(plan: Plan) -> None:
        cubin = read_cubin(*ahead.build(plan, arch))
        sizes = tuple(ahead.sizes_of(cubin.fields()["parameters"]))
        library = FakeDriver(sizes={cubin.image: sizes}, capability=capability(cubin))
        own = Launcher(CompiledKernels(arch, (cubin,)), Driver(0, library), stream=int)
        own(plan)
        (launch,) = library.launches
        assert list(map(len, launch.parameters)) == list(sizes)
        assert own.compiled_here == {}
        rows.append({"kernel": launch.kernel, "grid": launch.grid, "bytes": len(cubin.image)})

    for run in {run.kernel: run for run in full(arch) if run.kernel in kernels}.values():
        with launched_by(launched):  # some operands are made by kernels
            arguments, options = operands(small(run, True), arch, "cpu")
            RECORDS[run.kernel].launch(*arguments, **options, arch=arch)
    print(json.dumps(rows))
    return 0


def capability(cubin: Cubin) -> tuple[int, int]:
    """The GPU that machine code is for."""
    number = int(cubin.arch.removeprefix("sm_"))
    return number // 10, number % 10


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:] or list(RECORDS)))
