# SPDX-License-Identifier: Apache-2.0
"""Undo a weight transform: from its results back to the checkpoint's own tensors, bit for bit, where the formulas allow it.

concat, stack                  taken apart          split, chunk      put together, if every part is there
permute_dims, flip             turned back          astype            back, if the result's dtype holds every value
reshape, squeeze, unsqueeze    the operand's shape
shard                          put together of the parts of all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nnfront import dtypes
from nnfront.dims import Symbol, evaluate, solve
from nnfront.errors import LoadError
from nnfront.ir import OPS
from nnfront.lower import MethodProgram, Part, Run, Slot, TensorType
from nnfront.transform.formula import formulas
from nnfront.transform.run import shape_of

Dims: TypeAlias = Mapping[Symbol, int]
Tensors: TypeAlias = Sequence[torch.Tensor]
Types: TypeAlias = Sequence[TensorType]
# From the instruction, the types of its operands and its results to its operands; None if it cannot be undone.
Undo: TypeAlias = Callable[[Run, Types, Tensors, Dims], Tensors | None]


class Inverse:
    """A transform's results seen as the weights that they were made of. Nothing is computed before it is asked for."""

    def __init__(self, program: MethodProgram, results: Mapping[str, Any]) -> None:
        """`results` are the transform's by name. Tensors without data (on the meta device) will do to learn what is lost."""
        self.program = program
        self._values = {
            slot: results[name]
            for name, slot in program.results.items()
            if isinstance(results[name], torch.Tensor)
        }
        self._held = {value.untyped_storage().data_ptr() for value in self._values.values()}
        self._slots = {w.name: w.structure.slot for w in program.weights if w.structure.is_leaf}
        self._readers: dict[int, list[Run]] = {}
        for instruction in program.body.instructions:
            for slot in dict.fromkeys(instruction.reads()):
                if isinstance(instruction, Run):
                    self._readers.setdefault(slot, []).append(instruction)
        self._lost: set[int] = set()
        # Those of one instruction: others are made again when they are asked for.
        self._copies: dict[int, torch.Tensor] = {}
        self.dims: Dims = _dims(program.slots, self._values)

    def has(self, name: str) -> bool:
        """Whether the transform reads a weight of this name."""
        return name in self._slots

    def weight(self, name: str) -> torch.Tensor | None:
        """Return a weight, a view of the results where possible; None if they do not give it back."""
        return self._value(self._slots[name])

    def why_lost(self, name: str) -> str:
        """Say in words why a weight cannot be had back."""
        for result, _, text, sources in formulas(self.program):
            if name in sources:
                return f"{name!r} is part of {result} = {text}, which cannot be undone: {self._obstacle(self._slots[name])}"
        return f"{name!r} is in no result"

    def _value(self, slot: int) -> torch.Tensor | None:
        if slot in self._values or slot in self._copies:
            return self._values[slot] if slot in self._values else self._copies[slot]
        for run in self._readers.get(slot, ()) if slot not in self._lost else ():
            outputs = [self._value(i) for i in run.outputs]
            known = [value for value in outputs if value is not None]
            operands = self._undone(run, known) if len(known) == len(outputs) else None
            if operands is not None:
                found = dict(zip(run.inputs, operands, strict=False))  # of a part, not the rank
                if all(value.untyped_storage().data_ptr() in self._held for value in operands):
                    self._values |= {i: value for i, value in found.items() if i not in self._values}
                else:
                    self._copies = found
                return found[slot]
        self._lost.add(slot)
        return None

    def _undone(self, run: Run, results: Tensors) -> Tensors | None:
        undo, types = _UNDO.get(run.op), self._types(run)
        return undo(run, types, results, self.dims) if undo and len(types) == len(run.inputs) else None

    def _types(self, run: Run) -> list[TensorType]:
        return [type for i in run.inputs if isinstance(type := self.program.slots[i].type, TensorType)]

    def _obstacle(self, slot: int) -> str:
        """The first thing on the way from a value to the results that cannot be undone."""
        for run in self._readers.get(slot, ()):
            if run.op not in _UNDO:
                return f"{run.op} has no inverse"
            further = [self._obstacle(i) for i in run.outputs if self._value(i) is None]
            if further:
                return further[0]
            made = self.program.slots[run.outputs[0]].type
            from_ = " and ".join(dict.fromkeys(type.dtype for type in self._types(run)))
            return (
                f"{run.op} makes {made.dtype} of {from_}"
                if isinstance(made, TensorType)
                else f"{run.op} has no inverse"
            )
        return "a part of it is in no result"


def invert_transform(program: MethodProgram, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that a transform's results were made of, by their names; views of the results where possible.

    Raises LoadError that lists the weights that the results do not give back.
    """
    inverse = Inverse(program, results)
    found = {w.name: inverse.weight(w.name) for w in program.weights}
    lost = [name for name, value in found.items() if value is None]
    if lost:
        raise LoadError(
            "the results do not give back every weight of the checkpoint",
            details=[inverse.why_lost(name) for name in lost],
        )
    return {name: value for name, value in found.items() if value is not None}


def _dims(slots: Sequence[Slot], values: Mapping[int, torch.Tensor]) -> Dims:
    """The dims of the weights, from the shapes of the results."""
    equations = []
    for slot, value in values.items():
        type = slots[slot].type
        if isinstance(type, TensorType):
            equations += list(zip(type.shape, value.shape, strict=True))
    return solve(list(dict.fromkeys(equations)))


def _concat(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors | None:
    if len({type.dtype for type in types}) > 1:
        return None
    axis = run.attrs.get("dim", 0)
    return torch.split(results[0], [evaluate(type.shape[axis], dims) for type in types], axis)


def _stack(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors | None:
    is_one = len({type.dtype for type in types}) == 1
    return torch.unbind(results[0], run.attrs.get("dim", 0)) if is_one else None


def _parts(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    return [torch.cat(list(results), run.attrs.get("axis", run.attrs.get("dim", 0)))]


def _permute(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    axes = run.attrs["axes"]
    return [results[0].permute([axes.index(i) for i in range(len(axes))])]


def _flip(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    return [torch.flip(results[0], run.attrs["axis"])]


def _reshape(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    return [results[0].reshape(shape_of(types[0], dims))]


def _astype(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors | None:
    narrow, wide = types[0].dtype, str(results[0].dtype).removeprefix("torch.")
    return [results[0].to(getattr(torch, narrow))] if holds(wide, narrow) else None


def holds(wide: str, narrow: str) -> bool:
    """Whether every value of one dtype is a value of the other."""
    if dtypes.category(wide) != dtypes.category(narrow):
        return False
    if 1 in (dtypes.size_bytes(wide), dtypes.size_bytes(narrow)) and dtypes.is_float(wide):
        return wide == narrow
    return dtypes.promote(wide, narrow) == wide


def _shard(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    """A weight of which each rank has a part. All ranks call it; on the meta device, where it is only asked what is lost, one alone may."""
    (mine,), axis, world = results, run.attrs["axis"], run.attrs["world"]
    whole = torch.empty(shape_of(types[0], dims), dtype=mine.dtype, device=mine.device)
    if mine.is_meta:
        return [whole]
    for rank, part in enumerate(OPS["all_gather"].run([mine[None]], {"axis": 0, "world": world})):
        done = 0
        for begin, end in Part(axis, rank, world, run.attrs.get("blocks")).ranges(whole.shape[axis]):
            whole.narrow(axis, begin, end - begin).copy_(part.narrow(axis, done, end - begin))
            done += end - begin
    return [whole]


def _same(run: Run, types: Types, results: Tensors, dims: Dims) -> Tensors:
    return results


_UNDO: dict[str, Undo] = {
    "astype": _astype,
    "chunk": _parts,
    "concat": _concat,
    "flip": _flip,
    "permute_dims": _permute,
    "reshape": _reshape,
    "shard": _shard,
    "split": _parts,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_lift_params": _same,
    "unsqueeze": _reshape,
}
