# SPDX-License-Identifier: Apache-2.0
"""Edge cases under compute-sanitizer: memory, races, barriers. First a kernel that writes where it must not, which the tool has to find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from kernel_memory import watched

TOOLS = {"memcheck": 3, "racecheck": 12, "synccheck": 12}  # each looks at every so manieth case
SECONDS = 80.0  # of a tool
FOUND = 9  # its exit code then, if the program's own is 0
OVER = (124, 137)  # the exit codes of `timeout`
INVALID = "Invalid __global__ write"  # what it says of a fault, whatever the program made of that


@triton.jit
def outside_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


def fault(dry: bool) -> None:
    """Write 4,096 numbers behind the 4 of a tensor; without a GPU the check of the interpreter's accesses stands in for the tool."""
    x = torch.zeros(4, device="cpu" if dry else "cuda")
    try:
        with watched({"x_ptr": x}):
            outside_kernel[(1,)](x, BLOCK=4096)
    except AssertionError:
        raise SystemExit(INVALID) from None
    if not dry:
        torch.cuda.synchronize()


def edges(every: int, names: list[str], dry: bool) -> None:
    """Run some of the edge cases; without a GPU a few of them, in the interpreter. Results are checked elsewhere."""
    from cases import edges as all_edges
    from compiled import brought, launcher
    from nnfront_kernels.common import arch_of
    from right import edge

    from nnfront.backends.cuda.ahead.launcher import launching

    arch, device = ("sm_90", "cpu") if dry else (arch_of(torch.device("cuda", 0)), "cuda")
    found = [(name, case) for name, case in all_edges(names) if not dry or case.dtype == "float16"]
    with launching(launcher(None if dry else brought(arch))):
        for name, case in found[:: max(len(found) // 3, 1) if dry else every]:
            print(name, case, edge(name, case, arch, device))


def checked(tool: str, code: str, must_find: bool, options: Any) -> dict[str, Any] | str | None:
    """Run Python under a tool: what it says if that is not what is expected."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not (options.dry or program):
        return {"skipped": [f"compute-sanitizer {tool}: not installed"]}
    seconds = min(SECONDS, max(options.deadline - time.monotonic(), 1.0))
    command = [str(program), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-c", code]
    # The program is the tool's child: `timeout` ends both.
    command = command[-3:] if options.dry else ["timeout", "-k", "5", f"{seconds:.0f}", *command]
    # Torch's own allocator gives out parts of large pieces, within which nothing is outside.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    if done.returncode in OVER:
        return {"skipped": [f"compute-sanitizer {tool}: not done after {seconds:.0f} s"]}
    if "Device not supported" in said:
        return {"skipped": [f"compute-sanitizer {tool}: it does not support this device"]}
    if must_find:
        return None if INVALID in said else f"it did not find a write behind a tensor: {said[-800:]}"
    return said[-1500:] if done.returncode else None


def cases(options: Any) -> Iterator[Any]:
    from part import Case

    code = f"import sanitizer; sanitizer.fault({options.dry})"
    yield Case("sanitizer finds a fault", partial(checked, "memcheck", code, True, options))
    for tool, every in TOOLS.items():
        code = f"import sanitizer; sanitizer.edges({every}, {options.only!r}, {options.dry})"
        yield Case(f"sanitizer {tool}", partial(checked, tool, code, False, options))
