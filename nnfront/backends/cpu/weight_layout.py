# SPDX-License-Identifier: Apache-2.0
"""How weights lie in memory: a transpose, or a part of each row, is copied row by row when it is loaded, if a kernel reads it so (`Kernel.in_rows`).

Those in C read a product's weight as [out, in], row after row. One that a checkpoint has as [in, out], or between others as the matrices of latent attention,
is a view otherwise, and every product with it goes another way. What methods do nothing with but turn it back stays a view: the weight in its own order is what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from nnfront.backends.cpu.tape_builder import attribute
from nnfront.backends.kernel import NOTHING, Kernel
from nnfront.lower import ONE_PIECE, Instruction, MethodProgram, Program, Run
from nnfront.lower.reference import reference


def _one_piece(run: Run) -> Any:
    view = reference(run)

    def one_piece(x: torch.Tensor) -> Any:
        made = view(x)
        return (
            made.contiguous() if isinstance(made, torch.Tensor) else tuple(part.contiguous() for part in made)
        )

    return one_piece


KERNELS = (Kernel(ONE_PIECE, "", _one_piece, workspace=NOTHING),)


def laid_out(program: Program, kernels: Collection[str]) -> Program:
    """Return the program whose transforms copy the transposes and parts of weights that kernels of these names read."""
    transforms = {
        name: _copying(
            transform,
            {w for m in program.methods.values() if m.transform == name for w in _read(m, kernels)},
        )
        for name, transform in program.transforms.items()
    }
    return replace(program, transforms=MappingProxyType(transforms))


def _read(method: MethodProgram, kernels: Collection[str]) -> Iterator[str]:
    """The transformed weights that kernels of these names read."""
    read = {
        slot
        for block in (method.setup, method.body)
        for instruction in block.walk()
        if isinstance(instruction, Run) and instruction.kernel in kernels
        for slot in instruction.reads()
    }
    yield from (
        w.name
        for w in method.weights
        if w.role == "transformed" and not read.isdisjoint(w.structure.leaves())
    )


def _copying(transform: MethodProgram, read: set[str]) -> MethodProgram:
    wanted = {transform.results[name] for name in read}

    def is_in_pieces(run: Run) -> bool:
        return _is_transpose(run) or (run.op == "split" and attribute(run, "axis") > 0)

    instructions = tuple(
        replace(i, kernel=ONE_PIECE, why="products read it row by row")
        if isinstance(i, Run) and is_in_pieces(i) and not wanted.isdisjoint(i.outputs)
        else i
        for i in transform.body.instructions
    )
    return replace(transform, body=replace(transform.body, instructions=instructions))


def _is_transpose(instruction: Instruction) -> bool:
    """Of a matrix, or of each of several."""
    if not isinstance(instruction, Run) or instruction.op != "permute_dims":
        return False
    axes = tuple(instruction.attrs["axes"])
    rank = len(axes)
    return rank > 1 and axes == (*range(rank - 2), rank - 1, rank - 2)
