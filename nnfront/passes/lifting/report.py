# SPDX-License-Identifier: Apache-2.0
"""What lifting moves, what stays and why, and the bytes in memory before and after."""

from __future__ import annotations

from dataclasses import dataclass

from nnfront.dims import Size, total
from nnfront.ir import reachable, type_text
from nnfront.passes.lifting.assemble import Group
from nnfront.passes.lifting.value_graph import Value


@dataclass(frozen=True)
class Moved:
    """A computed value that the transform returns."""

    name: str
    type: str
    size_bytes: Size  # 0 for a view of something that stays in memory anyway
    declared_in: str | None  # the module path of a derived tensor; None for an expression in a forward
    functions: tuple[str, ...]  # that read it


@dataclass(frozen=True)
class Stayed:
    """A value that needs only weights and is still computed on each call."""

    name: str
    functions: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class TransformReport:
    """What one transform does. Bytes are those that stay in memory after load, for all functions that share it."""

    name: str
    functions: tuple[str, ...]
    passed: tuple[str, ...]  # weights that are needed as they are
    moved: tuple[Moved, ...]
    stayed: tuple[Stayed, ...]
    bytes_before: Size
    bytes_after: Size

    def __str__(self) -> str:
        lines = [
            f"{self.name}, for {', '.join(self.functions)}: {self.bytes_before} bytes of weights, {self.bytes_after} kept",
            f"  as they are: {len(self.passed)} weights",
            *(
                f"  moved: {m.name} {m.type}, {m.size_bytes} bytes{_declared(m)}, for {', '.join(m.functions)}"
                for m in self.moved
            ),
            *(f"  stayed: {s.name}, in {', '.join(s.functions)}: {s.reason}" for s in self.stayed),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class LiftReport:
    """What each transform of a module does."""

    transforms: tuple[TransformReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.transforms)) or "no function has weights"


def describe(name: str, group: Group) -> TransformReport:
    """Return the report on one group."""
    results = group.results
    readers: dict[Value, list[str]] = {}
    for scope in group.scopes:
        # What is read, and all that it is computed from, down to the weights.
        for value in reachable(scope.uses, lambda v: v.sources):
            readers.setdefault(value, []).append(scope.function.name)
    moved = [
        Moved(v.name, type_text(v.type), _resident_bytes(v, results), v.declared_in, tuple(readers[v]))
        for v in results
        if v.expr is not None
    ]
    stayed = [
        Stayed(
            value.name,
            tuple(readers[value]),
            f"moving it and what goes with it would take {growth} more bytes",
        )
        for value, growth in group.residents.stayed
    ]
    stayed += _refused(group)
    return TransformReport(
        name,
        tuple(scope.function.name for scope in group.scopes),
        tuple(v.name for v in results if v.expr is None),
        tuple(moved),
        tuple(stayed),
        total(v.size_bytes for v in readers if v.expr is None),
        total(_resident_bytes(v, results) for v in results),
    )


def _refused(group: Group) -> list[Stayed]:
    """What could not move, in the methods and in the functions that they call."""
    found: dict[tuple[str, str], list[str]] = {}
    for scope in group.scopes:
        pending = [("", scope)]
        while pending:
            path, inner = pending.pop()
            for name, reason in inner.refused:
                functions = found.setdefault((f"{path}{name}", reason), [])
                if scope.function.name not in functions:
                    functions.append(scope.function.name)
            pending += [(f"{path}{site.path}.".lstrip("."), site.scope) for site in inner.sites.values()]
    return [Stayed(name, tuple(functions), reason) for (name, reason), functions in sorted(found.items())]


def _resident_bytes(value: Value, results: list[Value]) -> Size:
    viewed = value.viewed
    return 0 if viewed is not None and viewed in results else value.size_bytes


def _declared(moved: Moved) -> str:
    return "" if moved.declared_in is None else f", declared in {moved.declared_in or 'the model'}"
