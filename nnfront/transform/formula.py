# SPDX-License-Identifier: Apache-2.0
"""The results of a weight transform as expressions over names of weights: `concat(a.weight, b.weight, dim=0)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnfront.lower import Branch, MethodProgram, Run, Slot

MOST_CHARACTERS = 400
"""A longer expression over intermediate values is shortened in the middle; the weights it reads are listed beside it."""


def formulas(program: MethodProgram) -> Iterator[tuple[str, int, str, tuple[str, ...]]]:
    """Yield for each result its name, slot, expression, and the weights it is made of in order of occurrence."""
    texts: dict[int, str] = {w.structure.slot: w.name for w in program.weights if w.structure.is_leaf}
    sources: dict[int, tuple[str, ...]] = {slot: (name,) for slot, name in texts.items()}
    for instruction in program.body.instructions:
        inputs = list(dict.fromkeys(instruction.reads()))
        used = tuple(dict.fromkeys(name for slot in inputs for name in sources.get(slot, ())))
        outputs = instruction.outputs
        if isinstance(instruction, Run):
            text = _call(instruction, program.slots, texts)
        elif isinstance(instruction, Branch):
            text = f"if {_operand(instruction.condition, program.slots, texts)}: ... else: ..."
        else:
            continue
        for i, slot in enumerate(outputs):
            texts[slot] = text if len(outputs) == 1 else f"{text}[{i}]"
            sources[slot] = used
    for name, slot in program.results.items():
        yield name, slot, _operand(slot, program.slots, texts), sources.get(slot, ())


def _call(run: Run, slots: Sequence[Slot], texts: Mapping[int, str]) -> str:
    operands = [_operand(slot, slots, texts) for slot in run.inputs]
    attrs = [f"{name}={_value(value)}" for name, value in run.attrs.items()]
    attrs += [f"{name}={slots[slot]}" for name, slot in run.sized.items()]
    text = f"{run.op}({', '.join([*operands, *attrs])})"
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if isinstance(value, str) else str(value)


def _operand(slot: int, slots: Sequence[Slot], texts: Mapping[int, str]) -> str:
    return texts[slot] if slot in texts else str(slots[slot])
