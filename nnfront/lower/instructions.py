# SPDX-License-Identifier: Apache-2.0
"""What a program is made of: slots, and instructions over them.

    slot         a place of the frame: an argument, a weight, a constant, a dim, a size computed from dims, or a value
    instruction  `Run` a kernel, `Branch` on a condition, `Match` a value against a shape that may define dims
    block        instructions in order, the sizes to compute before them, and the slots of their results

A tuple is no value of its own: `Structure` says how slots make up a nested argument or result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from nnfront.dims import Symbol
from nnfront.ir import OPS, Constant, Type, type_text

PACK = "tuple"
"""Kernel and op of the instruction that makes one value of several."""
ONE_PIECE = "one_piece"
"""Kernel of a view whose results are memory of their own, row by row."""

SlotKind: TypeAlias = Literal["argument", "weight", "constant", "dim", "size", "value"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a frame. `value` is what it holds from the start: a literal, a constant's bytes, or a size with dims in it."""

    name: str
    kind: SlotKind
    type: Type | None = None
    value: Any = None

    def __str__(self) -> str:
        if self.kind == "constant":
            return (
                f"constant {type_text(self.type)}"
                if self.type is not None and isinstance(self.value, Constant)
                else repr(self.value)
            )
        return _size_text(self.value) if self.kind == "size" else self.name


def _size_text(value: Any) -> str:
    """A size as text: an expression, or a bracketed list of them."""
    return f"[{', '.join(map(_size_text, value))}]" if isinstance(value, (tuple, list)) else str(value)


def _names(slots: Sequence[Slot], indices: Iterable[int]) -> str:
    return ", ".join(str(slots[i]) for i in indices)


def _where(module: str, frees: str) -> str:
    parts = [part for part in (module, f"frees {frees}" if frees else "") if part]
    return f"    # {'; '.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True)
class Structure:
    """How slots make up one value: a slot, or a tuple of structures, or a dict of them if there are names."""

    slot: int = -1
    fields: tuple[Structure, ...] = ()
    names: tuple[str, ...] | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether this is one slot."""
        return self.slot >= 0

    def leaves(self) -> Iterator[int]:
        """Yield the slots in order."""
        if self.is_leaf:
            yield self.slot
        for part in self.fields:
            yield from part.leaves()

    def text(self, slots: Sequence[Slot]) -> str:
        """Return it with the slots' names: `y`, `(y, z)`, `{logits: y}`."""
        if self.is_leaf:
            return str(slots[self.slot])
        parts = [part.text(slots) for part in self.fields]
        if self.names is None:
            return f"({', '.join(parts)})"
        return f"{{{', '.join(f'{n}: {p}' for n, p in zip(self.names, parts, strict=True))}}}"


@dataclass(frozen=True, slots=True)
class Run:
    """Run `kernel` on the slots `inputs` and store its result, taken apart as `result` says.

    `attrs` are constant keyword arguments, `sized` those that a slot holds. `frees` are dead afterwards.
    `module` is the module path, `line` the author's line, `why` the reason for the kernel, `refused` the reasons of others not to run it.
    `body` is what the call of a primitive function stands for: what runs instead if no kernel takes it.
    """

    kernel: str
    op: str
    inputs: tuple[int, ...]
    result: Structure
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sized: Mapping[str, int] = field(default_factory=dict)
    is_pure: bool = True
    frees: tuple[int, ...] = ()
    module: str = ""
    line: str = ""
    why: str = "reference"
    refused: tuple[str, ...] = ()
    body: Block | None = None

    @property
    def is_view(self) -> bool:
        """Whether the results are the memory of operands that are in row-major order."""
        return self.op == PACK or (self.op in OPS and OPS[self.op].is_view)

    def freeing(self, frees: tuple[int, ...]) -> Run:
        """Return it with `frees`. As `dataclasses.replace`, which takes ten times as long."""
        return Run(
            self.kernel,
            self.op,
            self.inputs,
            self.result,
            self.attrs,
            self.sized,
            self.is_pure,
            frees,
            self.module,
            self.line,
            self.why,
            self.refused,
            self.body,
        )

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots that it writes."""
        return tuple(self.result.leaves())

    @property
    def operands(self) -> tuple[int, ...]:
        """The slots that it reads."""
        return (*self.inputs, *self.sized.values())

    def reads(self) -> Iterator[int]:
        """Yield the slots that it reads."""
        yield from self.operands

    def text(self, slots: Sequence[Slot], indent: str) -> list[str]:
        """Return its lines."""
        attrs = [f"{k}={v!r}" if isinstance(v, str) else f"{k}={v}" for k, v in self.attrs.items()]
        attrs += [f"{k}={slots[i]}" for k, i in self.sized.items()]
        operands = ", ".join([*(str(slots[i]) for i in self.inputs), *attrs])
        result = self.result.text(slots)
        if self.result.is_leaf and (type := slots[self.result.slot].type) is not None:
            result += f": {type_text(type)}"
        return [
            f"{indent}{result} = {self.kernel}({operands}){_where(self.module, _names(slots, self.frees))}"
        ]


@dataclass(frozen=True, slots=True)
class Branch:
    """Run one of two blocks, by the truth of the slot `condition`; both put their results in `outputs`."""

    condition: int
    then: Block
    otherwise: Block
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    module: str = ""
    line: str = ""

    @property
    def operands(self) -> tuple[int, ...]:
        """The slots that it reads itself."""
        return (self.condition,)

    def reads(self) -> Iterator[int]:
        """Yield the slots that it and its blocks read and do not write."""
        yield self.condition
        for block in (self.then, self.otherwise):
            yield from block.reads()

    def mapped(self, change: Callable[[Block], Block]) -> Branch:
        """Return it with both blocks changed."""
        return replace(self, then=change(self.then), otherwise=change(self.otherwise))

    def freeing(self, frees: tuple[int, ...]) -> Branch:
        """Return it with `frees`."""
        return replace(self, frees=frees)

    def text(self, slots: Sequence[Slot], indent: str) -> list[str]:
        """Return its lines."""
        inner = indent + "  "
        return [
            f"{indent}{_names(slots, self.outputs)} = if {slots[self.condition]}:{_where(self.module, _names(slots, self.frees))}",
            *self.then.text(slots, inner),
            f"{inner}{_names(slots, self.then.results)}",
            f"{indent}else:",
            *self.otherwise.text(slots, inner),
            f"{inner}{_names(slots, self.otherwise.results)}",
        ]


@dataclass(frozen=True, slots=True)
class Match:
    """Check that the value's type is `type`, bind the dims that it defines, then compute `sizes`. The value stays where it is."""

    input: int
    type: Type
    defines: tuple[tuple[Symbol, int], ...]
    knows: tuple[tuple[Symbol, int], ...]
    sizes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    module: str = ""
    line: str = ""

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots that it fills: those of the dims and sizes that it defines."""
        return (*(slot for _, slot in self.defines), *self.sizes)

    @property
    def operands(self) -> tuple[int, ...]:
        """The slots that it reads."""
        return (self.input,)

    def reads(self) -> Iterator[int]:
        """Yield the slots that it reads."""
        yield self.input

    def freeing(self, frees: tuple[int, ...]) -> Match:
        """Return it with `frees`."""
        return replace(self, frees=frees)

    def text(self, slots: Sequence[Slot], indent: str) -> list[str]:
        """Return its lines."""
        defines = ", ".join(str(symbol) for symbol, _ in self.defines)
        value = slots[self.input]
        return [
            f"{indent}match {value}: {type_text(self.type)}{f' defines {defines}' if defines else ''}{_where(self.module, '')}"
        ]


Instruction: TypeAlias = Run | Branch | Match


def place(method: str, instruction: Instruction | None) -> str:
    """Return where an instruction comes from: module path, method, line of the author's code."""
    parts = [
        instruction.module if instruction is not None else "",
        f"in method {method!r}" if method else "",
        f"({instruction.line})" if instruction is not None and instruction.line else "",
    ]
    return " ".join(part for part in parts if part).removeprefix("in ")


@dataclass(frozen=True, slots=True)
class Block:
    """Sizes to compute first, instructions in order, and the slots of the results."""

    instructions: tuple[Instruction, ...]
    results: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def reads(self) -> Iterator[int]:
        """Yield the slots that it reads and does not write itself, its results included."""
        made: set[int] = set()
        for instruction in self.instructions:
            yield from (i for i in instruction.reads() if i not in made)
            made.update(instruction.outputs)
        yield from (i for i in self.results if i not in made)

    @property
    def first_result(self) -> int:
        """The index of the first of the instructions at the end that do nothing but compute results.

        They run outside of torch's inference mode, so that a caller may write to what they make. Other results are copied.
        """
        count, results = len(self.instructions), set(self.results)
        for run in reversed(self.instructions):
            if not (isinstance(run, Run) and run.is_pure and not results.isdisjoint(run.outputs)):
                break
            count -= 1
        return count

    def walk(self) -> Iterator[Instruction]:
        """Yield every instruction, those of branches after the branch."""
        for instruction in self.instructions:
            yield instruction
            if isinstance(instruction, Branch):
                yield from instruction.then.walk()
                yield from instruction.otherwise.walk()

    def text(self, slots: Sequence[Slot], indent: str) -> list[str]:
        """Return the lines of its instructions."""
        return [line for instruction in self.instructions for line in instruction.text(slots, indent)]
