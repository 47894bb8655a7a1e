# SPDX-License-Identifier: Apache-2.0
"""Which memory a method takes, and from which step to which: one `Allocation` for each value that is not a view of another.

Steps are the instructions in order, those of both branches of an `if` one after the other, and after a branch a step in which
they join. Memory of a branch is not alive while the other one runs; where each branch makes a result in memory of its
own, the two are one piece, as only one of them is ever there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nnfront.dims import Size
from nnfront.ir import Constant, ScalarType, ShapeType, StateLayerType, TensorType, TupleType, Type
from nnfront.lower.instructions import Block, Branch, Match, Run
from nnfront.lower.program import MethodProgram
from nnfront.memory.allocations import Footprints, Opaque, Operand
from nnfront.memory.concrete_sizes import Extents
from nnfront.memory.layout import Layer, Layout, contiguous


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory that one instruction takes. `ranges` are the steps, first and last, during which it is alive."""

    name: str
    module: str
    bytes: int
    kind: Literal["value", "workspace", "copy"]
    ranges: list[tuple[int, int]] = field(default_factory=list)
    since: int | None = None  # the step from which it is alive, while it is
    slots: set[int] = field(default_factory=set)  # those that hold it now
    all_slots: list[int] = field(default_factory=list)

    def end(self, step: int) -> None:
        """It is alive up to this step."""
        if self.since is not None:
            self.ranges.append((self.since, step))
            self.since = None


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: what runs, and where in the model."""

    kernel: str
    module: str


class Lifetimes:
    """Walks a method once. `pieces` and `steps` are what it finds."""

    def __init__(self, method: MethodProgram, extents: Extents, footprints: Footprints) -> None:
        self.pieces: list[Allocation] = []
        self.steps: list[Step] = []
        self._method = method
        self._extents = extents
        self._footprints = footprints
        self._layouts: dict[int, Layout | None] = {}
        self._held: dict[int, tuple[Allocation, ...]] = {}  # by slot; absent: memory that is not the call's
        self._chunk: Allocation | None = None
        # Kernels, the bytes that they have left behind, and where.
        self._remembered: set[tuple[str, int, int]] = set()
        # Slots whose memory the session holds: weights, constants, what was computed at load, and views of these.
        self._sessions = {i for i, slot in enumerate(method.slots) if slot.kind in ("weight", "constant")}
        self._setup()
        body, first = method.body, method.body.first_result
        self._block(Block(body.instructions[:first]))
        own = len(self.pieces)
        self._block(Block(body.instructions[first:]))
        self._copies(set(map(id, self.pieces[own:])))
        for piece in self.pieces:
            piece.end(len(self.steps) - 1)

    def _setup(self) -> None:
        """Layouts of what is there before a call: views of weights keep their strides. Its memory is not the call's."""
        for instruction in self._method.setup.instructions:
            if isinstance(instruction, Run):
                self._define(instruction)
        self.kept = sum(piece.bytes for piece in self.pieces if piece.kind == "value")
        self._sessions.update(self._held)
        self.pieces.clear()
        self.steps.clear()
        self._held.clear()

    def _block(self, block: Block) -> None:
        for instruction in block.instructions:
            match instruction:
                case Run():
                    self._define(instruction)
                case Branch():
                    self._branch(instruction)
                case Match():
                    self.steps.append(Step("match", instruction.module))
            self._free(instruction.frees)

    def _define(self, run: Run) -> None:
        step = len(self.steps)
        self.steps.append(Step(run.kernel, run.module))
        outputs = run.outputs
        sized = {name: self._extents.value(self._method.slots[i].value) for name, i in run.sized.items()}
        declared = [self._layout_of(i) for i in outputs]
        footprint = self._footprints.of(run, [self._operand(i) for i in run.inputs], sized, declared)
        if footprint.workspace:
            self.pieces.append(
                Allocation(f"in {run.kernel}", run.module, footprint.workspace, "workspace", [(step, step)])
            )
        self._keep_chunk(run, step)
        place = run.inputs[0] if run.op == "cache_write" else -1  # each layer has content of its own
        alike = run.kernel, footprint.remembered, place
        if footprint.remembered and alike not in self._remembered:
            self._remembered.add(alike)
            name = f"of {run.kernel}, for the next"
            self.pieces.append(Allocation(name, run.module, footprint.remembered, "value", since=step))
        made = [Allocation("", run.module, size, "value", since=step) for size in footprint.made]
        self.pieces += made
        for slot, result in zip(outputs, footprint.results, strict=True):
            pieces = [made[result.made]] if result.made is not None else []
            for i in result.shares:
                pieces += self._held.get(run.inputs[i], ())
            if any(run.inputs[i] in self._sessions for i in result.shares):
                self._sessions.add(slot)
            self._layouts[slot] = result.layout
            self._hold(slot, tuple(dict.fromkeys(pieces)))
        for piece in made:
            if not piece.slots:
                piece.end(step)

    def _keep_chunk(self, run: Run, step: int) -> None:
        """What a ring keeps of tokens that turn it over, as it was and as it becomes, until another one does or the call is over."""
        types = [self._method.slots[i].type for i in run.inputs]
        layer = next((t for t in types if isinstance(t, StateLayerType)), None)
        if run.is_pure or layer is None or not layer.per_token:
            return
        seen = layer_of(layer, self._extents.number, self._footprints.ring_windows)
        tokens = next(x for i in run.inputs if isinstance(x := self._operand(i), Layout) and len(x.shape) > 2)
        seq, room = tokens.shape[1], self._extents.number(layer.max_seq)
        if seq == 1 or seen.capacity == room:
            return
        count = seen.batch * (min(seen.capacity, room - seq) + seq) * seen.token_bytes
        if self._chunk is not None:
            self._chunk.end(step)
        self._chunk = Allocation("what the window turns over", run.module, count, "value", since=step)
        self.pieces.append(self._chunk)

    def _branch(self, branch: Branch) -> None:
        self.steps.append(Step("if", branch.module))
        before = len(self.pieces)
        self._block(branch.then)
        then = self.pieces[before:]
        for piece in then:
            piece.end(len(self.steps) - 1)
        middle = len(self.pieces)
        self._block(branch.otherwise)
        otherwise = self.pieces[middle:]
        join = len(self.steps)
        self.steps.append(Step("join", branch.module))
        for piece in then:
            if piece.slots:
                piece.since = join
        merged: set[int] = set()
        pairs = zip(branch.outputs, branch.then.results, branch.otherwise.results, strict=True)
        for output, mine, its in pairs:
            one, other = self._held.get(mine, ()), self._held.get(its, ())
            if len(one) == len(other) == 1 and not {id(one[0]), id(other[0])} & merged:
                if one[0] in then and other[0] in otherwise:
                    merged |= {id(one[0]), id(other[0])}
                    self._merge(one[0], other[0])
                    other = ()
            self._layouts[output] = self._layout_of(output)
            self._hold(output, tuple(dict.fromkeys((*one, *other))))

    def _merge(self, one: Allocation, other: Allocation) -> None:
        """Make two pieces one."""
        other.end(len(self.steps) - 2)
        one.bytes = max(one.bytes, other.bytes)
        one.ranges += other.ranges
        one.all_slots += other.all_slots
        for slot in other.slots:
            self._held[slot] = tuple(one if piece is other else piece for piece in self._held[slot])
        one.slots |= other.slots
        self.pieces.remove(other)

    def _hold(self, slot: int, pieces: tuple[Allocation, ...]) -> None:
        if pieces:
            self._held[slot] = pieces
        for piece in pieces:
            piece.name = piece.name or self._method.slots[slot].name
            piece.slots.add(slot)
            piece.all_slots.append(slot)

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            for piece in self._held.pop(slot, ()):
                piece.slots.discard(slot)
                if not piece.slots:
                    piece.end(len(self.steps) - 1)

    def _copies(self, own: set[int]) -> None:
        """Results that the caller must not get as they are: it gets copies, see `results.py`."""
        copied = [
            slot
            for slot in self._method.result.leaves()
            if slot in self._sessions or any(id(piece) not in own for piece in self._held.get(slot, ()))
        ]
        step = len(self.steps)
        if copied:
            self.steps.append(Step("copy results", ""))
        for slot in copied:
            operand, name = self._operand(slot), self._method.slots[slot].name
            size = operand.size_bytes if isinstance(operand, Layout) else 0
            self.pieces.append(Allocation(name, "", size, "copy", since=step, all_slots=[slot]))

    def _operand(self, slot: int) -> Operand:
        found = self._layouts.get(slot)
        if found is not None:
            return found
        holder = self._method.slots[slot]
        if holder.kind == "constant" and not isinstance(holder.value, Constant):
            return holder.value
        return self._of_type(holder.type, holder.value if holder.kind in ("dim", "size") else None)

    def _of_type(self, type: Type | None, value: Any) -> Operand:
        match type:
            case TensorType():
                return contiguous([self._extents.number(size) for size in type.shape], type.dtype)
            case ScalarType():
                known = type.value if value is None else value
                return (
                    {"int64": 1, "float64": 1.0, "bool": True}[type.dtype]
                    if known is None
                    else self._extents.value(known)
                )
            case ShapeType():
                return self._extents.value(type.sizes if value is None else value)
            case TupleType():
                return tuple(self._of_type(part, None) for part in type.fields)
            case StateLayerType():
                return layer_of(type, self._extents.number, self._footprints.ring_windows)
            case _:
                return Opaque()

    def _layout_of(self, slot: int) -> Layout | None:
        type = self._method.slots[slot].type
        layout = self._of_type(type, None) if isinstance(type, TensorType) else None
        assert layout is None or isinstance(layout, Layout)
        return layout


def layer_of(type: StateLayerType, number: Callable[[Size], int], ring_windows: bool) -> Layer:
    """Return one layer of a contiguous cache, `number` saying how large its sizes are; a window may make it a ring."""
    batch, capacity = number(type.batch), number(type.max_seq)
    if type.window is not None and ring_windows:
        capacity = min(capacity, type.window)
    return Layer(type, batch, capacity)
