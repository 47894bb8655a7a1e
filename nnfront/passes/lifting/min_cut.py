# SPDX-License-Identifier: Apache-2.0
"""The cheapest way through a graph of values: which to compute at load and keep, so that the rest can be computed from them.

A node that is computed at load is kept if a node left for run time, or run-time work itself, reads it. The set with the
fewest bytes kept is a minimum cut of a network; of several, the one that computes most at load.
Source: Ford and Fulkerson, Maximal flow through a network (1956), with breadth-first augmenting paths (Edmonds and Karp, 1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from nnfront.ir import reachable

Node = TypeVar("Node")

_FOREVER = 1 << 62  # more bytes than any machine has


def min_cut(
    sizes: Mapping[Node, int | None], operands: Mapping[Node, Sequence[Node]], read: Collection[Node]
) -> set[Node]:
    """Return the nodes to keep.

    `sizes`: bytes of each node, None for one that cannot be kept. `operands`: what each node is computed from; nodes without
    operands exist at load. `read`: the nodes that run-time work reads; what no such node is computed from takes no part.
    """
    network = _Network[Node]()
    needed = set(reachable(read, operands.__getitem__))
    for node, size in sizes.items():
        if node not in needed:
            continue
        network.add((node, "made"), (node, "kept"), _FOREVER if size is None else size)
        if not operands[node]:
            network.add("load", (node, "made"), _FOREVER)
        for operand in operands[node]:
            network.add((operand, "kept"), (node, "made"), _FOREVER)  # a reader at run time needs it kept
            # What is made at load has its operands there.
            network.add((node, "made"), (operand, "made"), _FOREVER)
    for node in read:
        network.add((node, "kept"), "run", _FOREVER)
    late = network.side_of_sink("load", "run")
    return {node for node in needed if (node, "made") not in late and (node, "kept") in late}


class _Network(Generic[Node]):
    """Edges with what each can still carry."""

    def __init__(self) -> None:
        self.room: dict[object, dict[object, int]] = {}

    def add(self, a: object, b: object, room: int) -> None:
        self.room.setdefault(a, {})
        self.room[a][b] = self.room[a].get(b, 0) + room
        self.room.setdefault(b, {}).setdefault(a, 0)

    def side_of_sink(self, source: object, sink: object) -> set[object]:
        """Send as much flow as fits; return the nodes from which the sink can still be reached."""
        while (path := self._path(source, sink)) is not None:
            flow = min(self.room[a][b] for a, b in path)
            for a, b in path:
                self.room[a][b] -= flow
                self.room[b][a] += flow
        return set(reachable([sink], lambda b: [a for a in self.room[b] if self.room[a][b] > 0]))

    def _path(self, source: object, sink: object) -> list[tuple[object, object]] | None:
        came_from: dict[object, object] = {source: source}
        pending = deque([source])
        while pending:
            a = pending.popleft()
            for b, room in self.room[a].items():
                if room > 0 and b not in came_from:
                    came_from[b] = a
                    if b == sink:
                        path = []
                        while b != source:
                            path.append((came_from[b], b))
                            b = came_from[b]
                        return path
                    pending.append(b)
        return None
