# SPDX-License-Identifier: Apache-2.0
"""`plan_memory`: how much memory a call of a method takes, and when. Kernels allocate for themselves, in the order of the plan.

Kernels in C that follow one another are one call, which takes memory for its results when it begins, and holds its operands, of half a MiB at most,
until it ends: so the peak may be higher by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from nnfront.lower.program import MethodProgram
from nnfront.memory.allocations import Footprints, MemoryPolicy
from nnfront.memory.concrete_sizes import Extents
from nnfront.memory.liveness import Lifetimes, Step

Kind: TypeAlias = Literal["value", "workspace", "copy"]


@dataclass(frozen=True)
class Buffer:
    """A piece of memory. `slots` are the values in it: one, and its views; `ranges` the steps, first and last, when it is in use.

    `kind` is "value", "workspace" of a kernel, or "copy" of a result.
    """

    name: str
    module: str
    kind: Kind
    bytes: int
    ranges: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]

    def is_alive(self, step: int) -> bool:
        """Whether it is in use at a step."""
        return any(first <= step <= last for first, last in self.ranges)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a method for given sizes. `is_bound`: dims that were not given count as the largest they can be.

    `kept` are bytes of values that are computed at load and stay: no weights, and in no buffer.
    """

    method: str
    sizes: Mapping[str, int]
    is_bound: bool
    kept: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes that are alive at each step, workspace included."""
        return _alive(self.buffers, len(self.steps))

    @cached_property
    def peak(self) -> int:
        """The most bytes that are alive at a step."""
        return max(self.live, default=0)

    @cached_property
    def peak_step(self) -> int:
        """The first step at which the most bytes are alive."""
        return self.live.index(self.peak) if self.live else 0

    @property
    def at_peak(self) -> tuple[Buffer, ...]:
        """What is alive at the peak, the largest first."""
        here = [b for b in self.buffers if b.bytes and b.is_alive(self.peak_step)]
        return tuple(sorted(here, key=lambda b: -b.bytes))

    def __str__(self) -> str:
        rows = [
            f"{self.method}: peak {self.peak:,} bytes at step {self.peak_step}",
            *(
                f"  {b.bytes:>12,}  {', '.join(f'{first}-{last}' for first, last in b.ranges)}  {b.name}"
                for b in self.buffers
            ),
        ]
        return "\n".join(rows)


def plan_memory(method: MethodProgram, sizes: Mapping[str, int], policy: MemoryPolicy) -> MemoryPlan:
    """Plan the memory of one method. `sizes` are numbers for dims by name; others count as the largest they can be.

    `policy` is the back end's. Raises LowerError for a dim that is not given and has no greatest value, and for a number that a dim cannot be.
    """
    extents = Extents(method, sizes)
    found = Lifetimes(method, extents, Footprints(policy))
    buffers = tuple(
        Buffer(p.name, p.module, p.kind, p.bytes, tuple(p.ranges), tuple(p.all_slots)) for p in found.pieces
    )
    return MemoryPlan(method.name, extents.sizes, extents.is_bound, found.kept, buffers, tuple(found.steps))


def _alive(buffers: Sequence[Buffer], steps: int) -> tuple[int, ...]:
    change = [0] * (steps + 1)
    for buffer in buffers:
        for first, last in buffer.ranges:
            change[first] += buffer.bytes
            change[last + 1] -= buffer.bytes
    return tuple(accumulate(change[:steps]))
