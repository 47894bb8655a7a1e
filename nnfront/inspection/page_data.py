# SPDX-License-Identifier: Apache-2.0
"""`page_data`: all that a page shows of a model, as plain data."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from textwrap import dedent
from typing import Any

import nnfront
from nnfront.backends.table import memory_policy
from nnfront.dims import satisfies
from nnfront.inspection.graphs import Lines, graph_of
from nnfront.inspection.model import Inspected
from nnfront.inspection.weights import weights_of
from nnfront.llm.find_model import model_name
from nnfront.lower import Program
from nnfront.lower.explain import Line, explained
from nnfront.memory.concrete_sizes import symbols_of
from nnfront.memory.report import report_memory

AROUND = 3
"""Lines of a source file that are shown before and behind the one that is meant."""
USUAL = 128
"""What a dim with an upper bound is if nobody says: less if the bound is; one without a bound is as little as it may be, and 1 at least."""


def page_data(model: Inspected, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what a page shows: functions as graphs, dims, weights, kernels, the memory plan, and the source lines that are named.

    sizes: numbers for dims, for bytes, flops and memory; the memory plan takes for others what `sizes_for` says. Raises LowerError for a number that a dim cannot be.
    """
    program, given = model.executable.program, dict(sizes or {})
    lines = Lines()
    graphs = {name: graph_of(function, lines) for name, function in model.source.items()}
    return {
        "nnfront": nnfront.__version__,
        "name": model_name(model.path),
        "made_of": "artefact" if model.is_artefact else "folder",
        "target": model.executable.target,
        "config": dict(model.config),
        "methods": [function.name for function in model.source.methods],
        "functions": graphs,
        "dims": _dims(program),
        "weights": weights_of(model),
        "kernels": [_kernel(line) for line in explained(program, given)],
        "compiled": _compiled(model),
        "memory": memory_of(program, sizes_for(program, given)),
        "lines": [_source(file, line) for file, line in lines.numbers],
    }


def _dims(program: Program) -> list[dict[str, Any]]:
    """Each dim of the methods: its facts, and who binds it in which method."""
    found: dict[str, dict[str, Any]] = {}
    for method in program.methods.values():
        for binding in method.dims:
            low, high, step = binding.symbol.facts
            entry = found.setdefault(
                binding.symbol.name, {"name": binding.symbol.name, "min": low, "max": high, "multiple_of": step, "bound": []}
            )  # fmt: skip
            solved = f" from {binding.size}" if binding.is_solved else ""
            entry["bound"].append({"method": method.name, "by": f"{binding.place}{solved}"})
    return list(found.values())


def _kernel(line: Line) -> dict[str, Any]:
    return {**asdict(line), "bytes": _number(line.bytes), "flops": _number(line.flops)}


def _number(size: object) -> int | str:
    return size if isinstance(size, int) else str(size)


def _compiled(model: Inspected) -> list[dict[str, Any]]:
    """The kernels whose machine code an artefact holds."""
    if model.kernels is None:
        return []
    return [
        {"kernel": cubin.kernel, "arch": cubin.arch, "threads": cubin.threads, "bytes": len(cubin.image)}
        for cubin in model.kernels.cubins
    ]


def _source(file: str, line: int) -> dict[str, Any]:
    """A line, and those around it if the file is there."""
    text = [linecache.getline(file, n).rstrip("\n") for n in range(max(line - AROUND, 1), line + AROUND + 1)]
    shown = dedent("\n".join(text)).split("\n") if any(text) else []
    return {"file": file, "line": line, "first": max(line - AROUND, 1), "text": shown}


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
