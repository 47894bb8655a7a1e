# SPDX-License-Identifier: Apache-2.0
"""What special cases would do: the variants, what asking for each costs, and what cases say about one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfront import dtypes
from nnfront.cases.conditions import Case
from nnfront.cases.coverage import is_covered, overlap
from nnfront.dims import Size, product, total
from nnfront.ir import TensorType


@dataclass(frozen=True)
class CaseEntry:
    """One case: its text, how many host numbers it asks for, the tensors that it reads and their bytes."""

    text: str
    numbers: int
    reads: tuple[str, ...]
    bytes_read: Size

    def __str__(self) -> str:
        parts = [f"asks {self.numbers} number{'s' if self.numbers != 1 else ''}"] if self.numbers else []
        if self.reads:
            parts.append(f"reads {', '.join(map(repr, self.reads))}, {self.bytes_read} bytes")
        return f"{self.text}: {', '.join(parts)}"


@dataclass(frozen=True)
class CaseReport:
    """The cases of one function, in order. Pairs and numbers are positions in `cases`."""

    function: str
    cases: tuple[CaseEntry, ...]
    overlaps: tuple[tuple[int, int], ...]  # the first of two takes what meets both
    unreachable: tuple[int, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.function}: {len(self.cases)} case{'s' if len(self.cases) != 1 else ''}, then the general function"
        ]
        lines += [f"  {i}: {entry}" for i, entry in enumerate(self.cases)]
        lines += [f"  overlap: what meets {a} and {b} goes to {a}" for a, b in self.overlaps]
        lines += [
            f"  never reached: {i}, the cases before it take all of its inputs" for i in self.unreachable
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class SpecialCasesReport:
    """What each function would get."""

    functions: tuple[CaseReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.functions)) or "no function has special cases"


def describe(function: str, cases: Sequence[Case]) -> CaseReport:
    """Return the report on one function."""
    pairs = [(i, j) for j in range(len(cases)) for i in range(j) if overlap(cases[i], cases[j])]
    lost = [i for i, case in enumerate(cases) if is_covered(case, cases[:i])]
    overlaps = tuple((i, j) for i, j in pairs if j not in lost)
    return CaseReport(function, tuple(map(_entry, cases)), overlaps, tuple(lost))


def _entry(case: Case) -> CaseEntry:
    tensors = [v for v in case.values if v.reads_tensor]
    sizes = [
        product([*v.type.shape, dtypes.size_bytes(v.type.dtype), len(v.values)])
        for v in tensors
        if isinstance(v.type, TensorType)
    ]
    numbers = len(case.dims) + len(case.values) - len(tensors)
    return CaseEntry(case.text, numbers, tuple(v.name for v in tensors), total(sizes))
