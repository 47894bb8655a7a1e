# SPDX-License-Identifier: Apache-2.0
"""Which instructions of a method make what the caller gets."""

from __future__ import annotations

from nnfront.lower.instructions import Block, Instruction, Run


def first_result(body: Block) -> int:
    """Return the index of the first of the instructions at the end that do nothing but compute results.

    They run outside of torch's inference mode, so that a caller may write to what they make. Other results are copied.
    """
    count, results = len(body.instructions), set(body.results)
    while count and _gives(body.instructions[count - 1], results):
        count -= 1
    return count


def _gives(instruction: Instruction, results: set[int]) -> bool:
    return (
        isinstance(instruction, Run) and instruction.is_pure and not results.isdisjoint(instruction.outputs)
    )
