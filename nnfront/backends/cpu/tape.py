# SPDX-License-Identifier: Apache-2.0
"""Kernels in C that follow one another, as one call.

Between the products of one token each step of the interpreter costs 8 to 18 us, as products leave nothing in the caches: a tenth of the time of a
model of half a billion weights, and a third of that of a small one. So all instructions in a row become one step, which finds out by the sizes
of a call what of it can be written down as rows of numbers: each kernel's record says how its calls are written (`Kernel.write`), or refuses them. From then on C runs the
rows of calls of the same sizes, and what was refused runs between them. Where tensors lie is looked up in each call, so nothing of it becomes wrong when they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

import torch

from nnfront.backends.backend import Frame, Pair
from nnfront.backends.cpu.decode_attention import PLACES, places
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import KNOWN
from nnfront.backends.cpu.tape_builder import (
    MEMORY,
    LayerValue,
    Operand,
    Place,
    Refused,
    Tape,
    TapeBuilder,
    Value,
    Write,
    demand,
)
from nnfront.dims import Size, Symbol, as_symbol, evaluate
from nnfront.lower import Run, Slot, StateLayerType, TensorType
from nnfront.lower.slots import dims_in
from nnfront.runtime.execute import Code, execute
from nnfront.state.between import BETWEEN

# Bytes of operands up to which instructions are one tape, which holds them until it ends: of larger ones plans count when they are freed, and calls by themselves take little longer;
# and the same where something is done between steps, which is to come soon.
MOST_HELD, MOST_HELD_BETWEEN = 1 << 22, 1 << 19
Part: TypeAlias = Callable[[Frame], None]
# What a layer keeps of each sequence is an operand like others when it is read, and a result when it is written.
JOINED = READ, WRITTEN = "cache_read", "cache_write_owned"


class Appended(NamedTuple):
    """What is appended to a layer: the slot of the layer, tokens of each sequence, the slot of the layer afterwards."""

    layer: int
    tokens: int
    after: int


class Kept(NamedTuple):
    """What is read of a layer, or written: the slots of the layer and of the tensor; if it is written, tokens, whether it is taken over, the slot of the layer afterwards."""

    layer: int
    name: str
    tensor: int
    seq: int = 0
    take_over: bool = False
    after: int = -1


@dataclass(frozen=True)
class TapePart:
    """Instructions that are one call, and `steps` that do the same where a tensor is in pieces.

    tensors        slots of operands, what is read of layers among them
    read, written  what layers keep of sequences
    appended       what is appended to layers
    """

    tape: Tape
    steps: Code
    tensors: Sequence[int]
    read: Sequence[Kept]
    appended: Sequence[Appended]
    written: Sequence[Kept]
    frees: Sequence[int]

    def __call__(self, frame: Frame) -> None:
        for kept in self.read:
            frame[kept.tensor] = frame[kept.layer].read(kept.name)
        memories = [frame[i] for i in self.tensors]
        if not all(map(torch.Tensor.is_contiguous, memories)):
            execute(self.steps, frame)
            return
        for slot, tokens, _ in self.appended:
            memories += places(frame[slot].reserve_tokens(tokens), frame[slot])
        try:
            made = self.tape.run(memories)
        except ValueError:
            execute(self.steps, frame)  # which says what instruction it is that does not take its operands
            raise
        for before, _, after in self.appended:
            frame[after] = frame[before]
        for slot, tensor in zip(self.tape.returned, made, strict=True):
            frame[slot] = tensor
        for kept in self.written:
            layer = frame[kept.after] = frame[kept.layer]
            layer.write(kept.name, frame[kept.tensor], kept.seq, take_over=kept.take_over)
        for slot in self.frees:
            frame[slot] = None


class _RefusedAt(Exception):
    """No tape has an instruction, or a tape that begins with it has."""

    def __init__(self, index: int, *, is_final: bool) -> None:
        super().__init__(index)
        self.index, self.is_final = index, is_final


class TapeStep:
    """The step of instructions in a row: for each set of sizes tapes, and between them what no tape can have; a tape is written once for the sizes that it reads."""

    def __init__(
        self, pairs: Sequence[Pair], slots: Sequence[Slot], method: str, writers: Mapping[str, Write]
    ) -> None:
        self.pairs, self.slots, self.method, self.writers = pairs, slots, method, writers
        self.runs: list[Run] = [run for _, run in pairs if isinstance(run, Run)]
        read = {as_symbol(slot.value): i for i, slot in enumerate(slots) if slot.kind == "dim"}
        self.symbols = [_symbols_of(run, slots) for run in self.runs]
        symbols = dict.fromkeys(chain.from_iterable(self.symbols))
        self._dims = {symbol: read[symbol] for symbol in symbols if symbol in read}
        self._read = tuple(self._dims.values())
        self.layers = _Layers(self.runs, slots)
        self._layers = self._appended()
        self._counts = frozenset(self._layers.values())
        kinds: dict[Any, int] = {}
        self.kinds = [kinds.setdefault(_kind(run, slots), i) for i, run in enumerate(self.runs)]
        self.plans: dict[Any, list[Part]] = {}
        self.parts: dict[Any, list[Part]] = {}

    def __call__(self, frame: Frame) -> None:
        sizes = [frame[i] for i in self._read]
        known = dict(zip(self._dims, sizes, strict=True))
        # Of all layers there are one or two.
        tokens = {count: evaluate(count, known) for count in self._counts}
        are_ready = [frame[i].has_capacity(tokens[count]) for i, count in self._layers.items()]
        if not all(are_ready) and max(tokens.values()) > 1:
            # What turns one ring over keeps a chunk, with which others have no room either.
            are_ready = [False] * len(are_ready)
        key = (torch.get_num_threads(), BETWEEN.do is None, *sizes, *are_ready)
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= KNOWN:
                self.plans.clear()
                self.parts.clear()
            layers = [slot for slot, is_ready in zip(self._layers, are_ready, strict=True) if is_ready]
            plan = self.plans[key] = list(_Planner(self, frame, known, layers).parts())
        for part in plan:
            part(frame)
            if (between := BETWEEN.do) is not None:
                between()

    def _appended(self) -> dict[int, Size]:
        """How many tokens of each sequence the first instruction appends that has a layer."""
        found: dict[int, Size] = {}
        for run in self.runs:
            layers = self.layers.of(run) if run.kernel in self.writers else []
            tokens = _tokens_of(run, self.slots) if layers else 0
            if all(symbol in self._dims for dim in dims_in(tokens) for symbol in dim.symbols):
                found = dict.fromkeys(layers, tokens) | found
        return found


class _Layers:
    """What layers instructions have, by the slots in which these are before the first of them."""

    def __init__(self, runs: Iterable[Run], slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._before: dict[int, int] = {}
        for run in runs:
            after = [slot for slot in run.outputs if isinstance(slots[slot].type, StateLayerType)]
            self._before.update((slot, layer) for slot, layer in zip(after, self.of(run), strict=False))

    def of(self, run: Run) -> list[int]:
        return [self.first(slot) for slot in run.inputs if isinstance(self._slots[slot].type, StateLayerType)]

    def first(self, slot: int) -> int:
        """Where the layer of a slot is at first."""
        return self._before.get(slot, slot)


def _tokens_of(run: Run, slots: Sequence[Slot]) -> Size:
    """How many tokens of each sequence attention is of."""
    type = slots[run.inputs[0]].type
    assert isinstance(type, TensorType)
    return type.shape[1]


def _kind(run: Run, slots: Sequence[Slot]) -> Any:
    """What says how many calls an instruction is for certain sizes: layers of a model have many that are alike."""
    used = [(slots[i].kind, slots[i].type, slots[i].value) for i in (*run.operands, *run.outputs)]
    key = run.kernel, run.op, run.result.is_leaf, tuple(run.attrs.items()), tuple(run.sized), tuple(used)
    try:
        hash(key)
    except TypeError:
        return id(run)
    return key


def _symbols_of(run: Run, slots: Sequence[Slot]) -> list[Symbol]:
    """The dims that an instruction reads."""
    used = (slots[i] for i in (*run.operands, *run.outputs))
    return [symbol for slot in used for dim in _dims_of(slot) for symbol in dim.symbols]


def _dims_of(slot: Slot) -> Iterator[Any]:
    yield from dims_in(slot.type.shape if isinstance(slot.type, TensorType) else slot.value)


class _Planner:
    """Finds what of a step can be tapes for certain sizes, with the layers that have room for their tokens."""

    def __init__(
        self, step: TapeStep, frame: Frame, known: Mapping[Symbol, int], layers: Sequence[int]
    ) -> None:
        self._step, self._frame, self._known, self._slots = step, frame, known, step.slots
        self._most_held = MOST_HELD if BETWEEN.do is None else MOST_HELD_BETWEEN
        self._room = set(layers)
        self._alike: dict[Any, int | None] = {}
        self._rows = [self._rows_of(run, kind) for run, kind in zip(step.runs, step.kinds, strict=True)]

    def parts(self) -> Iterator[Part]:
        """What is to be called, in order."""
        for is_native, found in groupby(range(len(self._rows)), lambda i: self._rows[i] is not None):
            part = list(found)
            symbols = dict.fromkeys(symbol for i in part for symbol in self._step.symbols[i])
            sizes, rows = map(self._known.get, symbols), (self._rows[i] for i in part)
            key = torch.get_num_threads(), self._most_held, part[0], *rows, *sizes
            if key not in self._step.parts:
                self._step.parts[key] = list(self._native(part) if is_native else self._plain(part))
            yield from self._step.parts[key]

    def _plain(self, part: Sequence[int]) -> Iterator[Part]:
        if part:
            yield partial(execute, self._code(part))

    def _code(self, part: Sequence[int]) -> Code:
        steps = tuple(self._step.pairs[i][0] for i in part)
        return Code(steps, tuple(self._step.runs[i] for i in part), self._step.method)

    def _native(self, part: list[int]) -> Iterator[Part]:
        """A tape of what begins and ends with a call; of one call it is none."""
        calls = [i for i in part if self._rows[i]]
        if len(calls) < 2:
            yield from self._plain(part)
            return
        inner = [i for i in part if calls[0] <= i <= calls[-1]]
        yield from self._plain([i for i in part if i < calls[0]])
        try:
            yield from self._written(inner)
        except _RefusedAt as refused:
            middle = inner.index(refused.index)
            yield from self._native(inner[:middle])
            yield from self._plain([refused.index]) if refused.is_final else ()
            yield from self._native(inner[middle + refused.is_final :])
        yield from self._plain([i for i in part if i > calls[-1]])

    def _rows_of(self, run: Run, kind: int) -> int | None:
        """How many calls an instruction is, one of a kind; None if no tape can have it."""
        if run.kernel in (READ, WRITTEN):
            return 0
        layers = self._step.layers.of(run)
        is_ready = self._room.issuperset(layers)
        if any(isinstance(self._slots[slot].type, StateLayerType) for slot in run.outputs):
            self._room.difference_update(layers)  # there is room for the tokens of one instruction
        if not is_ready or any(map(self._is_in_pieces, run.inputs)):
            return None
        if kind not in self._alike:
            self._alike[kind] = self._count(run)
        return self._alike[kind]

    def _count(self, run: Run) -> int | None:
        builder = TapeBuilder(torch.get_num_threads(), {})
        try:
            self._write(builder, run, [self._operand(slot, MEMORY + 1) for slot in run.inputs])
        except Refused:
            return None
        return len(builder.rows)

    def _written(self, part: Sequence[int]) -> Iterator[Part]:
        runs = [self._step.runs[i] for i in part]
        made = {slot for run in runs for slot in run.outputs}
        frees = tuple(dict.fromkeys(slot for run in runs for slot in run.frees))
        read = {run.outputs[0] for run in runs if run.kernel == READ}
        kept = {run.inputs[1] for run in runs if run.kernel == WRITTEN}
        operands = [s for run in runs for s in run.inputs if run.kernel not in (READ, WRITTEN)]
        tensors = [s for s in dict.fromkeys(operands) if s not in made - read and self._is_tensor(s)]
        before = _Layers(runs, self._slots)
        appended = [
            Appended(before.of(run)[0], evaluate(_tokens_of(run, self._slots), self._known), run.outputs[1])
            for run in runs
            if run.kernel not in (READ, WRITTEN) and before.of(run)
        ]
        values: dict[int, Operand] = {s: self._operand(s, MEMORY + 1 + i) for i, s in enumerate(tensors)}
        held = sum(x.nbytes for s, x in values.items() if isinstance(x, Value) and not self._is_bound(s))
        if held > self._most_held:
            yield from self._plain(part)
            return
        first = MEMORY + 1 + len(tensors)
        outlive = [s for s in dict.fromkeys(s for run in runs for s in run.outputs) if self._is_tensor(s)]
        outlive = [s for s in outlive if s not in read and (s in kept or s not in frees)]
        begin = first + PLACES * len(appended)
        builder = TapeBuilder(torch.get_num_threads(), {slot: begin + i for i, slot in enumerate(outlive)})
        values |= {x.layer: self._operand(x.layer, first + PLACES * i) for i, x in enumerate(appended)}
        states = _States(before)
        for i, run in zip(part, runs, strict=True):
            try:
                if run.kernel in (READ, WRITTEN):
                    states.add(run, self._frame)
                else:
                    slots = [(s, before.first(s)) for s in run.inputs]
                    given = [values[at] if at in values else self._operand(s, 0) for s, at in slots]
                    results = self._write(builder, run, given)
                    values.update(zip(run.outputs, results, strict=True))
            except Refused:
                raise _RefusedAt(i, is_final=run.kernel not in (READ, WRITTEN)) from None
            for slot in run.frees:
                value = values.get(slot)
                if isinstance(value, Value):
                    builder.release(value.base)
        yield TapePart(
            builder.tape(), self._code(part), tensors, states.read, appended, states.written, frees
        )

    def _is_bound(self, slot: int) -> bool:
        return self._slots[slot].kind in ("weight", "constant")

    def _is_in_pieces(self, slot: int) -> bool:
        return self._is_bound(slot) and self._is_tensor(slot) and not self._frame[slot].is_contiguous()

    def _is_tensor(self, slot: int) -> bool:
        return isinstance(self._slots[slot].type, TensorType)

    def _write(self, builder: TapeBuilder, run: Run, operands: Sequence[Operand]) -> Sequence[Operand]:
        if run.kernel not in self._step.writers:
            raise Refused("it has no kernel in C")
        sized = {name: self._frame[slot] for name, slot in run.sized.items()}
        return self._step.writers[run.kernel](builder, run, *operands, **sized)

    def _operand(self, slot: int, memory: int) -> Operand:
        """What an operand is, if it is not made on the tape; a tensor or a layer in the memory of this index."""
        held, type = self._slots[slot], self._slots[slot].type
        if isinstance(type, StateLayerType):
            return LayerValue(self._frame[self._step.layers.first(slot)], memory)
        if not isinstance(type, TensorType):
            demand(held.kind in ("constant", "dim", "size"), "a number is computed")
            return self._frame[slot]
        demand(not self._is_in_pieces(slot), "a weight is in pieces")
        are_known = all(symbol in self._known for dim in dims_in(type.shape) for symbol in dim.symbols)
        demand(are_known, "a size is computed")
        shape = tuple(evaluate(size, self._known) for size in type.shape)
        return Value(Place(memory), shape, getattr(torch, type.dtype))


class _States:
    """What a tape reads of layers when it begins, and writes when it has ended."""

    def __init__(self, layers: _Layers) -> None:
        self.read: list[Kept] = []
        self.written: list[Kept] = []
        self._layers = layers

    def add(self, run: Run, frame: Frame) -> None:
        """Take an instruction. Raises Refused for what has been written already."""
        layer, name = self._layers.first(run.inputs[0]), run.attrs["name"]
        is_first = all((layer, name) != (kept.layer, kept.name) for kept in self.written)
        demand(is_first, "it has been written already")
        if run.kernel == READ:
            self.read.append(Kept(layer, name, run.outputs[0]))
            return
        seq = frame[run.sized["seq"]] if "seq" in run.sized else run.attrs["seq"]
        value, (after,) = run.inputs[1], run.outputs
        self.written.append(Kept(layer, name, value, seq, value in run.frees, after))


def join(
    pairs: Sequence[Pair], slots: Sequence[Slot], method: str, writers: Mapping[str, Write]
) -> list[Pair]:
    """Return steps with one for instructions in a row, where at least two of them can be calls of kernels in C."""
    if NATIVE is None:
        return list(pairs)
    joined: list[Pair] = []
    for is_run, group in groupby(pairs, lambda pair: isinstance(pair[1], Run)):
        part = list(group)
        found = [i for i, (_, run) in enumerate(part) if isinstance(run, Run) and run.kernel in writers]
        if not is_run or len(found) < 2:
            joined += part
            continue
        first, end = found[0], found[-1] + 1
        joined += [*part[:first], (TapeStep(part[first:end], slots, method, writers), None), *part[end:]]
    return joined
