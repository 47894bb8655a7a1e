# SPDX-License-Identifier: Apache-2.0
"""Where the time of a call goes: each instruction by itself, and the whole call as it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from nnfront.ir.summary import columns
from nnfront.lower import Instruction, Match, Run

HEADER = ("op", "kernel", "calls", "ms", "share", "GB/s", "GFLOP/s", "module")
RUNS = 5
"""So many calls are measured, after one to warm up."""


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction of a call and how long it takes, the median of several; `nbytes` and `flops` are None where a size is not known."""

    op: str
    kernel: str
    module: str
    line: str
    seconds: float
    nbytes: int | None
    flops: int | None


@dataclass(frozen=True)
class Profile:
    """`seconds`: the call as it runs, the median of several; `events`: its instructions, run one by one, in which nothing is joined or captured."""

    method: str
    dims: Mapping[str, int]
    seconds: float
    events: tuple[Event, ...]

    @cached_property
    def apart(self) -> float:
        """The seconds of all instructions, one by one."""
        return sum(event.seconds for event in self.events)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, int | None, int | None], list[Event]] = {}
        for event in self.events:
            groups.setdefault((event.op, event.kernel, event.nbytes, event.flops), []).append(event)
        rows: list[tuple[str, ...]] = [HEADER]
        for group in sorted(groups.values(), key=lambda g: -sum(e.seconds for e in g)):
            first, spent = group[0], sum(e.seconds for e in group)
            where = first.module if len(group) == 1 else f"{first.module} and {len(group) - 1} more"
            rates = (_rate(n and n * len(group), spent) for n in (first.nbytes, first.flops))
            share = f"{100 * spent / self.apart:.1f} %"
            rows.append((first.op, first.kernel, str(len(group)), f"{1e3 * spent:.3f}", share, *rates, where))
        sizes = ", ".join(f"{name}={number}" for name, number in self.dims.items())
        head = f"{self.method}({sizes}): {1e3 * self.seconds:.3f} ms as it runs, {1e3 * self.apart:.3f} ms one by one"
        return "\n".join([head, *columns(rows, right=range(2, 7))]) + "\n"

    def trace(self) -> dict[str, Any]:
        """Return the events, one after the other, in the format that chrome://tracing and Perfetto read."""
        begins = accumulate((event.seconds for event in self.events), initial=0.0)
        return {
            "traceEvents": [
                {
                    "name": f"{event.op} ({event.kernel})",
                    "cat": event.op,
                    "ph": "X",
                    "ts": 1e6 * begin,
                    "dur": 1e6 * event.seconds,
                    "pid": 0,
                    "tid": 0,
                    "args": {
                        "module": event.module,
                        "line": event.line,
                        "bytes": event.nbytes,
                        "flops": event.flops,
                    },
                }
                for event, begin in zip(self.events, begins, strict=False)
            ]
        }


def _rate(count: int | None, seconds: float) -> str:
    return "?" if count is None else f"{count / 1e9 / seconds:.1f}" if count else ""


class Clock:
    """Times steps: `joined` is a `Join` that leaves each by itself and notes how long it runs."""

    def __init__(self, device: torch.device) -> None:
        self._runs: list[list[tuple[Instruction, float]]] = []
        self._wait = partial(torch.get_device_module(device).synchronize, device)

    def now(self) -> float:
        """Seconds, with the work on the device done."""
        self._wait()
        return time.perf_counter()

    def begin(self) -> None:
        self._runs.append([])

    def measured(self) -> list[tuple[Instruction, float]]:
        """Return each instruction with the median of its seconds in all calls but the first, which all ran the same."""
        return [
            (same[0][0], statistics.median(seconds for _, seconds in same))
            for same in zip(*self._runs[1:], strict=True)
        ]

    def joined(
        self, pairs: Sequence[tuple[Any, Instruction | None]], *_: Any
    ) -> list[tuple[Any, Instruction | None]]:
        """Return the steps, timed: those of instructions that run something."""
        return [
            (self._timed(step, instruction) if isinstance(instruction, Run | Match) else step, instruction)
            for step, instruction in pairs
        ]

    def _timed(self, step: Callable[[Any], None], instruction: Instruction) -> Callable[[Any], None]:
        def timed(frame: Any) -> None:
            begin = self.now()
            step(frame)
            self._runs[-1].append((instruction, self.now() - begin))

        return timed
