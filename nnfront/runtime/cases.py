# SPDX-License-Identifier: Apache-2.0
"""Special cases while a method runs: how often each was taken, which one a call takes and why, and what asking costs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nnfront.cases.conditions import GENERAL, asked_for, condition_text, from_plain, meets, parts_of
from nnfront.dims import evaluate, parse
from nnfront.lower import MethodProgram, Run
from nnfront.runtime.dispatch_tree import ENTER, entered
from nnfront.runtime.execute import Frame, Resolve


class Hits:
    """Counts calls by case, from several threads: a count is one call of a function written in C, which no other thread interrupts."""

    def __init__(self, program: MethodProgram) -> None:
        found = entered(program.body)
        ordered = [text for text in program.cases if text in found]
        self._counts = {text: itertools.count() for text in dict.fromkeys([*ordered, *found])}
        self._reads = dict.fromkeys(self._counts, 0)
        self._lock = threading.Lock()

    def resolve(self, run: Run, resolve: Resolve) -> Callable[..., Any]:
        """Return the function for an instruction: the counter of a case, else what `resolve` gives."""
        return self._counts[run.attrs["case"]].__next__ if run.op == ENTER else resolve(run)

    def read(self) -> dict[str, int]:
        """Return how often each case was taken; empty if there are none."""
        with self._lock:  # looking at a counter counts as well, so that is subtracted
            numbers = {text: next(count) - self._reads[text] for text, count in self._counts.items()}
            for text in self._reads:
                self._reads[text] += 1
        return numbers


@dataclass(frozen=True)
class CheckResult:
    """One condition: its text, whether it holds (None: it was not asked), what is there, and the bytes that asking reads."""

    text: str
    holds: bool | None
    got: str
    bytes_read: int

    def __str__(self) -> str:
        cost = f"reads {self.bytes_read:,} bytes" if self.bytes_read else "reads no memory"
        if self.holds is None:
            return f"{self.text}: {f'{self.got}, ' if self.got else ''}not asked ({cost})"
        return f"{self.text}: {'yes' if self.holds else 'no'}, {self.got} ({cost})"


@dataclass(frozen=True)
class CaseResult:
    """One case: its text, whether it holds, and its conditions."""

    text: str
    holds: bool
    checks: tuple[CheckResult, ...]


@dataclass(frozen=True)
class Explanation:
    """Which case a call takes and why. `taken` is its text, `general` if none holds; `dims` are the numbers of the call's dims."""

    method: str
    taken: str
    dims: Mapping[str, int]
    cases: tuple[CaseResult, ...]
    hits: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.taken}"]
        if self.dims:
            lines.append(f"  dims: {', '.join(f'{name} = {n}' for name, n in self.dims.items())}")
        seen = False
        for i, case in enumerate(self.cases):
            state = (
                "does not hold" if not case.holds else "holds, but comes later" if seen else "holds, and runs"
            )
            seen = seen or case.holds
            lines.append(f"  case {i}, {case.text}: {state}{_taken(self.hits, case.text)}")
            lines += [f"    {check}" for check in case.checks]
        if self.cases:
            lines.append(f"  general: {'runs' if not seen else 'comes last'}{_taken(self.hits, GENERAL)}")
        else:
            lines.append("  there are no special cases")
        return "\n".join(lines)


@dataclass(frozen=True)
class CaseList:
    """The cases of a method, without a call: their texts in order, and how often each was taken.

    `graphs` says what of its calls has been captured on a GPU; it is empty on a CPU.
    """

    method: str
    hits: Mapping[str, int]
    graphs: str = ""

    def __str__(self) -> str:
        end = [self.graphs] if self.graphs else []
        if not self.hits:
            return "\n".join([f"{self.method}: there are no special cases", *end])
        cases = (f"  {text}: taken {_times(n)}" for text, n in self.hits.items())
        return "\n".join([f"{self.method}:", *cases, *end])


def explain_call(program: MethodProgram, frame: Frame, hits: Mapping[str, int]) -> Explanation:
    """Say which case a call takes whose arguments and dims are in the frame."""
    numbers = {binding.symbol.name: frame[binding.slot] for binding in program.dims}
    values = {a.name: frame[a.structure.slot] for a in program.arguments if a.structure.is_leaf}
    cases = tuple(
        _case(text, from_plain(conditions), numbers, values) for text, conditions in program.cases.items()
    )
    taken = next((case.text for case in cases if case.holds), GENERAL)
    return Explanation(program.name, taken, numbers, cases, hits)


def _case(
    text: str, conditions: Mapping[str, Any], numbers: Mapping[str, int], values: Mapping[str, Any]
) -> CaseResult:
    """Ask the conditions of one case: numbers first, then tensors, and those only if all numbers are right."""
    cheap, dear = [], []
    for name, condition in conditions.items():
        value = values.get(name)
        if isinstance(value, torch.Tensor) and name not in numbers:
            dear.append((name, condition, value))
        else:
            number = value if name not in numbers and name in values else evaluate(parse(name), numbers)
            cheap.append((name, condition, number))
    checks = [
        CheckResult(condition_text(name, part), meets(number, part), f"{name} is {number}", 0)
        for name, condition, number in cheap
        for part in parts_of(condition)
    ]
    is_open = all(check.holds for check in checks)
    checks += [
        _tensor_check(name, part, value, is_open)
        for name, condition, value in dear
        for part in parts_of(condition)
    ]
    return CaseResult(text, all(check.holds for check in checks), tuple(checks))


def _tensor_check(name: str, condition: Any, value: torch.Tensor, is_open: bool) -> CheckResult:
    text, cost = condition_text(name, condition), value.numel() * value.element_size()
    if not is_open:
        return CheckResult(text, None, "", cost)
    differs = int((value != asked_for(condition, value)).sum())
    if not value.ndim:
        got = f"{name} is {value.item()}"
    elif differs:
        got = f"{differs} of {value.numel()} elements differ"
    else:
        got = f"all {value.numel()} elements are right"
    return CheckResult(text, not differs, got, cost)


def _taken(hits: Mapping[str, int], text: str) -> str:
    return f"; taken {_times(hits[text])} so far" if text in hits else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
