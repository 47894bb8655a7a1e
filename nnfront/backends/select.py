# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call: a table of rules for each target.

The first rule of an op that accepts a call decides; without one the op's torch reference runs. A rule may see the call as another one
(`matmul(x, permute_dims(w))` as `linear(x, w)`), looks at types and operands, and names a kernel, or says why it refuses. What becomes
dead by that is dropped afterwards. Calls of primitive functions are chosen for in the same way, by the region's name; one that no rule
accepts is replaced by what it stands for.

To teach a target another kernel, add a rule to its table and a function under its name to the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nnfront.ir import TensorType, Type
from nnfront.lower.instructions import Block, Branch, Instruction, Run
from nnfront.lower.slots import Frame


@dataclass
class Context:
    """What a rule may look at and add to: the slots, and the instruction that made each value so far."""

    frame: Frame
    makers: dict[int, Run]
    target: str = "cpu"
    shared: dict[Any, tuple[int, ...]] = field(
        default_factory=dict
    )  # what rules have emitted for several calls
    emitted: list[Run] = field(default_factory=list)

    def inside(self) -> Context:
        """The context of a branch: what is made there is not there afterwards."""
        return Context(self.frame, dict(self.makers), self.target, dict(self.shared))

    def type(self, slot: int) -> Type | None:
        """Type of a slot."""
        return self.frame.slots[slot].type

    def tensor(self, slot: int) -> TensorType:
        """Type of a slot that holds a tensor."""
        type = self.frame.slots[slot].type
        assert isinstance(type, TensorType)
        return type

    def is_none(self, slot: int) -> bool:
        """Whether the slot stands for an operand that is absent."""
        return self.frame.slots[slot].kind == "constant" and self.frame.slots[slot].value is None

    def is_bound_at_load(self, slot: int) -> bool:
        """Whether the slot is a weight, or a view of one."""
        maker = self.makers.get(slot)
        if maker is not None:
            return maker.op == "permute_dims" and self.is_bound_at_load(maker.inputs[0])
        return self.frame.slots[slot].kind == "weight"

    def emit(
        self,
        like: Run,
        op: str,
        inputs: tuple[int, ...],
        attrs: Mapping[str, Any],
        type: Type,
        *,
        kernel: str = "",
    ) -> tuple[int, ...]:
        """Put another call in front of this one; return the slots of its result."""
        result = self.frame.structure(kernel or op, "value", type)
        run = Run(kernel or op, op, inputs, result, attrs, module=like.module, line=like.line)
        self.emitted.append(replace(run, why=f"for {like.op}") if kernel else run)
        return tuple(result.leaves())


ACCEPTED = ""
"""What a rule says to a call that its kernel can run; anything else is the reason why it cannot."""

View: TypeAlias = Callable[[Run, Context], "Run | str"]

Maker: TypeAlias = Callable[[Run], Callable[..., Any]]
"""From an instruction to the function that runs it: operands by position, sized attributes by keyword."""


def as_is(run: Run, context: Context) -> Run:
    """The call itself."""
    return run


@dataclass(frozen=True)
class Rule:
    """Calls of `op` (or of primitive functions by that name) run `kernel` if `accepts` gives no reason against it.

    `why` is what `explain` shows. `view` sees the call as another one first, or says why it cannot.
    """

    op: str
    kernel: str
    why: str
    accepts: Callable[[Run, Context], str]
    view: View = as_is


def select(block: Block, frame: Frame, table: Sequence[Rule], target: str = "cpu") -> Block:
    """Return the block with the kernels that the table chooses."""
    rules: dict[str, list[Rule]] = {}
    for rule in table:
        rules.setdefault(rule.op, []).append(rule)
    return _select(block, rules, Context(frame, {}, target))


def _select(block: Block, rules: Mapping[str, Sequence[Rule]], context: Context) -> Block:
    chosen: list[Instruction] = []
    for instruction in block.instructions:
        if isinstance(instruction, Branch):
            then = _select(instruction.then, rules, context.inside())
            otherwise = _select(instruction.otherwise, rules, context.inside())
            instruction = replace(instruction, then=then, otherwise=otherwise)
        elif isinstance(instruction, Run):
            run = _choose(instruction, rules.get(instruction.op, ()), context)
            if run.body is not None and not run.kernel:
                chosen += _instead(run, rules, context)
                continue
            for made in (*context.emitted, run):
                context.makers.update((slot, made) for slot in made.outputs)
            chosen += context.emitted
            context.emitted.clear()
            instruction = run
        chosen.append(instruction)
    return replace(block, instructions=tuple(chosen))


def _instead(run: Run, rules: Mapping[str, Sequence[Rule]], context: Context) -> Iterator[Instruction]:
    """What a call stands for that no kernel takes; its last instruction tells why."""
    assert run.body is not None
    *first, last = _select(run.body, rules, context).instructions
    yield from first
    yield replace(last, refused=(*run.refused, *last.refused)) if isinstance(last, Run) else last


def _choose(run: Run, rules: Sequence[Rule], context: Context) -> Run:
    refused: list[str] = []
    shared = dict(context.shared)
    for rule in rules:
        seen = rule.view(run, context)
        reason = seen if isinstance(seen, str) else rule.accepts(seen, context)
        if isinstance(seen, Run) and reason == ACCEPTED:
            return replace(seen, kernel=rule.kernel, why=rule.why, refused=tuple(refused))
        refused.append(f"{rule.kernel}: {reason}")
        context.emitted.clear()
        context.shared = dict(shared)
    return replace(run, refused=tuple(refused)) if refused else run
