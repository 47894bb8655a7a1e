# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call: a table of rules for each target.

The first rule of an op that applies decides; without one the op's torch reference runs. A rule may see the call as another one
(`matmul(x, permute_dims(w))` as `linear(x, w)`), looks at types and operands, and names a kernel. What becomes dead by that is
dropped afterwards. To teach a target another kernel, add a rule to its table and a function under its name to the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nnfront.ir import TensorType, Type
from nnfront.lower.frame import Frame
from nnfront.lower.instructions import Block, Branch, Instruction, Run


@dataclass
class Context:
    """What a rule may look at and add to: the slots, and the instruction that made each value so far."""

    frame: Frame
    makers: dict[int, Run]
    shared: dict[Any, tuple[int, ...]] = field(
        default_factory=dict
    )  # what rules have emitted for several calls
    emitted: list[Run] = field(default_factory=list)

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


View: TypeAlias = Callable[[Run, Context], Run | None]


def as_is(run: Run, context: Context) -> Run:
    """The call itself."""
    return run


@dataclass(frozen=True)
class Rule:
    """Calls of `op` run `kernel` where `when` holds. `view` sees the call as another one first; None: the rule does not apply.

    `why` is what `explain` shows.
    """

    op: str
    kernel: str
    why: str
    when: Callable[[Run, Context], bool]
    view: View = as_is


def select(block: Block, frame: Frame, table: Sequence[Rule]) -> Block:
    """Return the block with the kernels that the table chooses."""
    rules: dict[str, list[Rule]] = {}
    for rule in table:
        rules.setdefault(rule.op, []).append(rule)
    return _select(block, rules, Context(frame, {}))


def _select(block: Block, rules: Mapping[str, Sequence[Rule]], outside: Context) -> Block:
    context = Context(outside.frame, dict(outside.makers), dict(outside.shared))
    chosen: list[Instruction] = []
    for instruction in block.instructions:
        if isinstance(instruction, Branch):
            then = _select(instruction.then, rules, context)
            otherwise = _select(instruction.otherwise, rules, context)
            instruction = replace(instruction, then=then, otherwise=otherwise)
        elif isinstance(instruction, Run):
            instruction = _choose(instruction, rules.get(instruction.op, ()), context)
            for run in (*context.emitted, instruction):
                context.makers.update((slot, run) for slot in run.outputs)
            chosen += context.emitted
            context.emitted.clear()
        chosen.append(instruction)
    return replace(block, instructions=tuple(chosen))


def _choose(run: Run, rules: Sequence[Rule], context: Context) -> Run:
    for rule in rules:
        seen = rule.view(run, context)
        if seen is not None and rule.when(seen, context):
            return replace(seen, kernel=rule.kernel, why=rule.why)
        context.emitted.clear()
    return run
