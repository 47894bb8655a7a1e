# SPDX-License-Identifier: Apache-2.0
"""Which sequences begin with given tokens: a tree of blocks of `grain` tokens, each known by its parent and its own tokens.

Tokens are compared, not digests of them, so two texts are never taken for each other. A salt keeps the texts of those who use it apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Block:
    """Some tokens behind those of the parent; `holders` are the sequences that have them, the latest last."""

    parent: _Block | None
    tokens: tuple[int, ...]
    below: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)


class Prefixes:
    """The beginnings of sequences, in whole blocks of `grain` tokens."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self._roots: dict[str, _Block] = {}
        self._ends: dict[int, tuple[str, list[_Block]]] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._ends

    def length(self, sequence: int) -> int:
        """How many tokens of a sequence are known."""
        return len(self._ends[sequence][1]) * self.grain if sequence in self._ends else 0

    def add(self, sequence: int, tokens: Sequence[int], length: int, salt: str = "") -> None:
        """Know the whole blocks of a sequence's first `length` tokens, which begin as they did the last time."""
        if length < self.grain:
            return
        _, blocks = self._ends.setdefault(sequence, (salt, []))
        for first in range(len(blocks) * self.grain, length - self.grain + 1, self.grain):
            parent = blocks[-1] if blocks else self._roots.setdefault(salt, _Block(None, ()))
            key = tuple(tokens[first : first + self.grain])
            block = parent.below.setdefault(key, _Block(parent, key))
            block.holders[sequence] = None
            blocks.append(block)

    def find(self, tokens: Sequence[int], most: int, salt: str = "") -> tuple[int, int] | None:
        """Return the sequence that begins with most of these tokens, up to `most`, and how many; None if none has a block of them."""
        found, length, block = None, 0, self._roots.get(salt)
        while block is not None and length + self.grain <= most:
            block = block.below.get(tuple(tokens[length : length + self.grain]))
            if block is not None:
                length += self.grain
                found = next(reversed(block.holders)), length
        return found

    def within(self, sequence: int) -> Iterator[int]:
        """Other sequences of which nothing is known but what this one has as well."""
        for block in self._ends[sequence][1] if sequence in self._ends else ():
            for other in block.holders:
                if other != sequence and self._ends[other][1][-1] is block:
                    yield other

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        salt, blocks = self._ends.pop(sequence, ("", []))
        for block in reversed(blocks):
            del block.holders[sequence]
            if not block.holders and block.parent is not None:
                del block.parent.below[block.tokens]
        if blocks and not self._roots[salt].below:
            del self._roots[salt]
