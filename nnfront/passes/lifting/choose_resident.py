# SPDX-License-Identifier: Apache-2.0
"""Which values stay in memory after load, for all sharing functions together.

What was declared, or moved before, moves. Around it, values hang together where they are computed from the same weights; each
such group moves as far as run-time work reaches if that takes no more bytes than what it is computed from. Otherwise the
group is cut where the fewest bytes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nnfront.dims import Dim, Size, evaluate, less_equal, total
from nnfront.ir import reachable
from nnfront.passes.lifting.min_cut import min_cut
from nnfront.passes.lifting.value_graph import Value


@dataclass(frozen=True)
class Residents:
    """The values that are kept, in the order of the graph, and those that stay behind with the bytes that moving would add."""

    kept: tuple[Value, ...]
    stayed: tuple[tuple[Value, Size], ...]


def choose(uses: Iterable[Value], allow_growth: bool = False) -> Residents:
    """Return what to keep, given what run-time work reads."""
    kept: set[Value] = set()
    stayed: list[tuple[Value, Size]] = []
    for group in _groups(list(uses)):
        if allow_growth or all(v.is_base for v in group.read):
            kept.update(group.read)
            continue
        before, after = total(v.size_bytes for v in group.bases), total(v.size_bytes for v in group.read)
        if less_equal(after, before) is True:
            kept.update(group.read)
            continue
        cut = _cut(group)
        kept.update(cut)
        growth = after - before
        stayed += [(value, growth) for value in group.read if value not in cut]
    return Residents(tuple(sorted(kept, key=lambda v: v.index)), tuple(stayed))


@dataclass
class _Group:
    """Values that are computed from the same bases: `read` by run-time work, all `members`, and the `bases` below them."""

    read: list[Value]
    members: list[Value]

    @property
    def bases(self) -> list[Value]:
        return [v for v in self.members if v.is_base]


def _groups(uses: list[Value]) -> list[_Group]:
    """Divide what is read, and all it is computed from, by common operands."""
    leaders: dict[Value, Value] = {}

    def leader(value: Value) -> Value:
        while leaders[value] is not value:
            leaders[value] = leaders[leaders[value]]
            value = leaders[value]
        return value

    read = {v for v in reachable(uses, lambda v: () if v.can_stay else v.sources) if v.can_stay}
    below = reachable(read, lambda v: () if v.is_base else v.sources)
    leaders.update((v, v) for v in below)
    for value in below:
        for operand in () if value.is_base else value.sources:
            leaders[leader(operand)] = leader(value)
    groups: dict[Value, _Group] = {}
    for value in sorted(leaders, key=lambda v: v.index):
        group = groups.setdefault(leader(value), _Group([], []))
        group.members.append(value)
        if value in read:
            group.read.append(value)
    return list(groups.values())


def _cut(group: _Group) -> set[Value]:
    """Return the cheapest values to keep. Dims count with a sample of their size; the result is used only if it holds for all."""
    sizes = {v: _sample(v.size_bytes) if v.can_stay else None for v in group.members}
    operands = {v: [] if v.is_base else v.sources for v in group.members}
    kept = min_cut(sizes, operands, group.read)
    before, after = total(v.size_bytes for v in group.bases), total(v.size_bytes for v in kept)
    return kept if less_equal(after, before) is True else set(group.bases)


def _sample(size: Size) -> int:
    """The bytes for dims of a middling size."""
    if not isinstance(size, Dim):
        return size
    values = {}
    for symbol in size.symbols:
        value = max(symbol.min, 1024 // symbol.multiple_of * symbol.multiple_of, symbol.multiple_of)
        values[symbol] = value if symbol.max is None else min(value, symbol.max)
    return evaluate(size, values)
