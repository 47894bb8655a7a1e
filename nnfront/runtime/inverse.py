# SPDX-License-Identifier: Apache-2.0
"""Undo a weight transform: from its results back to the checkpoint's own tensors, bit for bit, where the formulas allow it.

concat, stack                  taken apart          split, chunk      put together, if every part is there
permute_dims, flip             turned back          astype            back, if the result's dtype holds every value
reshape, squeeze, unsqueeze    the operand's shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nnfront import dtypes
from nnfront.dims import Symbol, evaluate, solve
from nnfront.errors import LoadError
from nnfront.lower import MethodProgram, Run, Slot, TensorType
from nnfront.runtime.formula import formulas
from nnfront.runtime.transform_steps import results_of

Dims: TypeAlias = Mapping[Symbol, int]
# From the instruction, the types of its operands and its results to its operands; None if it cannot be undone.
Undo: TypeAlias = Callable[
    [Run, Sequence[TensorType], Sequence[torch.Tensor], Dims], Sequence[torch.Tensor] | None
]


def invert_transform(program: MethodProgram, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that a transform's results were made of, by their names; views of the results where possible.

    Raises LoadError that lists the weights that the results do not give back.
    """
    slots = program.slots
    values = {
        slot: results[name]
        for name, slot in results_of(program).items()
        if isinstance(results[name], torch.Tensor)
    }
    dims = _dims(slots, values)
    for instruction in reversed(program.body.instructions):
        if not isinstance(instruction, Run) or not all(slot in values for slot in instruction.outputs):
            continue
        undo = _UNDO.get(instruction.op)
        types = [type for i in instruction.inputs if isinstance(type := slots[i].type, TensorType)]
        if undo is None or len(types) < len(instruction.inputs):
            continue
        operands = undo(instruction, types, [values[slot] for slot in instruction.outputs], dims)
        for slot, value in zip(instruction.inputs, operands or (), strict=False):
            values.setdefault(slot, value)
    found = {w.name: values[w.structure.slot] for w in program.weights if w.structure.slot in values}
    lost = [w.name for w in program.weights if w.name not in found]
    if lost:
        texts = {
            source: f"{name} = {text}" for name, _, text, sources in formulas(program) for source in sources
        }
        raise LoadError(
            "the results do not give back every weight of the checkpoint",
            details=[
                f"{name!r} is part of {texts[name]}, which cannot be undone"
                if name in texts
                else f"{name!r} is in no result"
                for name in lost
            ],
        )
    return found


def _dims(slots: Sequence[Slot], values: Mapping[int, torch.Tensor]) -> Dims:
    """The dims of the weights, from the shapes of the results."""
    equations = []
    for slot, value in values.items():
        type = slots[slot].type
        if isinstance(type, TensorType):
            equations += list(zip(type.shape, value.shape, strict=True))
    return solve(list(dict.fromkeys(equations)))


def _shape(type: TensorType, dims: Dims) -> list[int]:
    return [evaluate(size, dims) for size in type.shape]


def _concat(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor] | None:
    if len({type.dtype for type in types}) > 1:
        return None
    axis = run.attrs.get("dim", 0)
    return torch.split(results[0], [evaluate(type.shape[axis], dims) for type in types], axis)


def _stack(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor] | None:
    return (
        torch.unbind(results[0], run.attrs.get("dim", 0))
        if len({type.dtype for type in types}) == 1
        else None
    )


def _parts(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor]:
    return [torch.cat(list(results), run.attrs.get("axis", run.attrs.get("dim", 0)))]


def _permute(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor]:
    axes = run.attrs["axes"]
    return [results[0].permute([axes.index(i) for i in range(len(axes))])]


def _flip(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor]:
    return [torch.flip(results[0], run.attrs["axis"])]


def _reshape(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor]:
    return [results[0].reshape(_shape(types[0], dims))]


def _astype(
    run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims
) -> Sequence[torch.Tensor] | None:
    narrow, wide = types[0].dtype, str(results[0].dtype).removeprefix("torch.")
    return [results[0].to(getattr(torch, narrow))] if _holds(wide, narrow) else None


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of one dtype is a value of the other."""
    if dtypes.category(wide) != dtypes.category(narrow):
        return False
    if 1 in (dtypes.size_bytes(wide), dtypes.size_bytes(narrow)) and dtypes.is_float(wide):
        return wide == narrow
    return dtypes.promote(wide, narrow) == wide


def _same(run: Run, types: Sequence[TensorType], results: Sequence[torch.Tensor], dims: Dims) -> Any:
    return results


_UNDO: dict[str, Undo] = {
    "astype": _astype,
    "chunk": _parts,
    "concat": _concat,
    "flip": _flip,
    "permute_dims": _permute,
    "reshape": _reshape,
    "split": _parts,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_lift_params": _same,
    "unsqueeze": _reshape,
}
