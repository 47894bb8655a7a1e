# SPDX-License-Identifier: Apache-2.0
"""What a weight transform will do, before it does it: the formula of each result, and the most memory it will hold at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from nnfront import dtypes
from nnfront.dims import Symbol
from nnfront.ir import OPS
from nnfront.lower import (
    ONE_PIECE,
    PACK,
    Branch,
    Match,
    MethodProgram,
    Part,
    Program,
    Run,
    TensorType,
    type_text,
)
from nnfront.transform.blockwise import BLOCK_ELEMENTS, works_on_rows
from nnfront.transform.formula import formulas
from nnfront.transform.run import shape_of, weight_dims
from nnfront.transform.schedule import Fetch, Give, Step, schedule
from nnfront.transform.source import Source, as_source

# What any other op may hold besides: references compute in float32, and `quantize`, the largest, holds three copies of that.
SCRATCH_BYTES = 12


@dataclass(frozen=True, slots=True)
class ResultPlan:
    """One result: its formula over names of weights, those weights, its bytes, and how many of them are new memory.

    `is_computed`: an op makes it, or what it is a view of; else it is weights as the source has them, perhaps joined or turned.
    """

    name: str
    formula: str
    sources: tuple[str, ...]
    type: str
    size_bytes: int
    new_bytes: int
    is_computed: bool


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """A transform before it runs.

    `peak_bytes` bounds the memory that it allocates at once if each result is let go of once given (written to a file);
    `resident_bytes` is what the results need if all are kept, `peak_kept_bytes` the bound for that case.
    Pages of files and tensors that exist already take no memory of their own and are in none of them.
    `read_bytes` are those of weights that are asked for, of a file mapped or read: of what ranks share among them its own part.
    """

    name: str
    results: tuple[ResultPlan, ...]
    peak_bytes: int
    resident_bytes: int
    peak_kept_bytes: int
    read_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self.results)} results",
            f"  results kept in memory: {_mb(self.resident_bytes)} of new memory, at most {_mb(self.peak_kept_bytes)} on the way",
            f"  results written to files: at most {_mb(self.peak_bytes)}",
        ]
        for result in self.results:
            new = f", {_mb(result.new_bytes)} new" if result.new_bytes else ""
            lines.append(
                f"  {result.name}: {result.type} = {result.formula}    # {_mb(result.size_bytes)}{new}"
            )
        return "\n".join(lines)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def plan_transform(program: MethodProgram, source: Source | Mapping[str, torch.Tensor]) -> TransformPlan:
    """Say what `run_transform` would do with these weights; reads their types only.

    Raises LoadError if the sizes of weights contradict each other.
    """
    weights = as_source(source)
    dims = weight_dims(program, weights)
    steps = schedule(program)
    streamed = _Memory(program, weights, dims)
    kept = _Memory(program, weights, dims)
    new: dict[str, int] = {}
    computed: dict[str, bool] = {}
    for step in steps:
        streamed.run(step)
        before = kept.results_bytes
        if isinstance(step.action, Give):
            computed[step.action.name] = kept.is_computed(step.action.slot)
        kept.run(step, keep=True)
        if isinstance(step.action, Give):
            new[step.action.name] = kept.results_bytes - before
    results = []
    for name, slot, text, sources in formulas(program):
        type = program.slots[slot].type
        size = _bytes_of(type, dims)
        written = type_text(type) if type else ""
        results.append(ResultPlan(name, text, sources, written, size, new[name], computed[name]))
    return TransformPlan(
        program.name, tuple(results), streamed.peak, kept.results_bytes, kept.peak, sum(kept.fetched.values())
    )


def plan_load(program: Program, source: Source | Mapping[str, torch.Tensor]) -> TransformPlan:
    """Say what loading these weights would do: one transform after the other, then the weights that methods read as they are.

    Raises LoadError if the sizes of weights contradict each other.
    """
    weights = as_source(source)
    methods = program.methods.values()
    used = dict.fromkeys(m.transform for m in methods if m.transform in program.transforms)
    plans = [plan_transform(program.transforms[name], weights) for name in used if name]
    raw = dict.fromkeys(w.name for m in methods for w in m.weights if w.role == "weight")
    results, resident, peak = [r for plan in plans for r in plan.results], 0, 0
    for plan in plans:
        peak = max(peak, resident + plan.peak_kept_bytes)
        resident += plan.resident_bytes
    read = 0
    for name in raw:
        info, new = weights.info(name), weights.copied_bytes([name])
        type = TensorType(tuple(info.shape), info.dtype)
        size = _bytes_of(type, {})
        results.append(ResultPlan(name, name, (name,), type_text(type), size, new, False))
        read += new
    streamed = max([read, *(plan.peak_bytes for plan in plans)])
    name = ", ".join(plan.name for plan in plans) or "weights as they are"
    asked = sum(plan.read_bytes for plan in plans) + sum(r.size_bytes for r in results[-len(raw) :] if raw)
    return TransformPlan(name, tuple(results), streamed, resident + read, max(peak, resident + read), asked)


def _bytes_of(type: Any, dims: Mapping[Symbol, int]) -> int:
    if not isinstance(type, TensorType):
        return 0
    return prod(shape_of(type, dims)) * dtypes.size_bytes(type.dtype)


class _Memory:
    """Plays the steps and counts the bytes of the blocks of memory that are held."""

    def __init__(self, program: MethodProgram, source: Source, dims: Mapping[Symbol, int]) -> None:
        self.program = program
        self.source = source
        self.dims = dims
        self.peak = 0
        self.live_bytes = 0
        self.results_bytes = 0
        self.sizes: list[int] = []  # by block
        self.users: list[int] = []  # by block: slots and results that keep it alive
        self.blocks: dict[int, frozenset[int]] = {}  # slot -> blocks that it keeps alive
        self.kept: set[int] = set()
        self.made: set[int] = set()  # blocks that ops fill
        self.fetched: dict[
            tuple[tuple[str, ...], Part | None], int
        ] = {}  # bytes of what is asked of the source

    def run(self, step: Step, *, keep: bool = False) -> None:
        """Play one step; with `keep` a result stays after it is given."""
        action = step.action
        match action:
            case Fetch():
                self.fetch(action)
            case Give():
                for block in self.held([action.slot]) - self.kept if keep else ():
                    self.kept.add(block)
                    self.users[block] += 1
                    self.results_bytes += self.sizes[block]
            case Run():
                self.run_op(action)
            case Branch():
                # A bound: as if a branch gave back nothing before its end.
                for part in (action.then, action.otherwise):
                    for inner in part.instructions:
                        self.run(Step(inner))
                self.allocate(action.outputs, 0, self.held(action.reads()))
            case Match():
                pass
        for slot in step.frees:
            self.release(slot)

    def fetch(self, fetch: Fetch) -> None:
        """Read weights, or a part of one, which is new memory."""
        size, names = _bytes_of(self.program.slots[fetch.slot].type, self.dims), fetch.names
        self.allocate([fetch.slot], self.source.copied_bytes(names) if fetch.part is None else size)
        self.fetched[names, fetch.part] = size

    def run_op(self, run: Run) -> None:
        slots, inputs = self.program.slots, self.held(run.inputs)
        if run.kernel == ONE_PIECE:
            if not inputs.isdisjoint(self.made):  # a copy of what an op makes is made by it too
                self.made.add(len(self.sizes))
            self.allocate(run.outputs, sum(_bytes_of(slots[i].type, self.dims) for i in run.outputs))
            return
        op = OPS.get(run.op)
        view = op.view if op is not None else "always" if run.op == PACK else "never"
        # What is a view sometimes counts as memory of its own that keeps the operand's as well.
        shared = inputs if view != "never" and not self.is_conversion(run) else frozenset()
        if view == "always":
            self.allocate(run.outputs, 0, shared)
            return
        elements = 0
        if op is None or op.scratch or not op.moves:
            elements = max(
                (_elements(slots[i].type, self.dims) for i in (*run.inputs, *run.outputs)), default=0
            )
            first = slots[run.inputs[0]].type if run.inputs else None
            if isinstance(first, TensorType) and works_on_rows(run, shape := shape_of(first, self.dims)):
                # At least a row; parts of results too.
                elements = min(elements, max(2 * BLOCK_ELEMENTS, prod(shape[1:])))
        sizes = [_bytes_of(slots[i].type, self.dims) for i in run.outputs]
        scratch = elements * SCRATCH_BYTES
        if op is not None and op.holds is not None:
            scratch = op.holds(*(_elements(slots[i].type, self.dims) for i in run.inputs))
        self.reserve(sum(sizes) + scratch)
        for slot, size in zip(run.outputs, sizes, strict=True):
            self.made.add(len(self.sizes))
            self.allocate([slot], size, shared)

    def is_conversion(self, run: Run) -> bool:
        """Whether an `astype` changes the dtype, and so never returns its operand."""
        types = [self.program.slots[i].type for i in (*run.inputs, *run.outputs)]
        return run.op == "astype" and len({type.dtype for type in types if isinstance(type, TensorType)}) > 1

    def reserve(self, size: int) -> None:
        """Note that this much more memory than is held is needed for a moment."""
        self.peak = max(self.peak, self.live_bytes + size)

    def is_computed(self, slot: int) -> bool:
        """Whether an op fills any memory behind a slot."""
        return not self.held([slot]).isdisjoint(self.made)

    def allocate(self, slots: Iterable[int], size: int, shared: frozenset[int] = frozenset()) -> None:
        """Fill slots with a new block of memory, and with what they share of others."""
        self.sizes.append(size)
        self.users.append(0)
        self.live_bytes += size
        for slot in slots:
            self.blocks[slot] = shared | {len(self.sizes) - 1}
            for block in self.blocks[slot]:
                self.users[block] += 1
        self.reserve(0)

    def release(self, slot: int) -> None:
        """Note that nobody needs the slot any more."""
        for block in self.blocks.pop(slot, ()):
            self.users[block] -= 1
            if not self.users[block]:
                self.live_bytes -= self.sizes[block]

    def held(self, slots: Iterable[int]) -> frozenset[int]:
        """The blocks behind some slots."""
        return frozenset().union(*(self.blocks.get(slot, frozenset()) for slot in slots))


def _elements(type: Any, dims: Mapping[Symbol, int]) -> int:
    return prod(shape_of(type, dims)) if isinstance(type, TensorType) else 0
