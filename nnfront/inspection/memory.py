# SPDX-License-Identifier: Apache-2.0
"""Who is in memory when: the plan of each method as data, for numbers of dims that the caller gives or that are chosen here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from nnfront.backends.table import memory_policy
from nnfront.dims import satisfies
from nnfront.lower import Program
from nnfront.memory.concrete_sizes import symbols_of
from nnfront.memory.report import report_memory

USUAL = 128
"""What a dim with an upper bound is if nobody says: less if the bound is; one without a bound is as little as it may be, and 1 at least."""


def sizes_for(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """Return a number for each dim of the methods: the one given, or one that its facts allow."""
    sizes: dict[str, int] = {}
    for method in program.methods.values():
        for symbol in symbols_of(method):
            if symbol.name not in sizes:
                low = max(symbol.min, 1) if symbol.max is None else min(symbol.max, max(symbol.min, USUAL))
                step = 1 if symbol.max is None else -1
                sizes[symbol.name] = given.get(symbol.name) or next(
                    n for n in count(low, step) if n <= 0 or satisfies(n, symbol) is not False
                )
    return sizes


def memory_of(program: Program, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what a call of each method takes: steps, and buffers with the steps, first and last, in which they are in use."""
    report = report_memory(program, sizes, memory_policy(program.target))
    methods = {}
    for name, memory in report.methods.items():
        plan = memory.plan
        methods[name] = {
            "peak": plan.peak,
            "peak_step": plan.peak_step,
            "arguments": memory.arguments,
            "caches": memory.caches,
            "steps": [[step.kernel, step.module] for step in plan.steps],
            "buffers": [[b.name, b.module, b.kind, b.bytes, b.ranges] for b in plan.buffers if b.bytes],
        }
    return {"sizes": dict(sizes), "weights": report.weights, "total": report.total, "methods": methods}
