# SPDX-License-Identifier: Apache-2.0
"""Places in one memory for values that are not all alive at once, found when it is known when each of them is."""

from __future__ import annotations

from dataclasses import dataclass, field

ALIGNMENT = 64
TRIES = 24  # orders in which values are placed, at most: half a millisecond each for 24 layers


@dataclass(slots=True, eq=False)
class Piece:
    """Bytes that one value takes, how many slots hold it, and the pieces that are alive at some time while it is."""

    bytes: int
    slots: int = 1
    beside: list[Piece] = field(default_factory=list)
    offset: int = -1


@dataclass
class Arena:
    """Notes which values are alive together while a program is walked in the order in which it runs: from where they are taken to where its
    instructions free them (`Run.frees`, by which a plan's allocations end too). `place` then finds where they lie.
    """

    pieces: list[Piece] = field(default_factory=list)
    alive_at_once: int = 0
    _alive: dict[Piece, None] = field(default_factory=dict)

    def take(self, count: int) -> Piece:
        """A piece for bytes that one slot holds."""
        piece = Piece(max(-(-count // ALIGNMENT), 1) * ALIGNMENT, beside=[*self._alive])
        for other in self._alive:
            other.beside.append(piece)
        self._alive[piece] = None
        self.alive_at_once = max(self.alive_at_once, sum(p.bytes for p in self._alive))
        self.pieces.append(piece)
        return piece

    def hold(self, piece: Piece) -> None:
        """Say that one more slot has what lies there."""
        piece.slots += 1

    def release(self, piece: Piece) -> None:
        """Say that one slot less does."""
        piece.slots -= 1
        if not piece.slots:
            del self._alive[piece]

    def place(self) -> int:
        """Give each piece its offset, the lowest that nothing beside it has. Return how large the memory has to be.

        What is large and beside much is first: what is small finds gaps. While that takes more than what is alive at once, what ends last is first in one more try.
        """
        order, tries = sorted(self.pieces, key=lambda piece: -piece.bytes * len(piece.beside)), []
        for _ in range(TRIES):
            size = _place(order)
            tries.append((size, [piece.offset for piece in self.pieces]))
            if size == self.alive_at_once:
                break
            last = max(order, key=lambda piece: piece.offset + piece.bytes)
            order.remove(last)
            order.insert(0, last)
        least, offsets = min(tries)
        for piece, offset in zip(self.pieces, offsets, strict=True):
            piece.offset = offset
        return least


def _place(pieces: list[Piece]) -> int:
    """Give pieces their offsets in this order. Return how large the memory has to be."""
    size = 0
    for piece in pieces:
        piece.offset = -1
    for piece in pieces:
        offset = 0
        for other in sorted((p for p in piece.beside if p.offset >= 0), key=lambda p: p.offset):
            if offset + piece.bytes <= other.offset:
                break
            offset = max(offset, other.offset + other.bytes)
        piece.offset, size = offset, max(size, offset + piece.bytes)
    return size
