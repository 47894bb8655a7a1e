# SPDX-License-Identifier: Apache-2.0
"""A program as a table: for each instruction its op, its kernel, what it costs and why that kernel was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nnfront.dims import Dim, Size, substitute, total
from nnfront.ir import OPS
from nnfront.ir.summary import columns
from nnfront.lower.cost import bytes_of, flops_of, sent_of
from nnfront.lower.instructions import Block, Branch, Match, Run
from nnfront.lower.program import MethodProgram, Program

HEADER = ("method", "op", "kernel", "bytes", "flops", "module", "why")


@dataclass(frozen=True, slots=True)
class Line:
    """Instructions of a method that differ in nothing but their module: what runs them, what one of them costs, and why that kernel.

    `op` says behind a colon where it runs if that is not on each call: at load (`setup`), in a branch, in a special case.
    """

    method: str
    op: str
    kernel: str
    bytes: Size
    flops: Size
    why: str
    refused: tuple[str, ...]
    modules: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """Return it as a row of the table."""
        first, more = self.modules[0], len(self.modules) - 1
        where = first if not more else f"{first} and {more} more" if first else f"{more + 1} times"
        why = "; ".join([self.why, *(f"not {reason}" for reason in self.refused)])
        return (self.method, self.op, self.kernel, _number(self.bytes), _number(self.flops), where, why)


def explain(program: Program, sizes: Mapping[str, int], method: str | None = None) -> str:
    """Return the table, of one method if it is given; `sizes` gives numbers for dims by name, other dims stay as they are."""
    rows = [HEADER, *(line.cells() for line in explained(program, sizes, method))]
    return "\n".join([*columns(rows), *_meetings(program, sizes, method)]) + "\n"


def _meetings(program: Program, sizes: Mapping[str, int], method: str | None) -> Iterator[str]:
    """A line for each method in which ranks meet: how often, and what a rank sends in one step of it."""
    for each in program.methods.values() if method is None else [program.methods[method]]:
        found = [run for _, run in _runs(each.body, "") if run.op in OPS and OPS[run.op].collective]
        if found:
            names = ", ".join(f"{n} {name}" for name, n in Counter(run.op for run in found).items())
            sent = _with(total([sent_of(run, each.slots) for run in found]), sizes)
            yield f"{each.name}: {found[0].attrs['world']} ranks meet for {names}; each sends {_number(sent)} bytes in a step"


def explained(program: Program, sizes: Mapping[str, int], method: str | None = None) -> list[Line]:
    """Return what `explain` prints."""
    methods = (*program.transforms.values(), *program.methods.values())
    return [line for each in methods if method in (None, each.name) for line in _lines(each, sizes)]


def _lines(method: MethodProgram, sizes: Mapping[str, int]) -> Iterator[Line]:
    groups: dict[tuple[object, ...], Line] = {}
    modules: dict[tuple[object, ...], list[str]] = {}
    for prefix, run in (*_runs(method.setup, "setup: "), *_runs(method.body, "")):
        moved, computed = (_with(cost(run, method.slots), sizes) for cost in (bytes_of, flops_of))
        key = (prefix + run.op, run.kernel, str(moved), str(computed), run.why, run.refused)
        if key not in groups:
            groups[key] = Line(
                method.name, prefix + run.op, run.kernel, moved, computed, run.why, run.refused, ()
            )
        modules.setdefault(key, []).append(run.module)
    return (replace(line, modules=tuple(modules[key])) for key, line in groups.items())


def _runs(block: Block, prefix: str) -> Iterator[tuple[str, Run]]:
    for instruction in block.instructions:
        match instruction:
            case Run(op="enter_case"):
                pass
            case Run():
                yield prefix, instruction
            case Branch():
                yield from _runs(instruction.then, _inside(prefix, "if", instruction.then))
                yield from _runs(instruction.otherwise, _inside(prefix, "else", instruction.otherwise))
            case Match():
                pass


def _inside(prefix: str, word: str, block: Block) -> str:
    """What stands before the ops of a branch: the special case that it is, if it is one."""
    for instruction in block.instructions:
        if isinstance(instruction, Run) and instruction.op == "enter_case":
            return f"{instruction.attrs['case']}: "
    return f"{prefix}{word}: "


def _with(size: Size, sizes: Mapping[str, int]) -> Size:
    if not isinstance(size, Dim):
        return size
    return substitute(size, {s: sizes[s.name] for s in size.symbols if s.name in sizes})


def _number(size: Size) -> str:
    return f"{size:,}" if isinstance(size, int) else str(size)
