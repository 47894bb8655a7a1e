# SPDX-License-Identifier: Apache-2.0
"""Kernels in C that follow one another, as one call.

Between the products of one token each step of the interpreter costs 8 to 18 us, as products leave nothing in the caches: a tenth of the time of a
model of half a billion weights, and a third of that of a small one. So instructions in a row that are all for kernels in C become one step: the
first time that it meets operands of certain shapes it writes the calls down, as rows of numbers (`tape_rows`), and from then on C runs these rows.
Where tensors lie, and how large they are, is looked up in each call, so nothing of it becomes wrong when they move. Where the kernels in C are not for the operands (many rows, a
cache in pages, a tensor in several pieces), the instructions run one by one, as they would without this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch

from nnfront.backends.cpu.decode_attention import stored
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.gemv import SMALL_BATCH
from nnfront.backends.cpu.tape_builder import MEMORY, LayerValue, Operand, Place, Refused, TapeBuilder, Value
from nnfront.backends.cpu.tape_elementwise import ELEMENTWISE, is_elementwise, is_number
from nnfront.backends.cpu.tape_recurrent import RECURRENT
from nnfront.backends.cpu.tape_rows import VIEWS, WRITERS
from nnfront.lower import Instruction, Run, Slot, TensorType
from nnfront.runtime.execute import Code, Frame, Step, execute
from nnfront.state.layer import CacheLayer

# What writes to the layer of a cache, its fourth operand.
ATTENTION = ("qkv_attention", "attention_cached")
# What is written for one token of each sequence, or for one token, only.
FOR_ONE = frozenset((*ATTENTION, *RECURRENT, "split"))

Pair: TypeAlias = tuple[Step, Instruction | None]


@dataclass(frozen=True)
class Tape:
    """What a sequence does for operands of certain shapes: its rows, the bytes of memory it needs, and what it returns in which slots."""

    rows: torch.Tensor
    size: int
    returned: Mapping[int, Value]


class TapeStep:
    """The step of instructions in a row. `steps` are those that run where C cannot."""

    def __init__(self, runs: Sequence[Run], steps: Code, slots: Sequence[Slot]) -> None:
        made = [slot for run in runs for slot in run.outputs]
        layers = dict.fromkeys(run.inputs[3] for run in runs if run.kernel in ATTENTION)
        given = dict.fromkeys(
            slot for run in runs for slot in run.inputs if slot not in made and slot not in layers
        )
        self._runs, self._steps = runs, steps
        self._frees = tuple(dict.fromkeys(slot for run in runs for slot in run.frees))
        self._layers = tuple(layers)
        self._numbers = {slot: slots[slot].value for slot in given if is_number(slots[slot])}
        self._tensors = tuple(
            slot for slot in given if slot not in self._numbers and not _is_none(slots[slot])
        )
        self._varying = tuple(slot for slot in self._tensors if slots[slot].kind != "weight")
        self._sizes = tuple(dict.fromkeys(slot for run in runs for slot in run.sized.values()))
        self._same_layers = {run.outputs[1]: run.inputs[3] for run in runs if run.kernel in ATTENTION}
        kept = [slot for slot in made if slot not in self._frees and slot not in self._same_layers]
        first = MEMORY + 1 + len(self._tensors) + 4 * len(self._layers)
        self._outlive = {slot: first + i for i, slot in enumerate(kept)}
        self._plans: dict[Any, Tape | None] = {}

    def __call__(self, frame: Frame) -> None:
        plan = self._plan(frame)
        if plan is None or not self._can_run(frame):
            execute(self._steps, frame)  # nothing of the frame is held here: steps free what they have read
            return
        returned = self._run(plan, frame)
        for slot, layer in self._same_layers.items():
            frame[slot] = frame[layer]
        for slot, tensor in zip(plan.returned, returned, strict=True):
            frame[slot] = tensor
        for slot in self._frees:
            frame[slot] = None

    def _can_run(self, frame: Frame) -> bool:
        """Whether each tensor lies in one piece, and each layer has a place for a token."""
        tensors, layers = map(frame.__getitem__, self._tensors), map(frame.__getitem__, self._layers)
        return all(map(torch.Tensor.is_contiguous, tensors)) and all(map(_takes_one, layers))

    def _run(self, plan: Tape, frame: Frame) -> list[torch.Tensor]:
        assert NATIVE is not None
        memory = torch.empty(plan.size, dtype=torch.uint8)
        returned = [torch.empty(value.shape, dtype=value.dtype) for value in plan.returned.values()]
        memories = [None, memory, *map(frame.__getitem__, self._tensors)]
        for layer in map(frame.__getitem__, self._layers):
            storage = layer.reserve_one()
            memories += (*stored(storage), layer.lengths.counts(), layer.capacity)
        NATIVE.run_sequence(plan.rows, *memories, *returned)
        return returned

    def _plan(self, frame: Frame) -> Tape | None:
        """The plan for what is in the frame; None if the kernels are not for it."""
        sizes = tuple(frame[i] for i in self._sizes)
        key = (torch.get_num_threads(), sizes, *(frame[i].shape for i in self._varying))
        if key in self._plans:
            return self._plans[key]
        builder, plan = TapeBuilder(torch.get_num_threads(), self._outlive), None
        try:
            plan = self._written(frame, builder)
        except Refused:
            pass
        if (
            plan or builder.rows
        ):  # what is refused at once has many rows: of such shapes there are as many as prompts
            self._plans[key] = plan
        return plan

    def _written(self, frame: Frame, builder: TapeBuilder) -> Tape:
        values: dict[int, Operand] = self._numbers | {
            slot: Value(Place(MEMORY + 1 + i), tuple(frame[slot].shape), frame[slot].dtype)
            for i, slot in enumerate(self._tensors)
        }
        first = MEMORY + 1 + len(self._tensors)
        values |= {slot: LayerValue(frame[slot], first + 4 * i) for i, slot in enumerate(self._layers)}
        for run in self._runs:
            sized = {name: frame[slot] for name, slot in run.sized.items()}
            attrs = run.attrs if run.kernel in VIEWS else {}
            operands = [values.get(slot) for slot in run.inputs]
            made = WRITERS[run.kernel](builder, run, *operands, **attrs, **sized)
            values.update(zip(run.outputs, made, strict=True))
            for slot in run.frees:
                value = values.get(slot)
                if isinstance(value, Value):
                    builder.release(value.base)
        return Tape(torch.tensor(builder.rows, dtype=torch.int64), builder.size, builder.returned)


def _takes_one(layer: CacheLayer) -> bool:
    return layer.has_room_for_one


def _is_none(slot: Slot) -> bool:
    return slot.kind == "constant" and slot.value is None


def join(pairs: Sequence[Pair], slots: Sequence[Slot], method: str) -> list[Pair]:
    """Return steps with one for instructions in a row that sequences have, where they are at least two calls."""
    if NATIVE is None or SMALL_BATCH is None:
        return list(pairs)
    return _joined(pairs, slots, method, frozenset(WRITERS))


def _joined(pairs: Sequence[Pair], slots: Sequence[Slot], method: str, kernels: frozenset[str]) -> list[Pair]:
    joined: list[Pair] = []
    for part in _parts(pairs, slots, kernels):
        runs = [run for _, run in part if _is_writable(run, slots, kernels)]
        if len(runs) < len(part) or sum(run.kernel not in VIEWS for run in runs) < 2:
            joined += part
            continue
        first = next(i for i, run in enumerate(runs) if run.kernel not in VIEWS)
        joined += part[:first]  # a view of what torch made may be a copy
        part, runs = part[first:], runs[first:]
        # Of several tokens what is between attention and attention can still be one call.
        is_for_one = any(run.kernel in FOR_ONE for run in runs)
        instead = _joined(part, slots, method, kernels - FOR_ONE) if is_for_one else part
        steps = Code(tuple(step for step, _ in instead), tuple(run for _, run in instead), method)
        joined.append((TapeStep(runs, steps, slots), None))
    return joined


def _parts(pairs: Iterable[Pair], slots: Sequence[Slot], kernels: frozenset[str]) -> Iterator[list[Pair]]:
    """Instructions in a row that can be one step, and between these all others."""
    part: list[Pair] = []
    for pair in pairs:
        run = pair[1]
        if not _is_writable(run, slots, kernels):
            yield from _closed(part)
            yield [pair]
            part = []
            continue
        if run.kernel in ATTENTION and run.inputs[3] in _touched(part):
            yield from _closed(part)  # a second token in a layer is one more call
            part = []
        part.append(pair)
    yield from _closed(part)


def _is_writable(
    instruction: Instruction | None, slots: Sequence[Slot], kernels: frozenset[str]
) -> TypeGuard[Run]:
    if not isinstance(instruction, Run) or instruction.kernel not in kernels:
        return False
    if instruction.kernel in ELEMENTWISE:
        return is_elementwise(instruction, slots)
    if instruction.kernel in VIEWS:
        return True
    first = slots[instruction.inputs[0]].type
    is_narrow = isinstance(first, TensorType) and first.dtype == "bfloat16"
    return is_narrow and (len(instruction.outputs) == 2 or instruction.kernel not in ATTENTION)


def _touched(part: Sequence[Pair]) -> set[int]:
    """The slots of the layers that were written."""
    runs = [run for _, run in part if isinstance(run, Run) and run.kernel in ATTENTION]
    return {slot for run in runs for slot in (run.inputs[3], run.outputs[1])}


def _closed(part: list[Pair]) -> Iterator[list[Pair]]:
    """The part, cut before a view that others see: what is seen is a tensor of torch."""
    freed = {slot for _, run in part if isinstance(run, Run) for slot in run.frees}
    for i, (_, run) in enumerate(part):
        if isinstance(run, Run) and run.kernel in VIEWS and not freed.issuperset(run.outputs):
            yield from _closed(part[:i])
            yield [part[i]]
            yield from _closed(part[i + 1 :])
            return
    yield part
