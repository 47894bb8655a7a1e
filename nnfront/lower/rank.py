# SPDX-License-Identifier: Apache-2.0
"""The program of one rank of several: the weight that says which rank a process is becomes a number, so parts of weights are known before one is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nnfront.ir import Constant, TensorType
from nnfront.lower.instructions import Run, Slot
from nnfront.lower.program import MethodProgram, Program
from nnfront.ops.collective import RANK, Blocks, ranges, shard


class Part(NamedTuple):
    """What a rank holds of a weight, as `shard` says it."""

    axis: int
    rank: int
    world: int
    blocks: Blocks | None

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Where its pieces begin and end on an axis of this size."""
        return ranges(size, self.rank, self.world, self.blocks)


def part_taken(run: Run, slots: Sequence[Slot]) -> Part | None:
    """The part of its first operand that an instruction is, if it is one, and of a rank that is known."""
    if run.op != shard.name or not isinstance(rank := slots[run.inputs[1]].value, Constant):
        return None
    attrs = shard.full_attrs(run.attrs)
    return Part(attrs["axis"], int.from_bytes(rank.data, "little"), attrs["world"], attrs["blocks"])


def of_rank(program: Program, rank: int) -> Program:
    """Return the program of a rank."""
    return replace(
        program,
        methods={name: _of_rank(method, rank) for name, method in program.methods.items()},
        transforms={name: _of_rank(transform, rank) for name, transform in program.transforms.items()},
    )


def _of_rank(method: MethodProgram, rank: int) -> MethodProgram:
    slots = {w.structure.slot for w in method.weights if w.name == RANK}
    if not slots:
        return method
    type = TensorType((), "int64")
    value = Constant(type, rank.to_bytes(8, "little"))
    return replace(
        method,
        weights=tuple(w for w in method.weights if w.name != RANK),
        slots=tuple(
            replace(slot, kind="constant", value=value) if i in slots else slot
            for i, slot in enumerate(method.slots)
        ),
    )


def world_of(program: Program) -> int:
    """Among how many ranks a program runs, by its collectives and the parts of weights that it takes; 1 if it has none."""
    methods = (*program.methods.values(), *program.transforms.values())
    runs = (run for method in methods for run in method.body.walk() if isinstance(run, Run))
    return max((run.attrs["world"] for run in runs if "world" in run.attrs), default=1)
