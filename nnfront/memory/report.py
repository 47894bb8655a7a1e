# SPDX-License-Identifier: Apache-2.0
"""What a program needs in memory, as a table: weights, caches, and the peak of each method with what is alive then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from nnfront import dtypes
from nnfront.errors import LowerError
from nnfront.ir import StateLayerType, StateType, TensorType, TupleType, Type
from nnfront.ir.summary import bytes_text, columns
from nnfront.lower.program import Program
from nnfront.memory.allocations import MemoryPolicy
from nnfront.memory.concrete_sizes import Extents, symbols_of
from nnfront.memory.liveness import layer_of
from nnfront.memory.plan import MemoryPlan, plan_memory

HEADER = ("method", "arguments", "caches", "values", "workspace", "peak", "at the peak runs")
# Buffers that are listed for the peak of the method that needs most.
LISTED = 8


@dataclass(frozen=True)
class MethodMemory:
    """Bytes of one method: of the arguments and caches, which the caller holds, and the plan of what a call takes.

    `of_token`, `of_sequence` are what its caches keep of one in all layers together, by the names of buffers.
    """

    arguments: int
    caches: int
    plan: MemoryPlan
    of_token: Mapping[str, int]
    of_sequence: Mapping[str, int]

    @property
    def token(self) -> int:
        """Bytes of one token in all layers of its caches."""
        return sum(self.of_token.values())

    @property
    def sequence(self) -> int:
        """Bytes of what its caches keep of one sequence, however long it is."""
        return sum(self.of_sequence.values())

    @property
    def workspace(self) -> int:
        """Bytes of the peak that are workspace of a kernel."""
        return sum(b.bytes for b in self.plan.at_peak if b.kind == "workspace")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a program for given sizes: its weights, once for all methods, and each method. Prints as a table."""

    sizes: Mapping[str, int]
    weights: int
    methods: Mapping[str, MethodMemory]

    @property
    def peak(self) -> int:
        """The most that a call takes, of any method."""
        return max((m.plan.peak for m in self.methods.values()), default=0)

    @property
    def total(self) -> int:
        """Weights, what is computed at load, the largest cache, and the peak of the method that takes most."""
        kept = sum(m.plan.kept for m in self.methods.values())
        caches = max((m.caches for m in self.methods.values()), default=0)
        return self.weights + kept + caches + self.peak

    def tokens_that_fit(self, size_bytes: int) -> int:
        """How many tokens of all sequences together caches can hold in so many bytes, beside the weights and the calls of these sizes.

        Pages hold that many, but for those that are not full; so does a contiguous cache whose sequences are all as long as they may be,
        unless a window lets it keep fewer. Raises LowerError if no method takes a cache.
        """
        token = max((m.token for m in self.methods.values()), default=0)
        if not token:
            raise LowerError("no method takes a cache")
        kept = sum(m.plan.kept for m in self.methods.values())
        calls = max(m.plan.peak + m.arguments for m in self.methods.values() if m.token)
        return max(size_bytes - self.weights - kept - calls, 0) // token

    def __str__(self) -> str:
        given = ", ".join(f"{name}={number}" for name, number in self.sizes.items())
        is_bound = any(m.plan.is_bound for m in self.methods.values())
        lines = [f"memory{f' at {given}' if given else ''}{', at most' if is_bound else ''}"]
        lines += columns([HEADER, *(_row(name, m) for name, m in self.methods.items())])
        lines += [f"weights {bytes_text(self.weights)}", *self._caches(), f"total {bytes_text(self.total)}"]
        most = max(self.methods.values(), key=lambda m: m.plan.peak, default=None)
        if most is not None and most.plan.at_peak:
            lines += _peak(most.plan)
        return "\n".join(lines)

    def _caches(self) -> Iterator[str]:
        """What caches keep: of each token, and of each sequence."""
        largest = max(self.methods.values(), key=lambda m: (m.token, m.sequence), default=None)
        kept = [] if largest is None else [("token", largest.of_token), ("sequence", largest.of_sequence)]
        for what, sizes in kept:
            if sizes:
                parts = [f"{name} {bytes_text(size)}" for name, size in sizes.items()]
                yield f"caches keep {bytes_text(sum(sizes.values()))} a {what}: {', '.join(parts)}"


def report_memory(program: Program, sizes: Mapping[str, int], policy: MemoryPolicy) -> MemoryReport:
    """Plan every method. `sizes` are numbers for dims by name; other dims count as the largest they can be.

    `policy` is that of the target's back end. Raises LowerError for a name that no method has, a number that a dim cannot be, and a dim without a greatest value that is not given.
    """
    known = {symbol.name for m in program.methods.values() for symbol in symbols_of(m)}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise LowerError(
            f"no method has a dim '{unknown[0]}'", details=[f"dims are {', '.join(sorted(known)) or 'none'}"]
        )
    weights: dict[tuple[str, str], int] = {}
    methods: dict[str, MethodMemory] = {}
    for name, method in program.methods.items():
        extents = Extents(method, sizes)
        weights.update(((w.role, w.name), _bytes_of(w.type, extents, policy)) for w in method.weights)
        plan = plan_memory(method, sizes, policy)
        methods[name] = MethodMemory(
            sum(_bytes_of(a.type, extents, policy) for a in method.arguments if a.role == "input"),
            sum(_bytes_of(a.type, extents, policy) for a in method.arguments if a.role == "state"),
            plan,
            *_kept(a.type for a in method.arguments if a.role == "state"),
        )
    return MemoryReport(dict(sizes), sum(weights.values()), methods)


def _bytes_of(type: Type, extents: Extents, policy: MemoryPolicy) -> int:
    match type:
        case TensorType():
            return prod(map(extents.number, type.shape)) * dtypes.size_bytes(type.dtype)
        case TupleType():
            return sum(_bytes_of(part, extents, policy) for part in type.fields)
        case StateType():
            return sum(_bytes_of(layer, extents, policy) for layer in type.layers)
        case StateLayerType():
            return layer_of(type, extents.number, policy.ring_windows).size_bytes
        case _:
            return 0


def _kept(caches: Iterable[Type]) -> tuple[Counter[str], Counter[str]]:
    """What the layers of caches keep of a token and of a sequence, by the names of their buffers."""
    of_token, of_sequence = Counter[str](), Counter[str]()
    for layer in (layer for cache in caches if isinstance(cache, StateType) for layer in cache.layers):
        for kept, buffers in ((of_token, layer.per_token), (of_sequence, layer.per_sequence)):
            for buffer in buffers:
                kept[buffer.name] += prod(buffer.shape) * dtypes.size_bytes(buffer.dtype)
    return of_token, of_sequence


def _row(name: str, memory: MethodMemory) -> tuple[str, ...]:
    plan, workspace = memory.plan, memory.workspace
    numbers = (memory.arguments, memory.caches, plan.peak - workspace, workspace, plan.peak)
    return (name, *map(bytes_text, numbers), _where(plan))


def _where(plan: MemoryPlan) -> str:
    if not plan.peak:
        return ""
    step = plan.steps[plan.peak_step]
    return f"{step.kernel} in {step.module}" if step.module else step.kernel


def _peak(plan: MemoryPlan) -> Iterator[str]:
    """Say what is alive at the peak."""
    yield f"{plan.method} takes most, at {_where(plan)}:"
    shown, rest = plan.at_peak[:LISTED], plan.at_peak[LISTED:]
    rows = [
        (bytes_text(b.bytes), b.name if b.kind != "copy" else f"copy of {b.name}", b.module) for b in shown
    ]
    if rest:
        rows.append((bytes_text(sum(b.bytes for b in rest)), f"{len(rest)} more", ""))
    yield from (f"  {line}" for line in columns(rows))
