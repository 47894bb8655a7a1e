# SPDX-License-Identifier: Apache-2.0
"""`plan_memory`: how much memory a call of a method takes, when, and where each value could lie in one arena.

    peak     the most bytes that are alive at a step, workspace included: no plan does with less
    arena    the bytes of the arena in which the plan places all values and workspaces; values that are never alive together share bytes

The plan is data: it prints, and `to_dict` and `from_dict` take it through JSON. The CPU's kernels allocate for themselves, in the order
of the plan, so their peak is the plan's; static buffers are placed by its offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from nnfront.lower.program import MethodProgram
from nnfront.memory.allocations import Footprints, MemoryPolicy
from nnfront.memory.concrete_sizes import Extents
from nnfront.memory.liveness import Lifetimes, Piece, Step

Kind: TypeAlias = Literal["value", "workspace", "copy"]

# What a CUDA kernel may assume about the address of a buffer; torch's allocator on a CPU aligns to 64.
ALIGNMENT = 256


@dataclass(frozen=True)
class Buffer:
    """A place in the arena. `slots` are the values in it: one, and its views; `ranges` the steps, first and last, when it is in use.

    `kind` is "value", "workspace" of a kernel, or "copy" of a result.
    """

    name: str
    module: str
    kind: Kind
    bytes: int
    offset: int
    ranges: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]

    def is_alive(self, step: int) -> bool:
        """Whether it is in use at a step."""
        return any(first <= step <= last for first, last in self.ranges)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a method for given sizes. `is_bound`: dims that were not given count as the largest they can be.

    `kept` are bytes of values that are computed at load and stay: no weights, and no part of the arena.
    """

    method: str
    sizes: Mapping[str, int]
    is_bound: bool
    alignment: int
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

    @cached_property
    def arena(self) -> int:
        """Bytes of the arena."""
        return max((b.offset + _aligned(b.bytes, self.alignment) for b in self.buffers), default=0)

    @property
    def at_peak(self) -> tuple[Buffer, ...]:
        """What is alive at the peak, the largest first."""
        here = [b for b in self.buffers if b.bytes and b.is_alive(self.peak_step)]
        return tuple(sorted(here, key=lambda b: -b.bytes))

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryPlan:
        """Return the plan that `to_dict` took apart."""
        buffers = [
            Buffer(**{**b, "ranges": tuple(map(tuple, b["ranges"])), "slots": tuple(b["slots"])})
            for b in data["buffers"]
        ]
        steps = tuple(Step(**step) for step in data["steps"])
        return cls(**{**data, "sizes": dict(data["sizes"]), "buffers": tuple(buffers), "steps": steps})

    def __str__(self) -> str:
        rows = [
            f"{self.method}: peak {self.peak:,} bytes at step {self.peak_step}, arena {self.arena:,}",
            *(
                f"  {b.offset:>12,} {b.bytes:>12,}  {', '.join(f'{first}-{last}' for first, last in b.ranges)}  {b.name}"
                for b in self.buffers
            ),
        ]
        return "\n".join(rows)


def plan_memory(
    method: MethodProgram,
    sizes: Mapping[str, int],
    policy: MemoryPolicy,
    *,
    alignment: int = ALIGNMENT,
) -> MemoryPlan:
    """Plan the memory of one method. `sizes` are numbers for dims by name; others count as the largest they can be.

    `policy` is the back end's, `alignment` what every offset in the arena is a multiple of, in bytes. Raises LowerError for a dim that is not given and has no greatest value, and for a number that a dim cannot be.
    """
    extents = Extents(method, sizes)
    found = Lifetimes(method, extents, Footprints(policy))
    offsets = place(found.pieces, len(found.steps), alignment)
    buffers = tuple(
        Buffer(p.name, p.module, p.kind, p.bytes, offset, tuple(p.ranges), tuple(p.all_slots))
        for p, offset in zip(found.pieces, offsets, strict=True)
    )
    return MemoryPlan(
        method.name, extents.sizes, extents.is_bound, alignment, found.kept, buffers, tuple(found.steps)
    )


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _alive(buffers: Sequence[Buffer], steps: int) -> tuple[int, ...]:
    change = [0] * (steps + 1)
    for buffer in buffers:
        for first, last in buffer.ranges:
            change[first] += buffer.bytes
            change[last + 1] -= buffer.bytes
    return tuple(accumulate(change[:steps]))


def place(pieces: Sequence[Piece], steps: int, alignment: int) -> list[int]:
    """Return an offset for each piece: the largest first, each in the smallest gap among those alive with it that it fits."""
    offsets = [0] * len(pieces)
    here: list[list[tuple[int, int]]] = [[] for _ in range(steps)]  # the places taken at each step
    for i in sorted(range(len(pieces)), key=lambda i: (-pieces[i].bytes, pieces[i].ranges)):
        piece = pieces[i]
        alive = [step for first, last in piece.ranges for step in range(first, last + 1)]
        taken = sorted({place for step in alive for place in here[step]})
        size = _aligned(piece.bytes, alignment)
        offsets[i] = _best_gap(taken, size)
        if size:
            for step in alive:
                here[step].append((offsets[i], offsets[i] + size))
    return offsets


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Return where the smallest gap between places begins that has room, else the end. The places are sorted, and may overlap."""
    best = min(((gap, start) for gap, start in _gaps(taken) if gap >= size), default=None)
    return max((end for _, end in taken), default=0) if best is None else best[1]


def _gaps(taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield size and beginning of each gap."""
    end = 0
    for start, stop in taken:
        if start > end:
            yield start - end, end
        end = max(end, stop)
