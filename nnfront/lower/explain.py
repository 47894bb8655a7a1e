# SPDX-License-Identifier: Apache-2.0
"""A program as a table: for each instruction its op, its kernel, what it costs and why that kernel was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nnfront.dims import Dim, Size, substitute
from nnfront.lower.cost import bytes_of, flops_of
from nnfront.lower.instructions import Block, Branch, Match, Run
from nnfront.lower.program import MethodProgram, Program

HEADER = ("method", "op", "kernel", "bytes", "flops", "module", "why")


def explain(program: Program, sizes: Mapping[str, int], method: str | None = None) -> str:
    """Return the table, of one method if it is given; `sizes` gives numbers for dims by name, other dims stay as they are.

    Instructions that differ in nothing but their module are one line with a count.
    """
    rows: list[tuple[str, ...]] = [HEADER]
    for each in (*program.transforms.values(), *program.methods.values()):
        if method in (None, each.name):
            rows += _grouped(each, sizes)
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return (
        "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        + "\n"
    )


def _grouped(method: MethodProgram, sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for run in _runs(method.setup, "setup: "):
        groups.setdefault(_row(method, run, sizes), []).append(run[1].module)
    for run in _runs(method.body, ""):
        groups.setdefault(_row(method, run, sizes), []).append(run[1].module)
    for row, modules in groups.items():
        where = (
            modules[0]
            if len(modules) == 1
            else f"{modules[0]} and {len(modules) - 1} more"
            if modules[0]
            else f"{len(modules)} times"
        )
        *first, why = row
        yield (*first, where, why)


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


def _row(method: MethodProgram, found: tuple[str, Run], sizes: Mapping[str, int]) -> tuple[str, ...]:
    prefix, run = found
    costs = (bytes_of(run, method.slots), flops_of(run, method.slots))
    return (method.name, prefix + run.op, run.kernel, *(_number(cost, sizes) for cost in costs), _why(run))


def _why(run: Run) -> str:
    """Why this kernel, and why not those that were asked before."""
    return "; ".join([run.why, *(f"not {reason}" for reason in run.refused)])


def _number(size: Size, sizes: Mapping[str, int]) -> str:
    if isinstance(size, Dim):
        size = substitute(size, {s: sizes[s.name] for s in size.symbols if s.name in sizes})
    return f"{size:,}" if isinstance(size, int) else str(size)
