# SPDX-License-Identifier: Apache-2.0
"""A call for which there was too little memory, as an error that says where, how much, and what would have fitted by the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nnfront.backends.table import memory_policy
from nnfront.errors import LowerError, RunError
from nnfront.ir.summary import bytes_text
from nnfront.lower import MethodProgram
from nnfront.memory.free_memory import asked, free_memory_on, most
from nnfront.memory.plan import MemoryPlan, plan_memory


def call_error(
    program: MethodProgram, sizes: Mapping[str, int], error: BaseException, device: torch.device
) -> RunError:
    """Say of a call whose dims are `sizes` what an allocation that failed was for. What the call held must be free again by now."""
    room, wanted = free_memory_on(device), asked(error)
    plan = _plan(program, sizes)
    details = [f"asked for: {bytes_text(wanted)}"] if wanted is not None else []
    given = ", ".join(f"{name}={number}" for name, number in sizes.items())
    if plan is not None:
        details.append(f"the call takes up to {bytes_text(plan.peak)}{f' with {given}' if given else ''}")
    if room is not None:
        details.append(f"without it {room}")
        if plan is not None:
            fits = list(_what_fits(program, sizes, room.free))
            details += [f"fits: {'; '.join(fits)}"] if fits else []
    return RunError(
        f"{program.name}: out of memory",
        details=details,
        where=next(iter(getattr(error, "__notes__", ())), ""),
        help="give less at a time, or make room: a smaller cache, weights in fewer bits",
    )


def _plan(program: MethodProgram, sizes: Mapping[str, int]) -> MemoryPlan | None:
    try:
        return plan_memory(program, sizes, memory_policy(program.target))
    except LowerError:  # a dim that the method defines while it runs has no greatest value
        return None


def _what_fits(program: MethodProgram, sizes: Mapping[str, int], free: int) -> Iterator[str]:
    """The most of each dim of the call's tensors that its plan has room for, if that is less than there was."""
    for binding in program.dims:
        if not isinstance(binding.place.axis, int) or binding.place.is_weight:
            continue
        name, (low, _, step) = binding.symbol.name, binding.symbol.facts

        def fits(count: int, name: str = name, step: int = step) -> bool:
            plan = _plan(program, {**sizes, name: count * step})
            return plan is not None and plan.peak <= free

        found = step * most(sizes[name] // step, fits)
        if low <= found < sizes[name] and found:
            yield f"{name} up to {found:,}"
