# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call.

The first kernel of an op that accepts a call is chosen; without one the op's torch reference runs. What becomes dead by rewriting is
dropped afterwards. Calls of fusions are chosen for in the same way, by the fusion's name; one that no kernel accepts is replaced by what
it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower.instructions import Block, Branch, Instruction, Run
from nnfront.lower.slots import Frame


def select(block: Block, frame: Frame, kernels: Sequence[Kernel], target: str = "cpu") -> Block:
    """Return the block with the kernels that are chosen, asked in order."""
    by_op: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_op.setdefault(kernel.op, []).append(kernel)
    return _select(block, by_op, Context(frame, {}, target))


def _select(block: Block, kernels: Mapping[str, Sequence[Kernel]], context: Context) -> Block:
    chosen: list[Instruction] = []
    for instruction in block.instructions:
        if isinstance(instruction, Branch):
            instruction = instruction.mapped(lambda inner: _select(inner, kernels, context.inside()))
        elif isinstance(instruction, Run):
            run = _choose(instruction, kernels.get(instruction.op, ()), context)
            if run.body is not None and not run.kernel:
                chosen += _instead(run, kernels, context)
                continue
            for made in (*context.emitted, run):
                context.makers.update((slot, made) for slot in made.outputs)
            chosen += context.emitted
            context.emitted.clear()
            instruction = run
        chosen.append(instruction)
    return replace(block, instructions=tuple(chosen))


def _instead(run: Run, kernels: Mapping[str, Sequence[Kernel]], context: Context) -> Iterator[Instruction]:
    """What a call stands for that no kernel takes; its last instruction tells why."""
    assert run.body is not None
    *first, last = _select(run.body, kernels, context).instructions
    yield from first
    yield replace(last, refused=(*run.refused, *last.refused)) if isinstance(last, Run) else last


def _choose(run: Run, kernels: Sequence[Kernel], context: Context) -> Run:
    refused: list[str] = []
    shared = dict(context.shared)
    for kernel in kernels:
        seen = kernel.rewrite(run, context)
        reason = seen if isinstance(seen, str) else kernel.accepts(seen, context)
        if isinstance(seen, Run) and reason == ACCEPTED:
            return replace(seen, kernel=kernel.name, why=kernel.why, refused=tuple(refused))
        refused.append(f"{kernel.name}: {reason}")
        context.emitted.clear()
        context.shared = dict(shared)
    return replace(run, refused=tuple(refused)) if refused else run
