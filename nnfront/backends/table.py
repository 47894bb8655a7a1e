# SPDX-License-Identifier: Apache-2.0
"""The kernels of each target: those of its back end, and those that users have registered, which are asked first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnfront.backends.kernel import Kernel
from nnfront.backends.registry import OWN, backend_of
from nnfront.ir import OPS
from nnfront.lower import Program, Run, is_foreign, name_of, op_of, reference
from nnfront.lower.explain import explain
from nnfront.memory.allocations import MemoryPolicy

_REGISTERED: dict[str, tuple[Kernel, ...]] = {}


def kernels_of(target: str) -> tuple[Kernel, ...]:
    """Return the kernels of a target in the order in which they are asked: the one registered last, then those before it, then its back end's."""
    backend = backend_of(target)
    return (*_REGISTERED.get(backend.name, ()), *backend.kernels)


def resolver(target: str) -> Callable[[Run], Callable[..., Any]]:
    """Return what gives the function that runs an instruction of a target's program. A kernel that is missing is the reference of its op."""
    bind = {kernel.name: kernel.bind for kernel in kernels_of(target)}
    return lambda run: bind.get(run.kernel, reference)(run)


def memory_policy(target: str) -> MemoryPolicy:
    """Return what the kernels of a target allocate while they run, and how its caches keep windows."""
    backend = backend_of(target)
    kernels = [k for k in reversed(kernels_of(target)) if k.workspace is not None or k.name not in OPS]
    workspaces = {k.name: k.workspace or backend.metered(k, target) for k in kernels}
    return MemoryPolicy(workspaces, backend.ring_windows)


def explain_kernels(program: Program, sizes: Mapping[str, int], method: str | None = None) -> str:
    """Return the table of what runs, of one method if it is given, and what the back end has to say of the program."""
    notes = backend_of(program.target).notes(program) if method is None else ()
    return explain(program, sizes, method) + "".join(f"{line}\n" for line in notes)


def others(target: str, run: Run) -> str:
    """Name the function that runs an instruction of a target's program if it is not nnfront's own, "" if it is."""
    backend = backend_of(target)
    if backend.name in OWN and any(kernel.name == run.kernel for kernel in backend.kernels):
        return ""
    if any(kernel.name == run.kernel for kernel in kernels_of(target)):
        return f"the kernel {run.kernel!r} of {run.op!r}"
    return name_of(run) if is_foreign(op_of(run)) else ""


def add(target: str, kernel: Kernel) -> None:
    """Put a kernel in front of all others of a target."""
    name = backend_of(target).name
    _REGISTERED[name] = (kernel, *_REGISTERED.get(name, ()))


def remove(target: str, name: str) -> bool:
    """Take back a kernel that was added; return whether there was one."""
    key = backend_of(target).name
    before = _REGISTERED.get(key, ())
    _REGISTERED[key] = tuple(kernel for kernel in before if kernel.name != name)
    return len(_REGISTERED[key]) < len(before)
