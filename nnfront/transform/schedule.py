# SPDX-License-Identifier: Apache-2.0
"""The order in which a weight transform runs: each result is finished, with what only it needs, before the next is begun.

    Fetch    read weights, joined in a row if a result is nothing but that (`concat`, `stack`, `reshape` of whole weights), or a rank's part of one
    an instruction of the program
    Give     hand a result out

Every step says which slots are dead after it, so that memory holds what is still needed and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from nnfront.dims import Dim, Symbol
from nnfront.ir import OPS, reachable
from nnfront.lower import Instruction, Match, MethodProgram, Part, Run, TensorType, part_taken


@dataclass(frozen=True, slots=True)
class Fetch:
    """Put these weights, one after another along the first axis and under the shape of the slot, into the slot.

    With a `part` it is that of a single weight.
    """

    slot: int
    names: tuple[str, ...]
    part: Part | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slot that it fills."""
        return (self.slot,)

    def reads(self) -> Iterator[int]:
        """Yield the slots that it reads: none."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Give:
    """Hand out the result of this name from the slot."""

    slot: int
    name: str
    outputs: ClassVar[tuple[int, ...]] = ()

    def reads(self) -> Iterator[int]:
        """Yield the slot that it hands out."""
        yield self.slot


Action: TypeAlias = Fetch | Give | Instruction


@dataclass(frozen=True, slots=True)
class Step:
    """One action, and the slots that nobody needs after it."""

    action: Action
    frees: tuple[int, ...] = ()


def schedule(program: MethodProgram, only: Collection[str] | None = None) -> tuple[Step, ...]:
    """Return the steps of a transform, or those that make the results named in `only`.

    The program's own order is kept if it has effects, or checks of shapes, that must not move.
    """
    joins = _fetches(program)
    results = {name: slot for name, slot in program.results.items() if only is None or name in only}
    body = program.body.instructions
    is_fixed = any(
        isinstance(i, Match) or (isinstance(i, Run) and not i.is_pure) for i in program.body.walk()
    )
    groups = (
        [([*results.values()], list(body))] if is_fixed else list(groups_of(body, joins, results.values()))
    )
    actions: list[Action] = []
    fetched: set[int] = set()
    names: dict[int, list[str]] = {}
    for name, slot in results.items():
        names.setdefault(slot, []).append(name)

    def fetch(slots: Iterator[int] | Sequence[int]) -> None:
        for slot in slots:
            if slot in joins and slot not in fetched:
                fetched.add(slot)
                actions.append(joins[slot])

    for wanted, instructions in groups:
        for instruction in instructions:
            if isinstance(instruction, Run) and instruction.outputs[:1] and instruction.outputs[0] in joins:
                continue
            fetch(instruction.reads())
            actions.append(replace(instruction, frees=()))
        fetch(wanted)
        actions.extend(Give(slot, name) for slot in dict.fromkeys(wanted) for name in names[slot])
    return _with_frees(actions)


def groups_of(
    body: Sequence[Instruction], joins: Collection[int], results: Collection[int]
) -> Iterator[tuple[list[int], list[Instruction]]]:
    """Yield for each result the instructions that it needs and that no result before it has needed; `joins` need none."""
    producer = {slot: i for i, instruction in enumerate(body) for slot in instruction.outputs}
    done: set[int] = set()

    def makers(slots: Iterable[int]) -> Iterator[int]:
        return (producer[s] for s in slots if s in producer and s not in joins and producer[s] not in done)

    for slot in dict.fromkeys(results):
        needed = reachable(makers([slot]), lambda i: makers(body[i].reads()))
        done.update(needed)
        yield [slot], [body[i] for i in sorted(needed)]


def _fetches(program: MethodProgram) -> dict[int, Fetch]:
    """Return for each slot that the source can fill what it is asked for."""
    joins = _joins(program)
    found = {slot: Fetch(slot, names) for slot, names in joins.items()}
    for run in program.body.instructions:
        if not isinstance(run, Run) or (part := part_taken(run, program.slots)) is None:
            continue
        if run.inputs[0] in joins and (fetch := _part(program, run, part, joins[run.inputs[0]])):
            found[fetch.slot] = fetch
    return found


def _part(program: MethodProgram, run: Run, part: Part, names: tuple[str, ...]) -> Fetch | None:
    """What to ask for a part of weights: of those in a row some, or a part of one; None where the whole has to be cut."""
    types = {w.name: w.type for w in program.weights if w.name in names}
    if len(names) == 1:
        is_whole = types[names[0]] == program.slots[run.inputs[0]].type
        return Fetch(run.outputs[0], names, part) if is_whole else None
    if part.axis or part.blocks or len(names) % part.world or len(set(types.values())) > 1:
        return None
    ((begin, end),) = part.ranges(len(names))
    return Fetch(run.outputs[0], names[begin:end])


def _joins(program: MethodProgram) -> dict[int, tuple[str, ...]]:
    """Return for each slot that is whole weights in a row, under some shape, the weights' names."""
    slots = program.slots
    joins: dict[int, tuple[str, ...]] = {
        w.structure.slot: (w.name,) for w in program.weights if w.structure.is_leaf
    }
    known = {binding.symbol for binding in program.dims}
    for instruction in program.body.instructions:
        if not isinstance(instruction, Run) or len(instruction.outputs) != 1:
            continue
        if not (_keeps_order(instruction) and all(i in joins for i in instruction.inputs)):
            continue
        types = [slots[i].type for i in (*instruction.inputs, *instruction.outputs)]
        if len({type.dtype for type in types if isinstance(type, TensorType)}) == 1 and _is_known(
            types[-1], known
        ):
            joins[instruction.outputs[0]] = tuple(name for i in instruction.inputs for name in joins[i])
    return joins


def _keeps_order(run: Run) -> bool:
    """Whether the elements of the result are those of the operands, one operand after the other."""
    op = OPS.get(run.op)
    return op is not None and op.keeps_order(run.attrs)


def _is_known(type: object, known: Collection[Symbol]) -> bool:
    sizes = type.shape if isinstance(type, TensorType) else ()
    return all(symbol in known for size in sizes if isinstance(size, Dim) for symbol in size.symbols)


def _with_frees(actions: Sequence[Action]) -> tuple[Step, ...]:
    """Say after which step each slot is dead. Constants, dims and sizes stay: they are in no step's results."""
    made = {slot for action in actions if not isinstance(action, Match) for slot in action.outputs}
    live: set[int] = set()
    steps: list[Step] = []
    for action in reversed(actions):
        touched = dict.fromkeys([*action.reads(), *action.outputs])
        steps.append(Step(action, tuple(slot for slot in touched if slot in made and slot not in live)))
        live.update(touched)
    return tuple(reversed(steps))
