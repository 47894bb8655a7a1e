# SPDX-License-Identifier: Apache-2.0
"""What a caller gets: tensors that are its own, in the structure that the method returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.lower import Block, MethodProgram, Structure
from nnfront.runtime.execute import Frame


def split_results(body: Block) -> tuple[Block, Block]:
    """Split off the instructions at the end whose results the caller gets.

    Nobody may write to a tensor that was made in inference mode, and a caller may want to. So these run outside of it.
    """
    first = body.first_result
    return Block(body.instructions[:first], (), body.sizes), Block(body.instructions[first:])


def result_maker(program: MethodProgram, template: Frame) -> Callable[[Frame], Any]:
    """Compile what puts a method's result together, from tensors that the caller may write to.

    What was made in inference mode, and what shares memory with something that the session holds, is copied.
    """
    resident = {value.untyped_storage().data_ptr() for value in template if isinstance(value, torch.Tensor)}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_shared = value.is_inference() or value.untyped_storage().data_ptr() in resident
        return value.clone() if is_shared else value

    names: list[str] = []  # by their numbers: the source holds nothing that the program says

    def source(structure: Structure) -> str:
        if structure.is_leaf:
            return f"own(frame[{structure.slot}])"
        parts = [source(part) for part in structure.fields]
        if structure.names is not None:
            first = len(names)
            names.extend(structure.names)
            return "{" + ", ".join(f"names[{first + i}]: {part}" for i, part in enumerate(parts)) + "}"
        # None, as a method that returns nothing.
        return f"({''.join(f'{part}, ' for part in parts)})" if parts else "None"

    scope: dict[str, Any] = {"own": own, "names": names}
    exec(f"def result(frame):\n return {source(program.result)}", scope)
    made: Callable[[Frame], Any] = scope["result"]
    return made
