# SPDX-License-Identifier: Apache-2.0
"""What happens to instructions after their kernels are chosen: dead ones go, load-time ones move, sizes and frees get a place.

before:
    b = permute_dims(w)      # nobody reads it
    c = permute_dims(v)
    y = matmul(x, c)
after:
    setup: c = permute_dims(v)
    body:  y = matmul(x, c)      # frees x
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

from nnfront.dims import Symbol
from nnfront.ir import OPS, TensorType
from nnfront.lower.instructions import Block, Branch, Instruction, Match, Run, Slot
from nnfront.lower.slots import Frame, dims_in

# A result that depends on nothing is computed once if it is no larger than this: 1 MiB of tables is worth keeping, a zeroed
# buffer of the size of an activation is not.
KEPT_BYTES = 1 << 20


def finish(body: Block, frame: Frame, load_dims: Collection[Symbol], *, hoists: bool) -> tuple[Block, Block]:
    """Return the block that runs at load and the block that runs on each call. `load_dims` are the dims that weights bind."""
    body = _without_dead(body)
    early: list[Instruction] = []
    if hoists:
        body, early = _split_early(body, frame.slots, load_dims)
    kept = frozenset(slot for instruction in early for slot in instruction.outputs)
    setup = _with_sizes(Block(tuple(early)), frame.slots, set(load_dims), set())
    bound = set(frame.dims) - set(_matched(body))
    body = _with_sizes(body, frame.slots, bound, set(setup.sizes))
    return setup, _with_frees(body, frame.slots, kept)


def _without_dead(block: Block, live: Iterable[int] = ()) -> Block:
    """Drop pure instructions whose outputs nobody reads; `live` are read outside."""
    needed = {*live, *block.results}
    kept: list[Instruction] = []
    for instruction in reversed(block.instructions):
        outputs = instruction.outputs
        if isinstance(instruction, Run) and instruction.is_pure and needed.isdisjoint(outputs):
            continue
        if isinstance(instruction, Branch):
            instruction = _used_results(instruction, needed).mapped(_without_dead)
            both = (instruction.then, instruction.otherwise)
            if not (instruction.outputs or any(block.instructions for block in both)):
                continue
        needed.update(instruction.reads())
        kept.append(instruction)
    return replace(block, instructions=tuple(reversed(kept)))


def _used_results(branch: Branch, needed: Collection[int]) -> Branch:
    keep = [i for i, slot in enumerate(branch.outputs) if slot in needed]
    if len(keep) == len(branch.outputs):
        return branch
    left = branch.mapped(lambda block: replace(block, results=tuple(block.results[i] for i in keep)))
    return replace(left, outputs=tuple(branch.outputs[i] for i in keep))


def _split_early(
    body: Block, slots: list[Slot], load_dims: Collection[Symbol]
) -> tuple[Block, list[Instruction]]:
    """Take out what can run once at load without holding more memory: views of weights, and small values of nothing at all."""
    weights = {i for i, slot in enumerate(slots) if slot.kind == "weight"}
    free = {i for i, slot in enumerate(slots) if _is_known_at_load(slot, load_dims)}
    # An external function may write to what it reads.
    effects = [run for run in body.walk() if isinstance(run, Run) and not run.is_pure]
    touched = {i for run in effects for i in run.inputs}
    early: list[Instruction] = []
    late: list[Instruction] = []
    for instruction in body.instructions:
        if isinstance(instruction, Run) and instruction.is_pure:
            inputs = instruction.operands
            if all(i in free for i in inputs) and _may_be_kept(instruction, slots, touched):
                free.update(instruction.outputs)
                early.append(instruction)
                continue
            if _is_free(instruction) and all(i in free or i in weights for i in inputs):
                weights.update(instruction.outputs)
                early.append(instruction)
                continue
        late.append(instruction)
    return replace(body, instructions=tuple(late)), early


def _is_free(run: Run) -> bool:
    """Whether the results take no memory, whatever the strides of the operands."""
    op = OPS.get(run.kernel)
    return op is not None and op.view == "always"


def _is_known_at_load(slot: Slot, load_dims: Collection[Symbol]) -> bool:
    if slot.kind == "constant":
        return True
    dims = dims_in(slot.value)
    return slot.kind in ("dim", "size") and all(symbol in load_dims for dim in dims for symbol in dim.symbols)


def _may_be_kept(run: Run, slots: list[Slot], touched: set[int]) -> bool:
    """Whether the results may be computed once for all calls: they are small, and nobody writes to them."""
    if run.op == "empty" or not touched.isdisjoint(run.outputs):
        return False
    total = 0
    for output in run.outputs:
        type = slots[output].type
        if not isinstance(type, TensorType) or type.size_bytes is None:
            return False
        total += type.size_bytes
    return total <= KEPT_BYTES


def _with_sizes(block: Block, slots: list[Slot], bound: set[Symbol], done: set[int]) -> Block:
    """Put the computation of each size where all its dims are known: on entry, or after the match that defines the last of them.

    `bound` are the dims known on entry, `done` the sizes computed before.
    """
    bound, done = set(bound), set(done)
    wanted = {
        i for instruction in block.instructions for i in instruction.operands if slots[i].kind == "size"
    }
    wanted.update(i for i in block.results if slots[i].kind == "size")
    wanted -= done

    def ready() -> tuple[int, ...]:
        now = sorted(i for i in wanted if all(s in bound for d in dims_in(slots[i].value) for s in d.symbols))
        wanted.difference_update(now)
        done.update(now)
        return tuple(now)

    entry = ready()
    instructions: list[Instruction] = []
    for instruction in block.instructions:
        if isinstance(instruction, Match):
            bound.update(symbol for symbol, _ in instruction.defines)
            instruction = replace(instruction, sizes=ready())
        elif isinstance(instruction, Branch):
            instruction = instruction.mapped(lambda inner: _with_sizes(inner, slots, bound, done))
        instructions.append(instruction)
    assert not wanted, f"no value for {[slots[i].value for i in wanted]}"
    return replace(block, instructions=tuple(instructions), sizes=entry)


def _with_frees(block: Block, slots: list[Slot], kept: Collection[int]) -> Block:
    """Say after which instruction each slot is dead; slots in `kept` belong to somebody else."""
    live = {*kept, *block.results}
    instructions: list[Instruction] = []
    for instruction in reversed(block.instructions):
        touched = dict.fromkeys([*instruction.reads(), *instruction.outputs, *_results(instruction)])
        frees = tuple(i for i in touched if i not in live and slots[i].kind in ("value", "argument"))
        live.update(touched)
        if isinstance(instruction, Branch):
            outside = set(instruction.reads()) | live
            instruction = instruction.mapped(partial(_with_frees, slots=slots, kept=outside))
        instructions.append(instruction.freeing(frees) if frees else instruction)
    return replace(block, instructions=tuple(reversed(instructions)))


def _results(instruction: Instruction) -> tuple[int, ...]:
    """What the branches of the instruction give: the outputs have it as well, so it is dead where nobody else reads it."""
    return (
        (*instruction.then.results, *instruction.otherwise.results) if isinstance(instruction, Branch) else ()
    )


def _matched(block: Block) -> Iterator[Symbol]:
    """The dims that matches define."""
    for instruction in block.walk():
        if isinstance(instruction, Match):
            yield from (symbol for symbol, _ in instruction.defines)
