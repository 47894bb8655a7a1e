# SPDX-License-Identifier: Apache-2.0
"""Which sequences begin with given tokens: a tree of blocks of `grain` tokens, each known by its parent and its own tokens.

Tokens are compared, not digests of them, so two texts are never taken for each other. A salt keeps the texts of those who use it apart.
Where a model keeps states of whole sequences, one can go on only behind a block whose states were saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class _Block:
    """Some tokens behind those of the parent; `holders` are the sequences that have them, the latest last; `states` numbers the states behind them."""

    parent: _Block | None
    tokens: tuple[int, ...]
    states: int | None = None
    below: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)


class Found(NamedTuple):
    """The sequence that a new one can begin with so many tokens of, and the number of the states behind them, if there are any."""

    sequence: int
    length: int
    states: int | None


class Prefixes:
    """The beginnings of sequences, in whole blocks of `grain` tokens. `snapshots`: of how many blocks states can be saved, None where there are no states."""

    def __init__(self, grain: int, snapshots: int | None = None) -> None:
        self.grain = grain
        self.snapshots = snapshots
        self._roots: dict[str, _Block] = {}
        self._ends: dict[int, tuple[str, list[_Block]]] = {}
        self._saved: OrderedDict[int, _Block] = OrderedDict()  # used least recently first
        self._numbers = count()

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

    def find(self, tokens: Sequence[int], most: int, salt: str = "") -> Found | None:
        """Return the sequence that begins with most of these tokens, up to `most`; None if none has a block of them that one can go on behind."""
        found, length, block = None, 0, self._roots.get(salt)
        while block is not None and length + self.grain <= most:
            block = block.below.get(tuple(tokens[length : length + self.grain]))
            if block is not None:
                length += self.grain
                if self.snapshots is None or block.states is not None:
                    found = Found(next(reversed(block.holders)), length, block.states)
        if found is not None and found.states is not None:
            self._saved.move_to_end(found.states)
        return found

    def lacks_states(self, sequence: int, length: int) -> bool:
        """Whether the states behind the first `length` tokens of a sequence are to be saved."""
        is_known = 0 < length <= self.length(sequence)
        return bool(self.snapshots) and is_known and self._block(sequence, length).states is None

    def save(self, sequence: int, length: int) -> tuple[int, list[int]]:
        """Number the states behind the first `length` tokens of a sequence, which it lacks; and the numbers of those that give way."""
        assert self.snapshots
        block, gone = self._block(sequence, length), []
        while len(self._saved) >= self.snapshots:
            number, other = self._saved.popitem(last=False)
            other.states = None
            gone.append(number)
        block.states = next(self._numbers)
        self._saved[block.states] = block
        return block.states, gone

    def _block(self, sequence: int, length: int) -> _Block:
        return self._ends[sequence][1][length // self.grain - 1]

    def forget_states(self, but: int | None = None) -> list[int]:
        """The number of the states that were used least recently, which give way, if there are others than one."""
        number = next((number for number in self._saved if number != but), None)
        if number is None:
            return []
        self._saved.pop(number).states = None
        return [number]

    def within(self, sequence: int) -> Iterator[int]:
        """Other sequences of which nothing is known but what this one has as well."""
        for block in self._ends[sequence][1] if sequence in self._ends else ():
            for other in block.holders:
                if other != sequence and self._ends[other][1][-1] is block:
                    yield other

    def cut(self, sequence: int, length: int) -> list[int]:
        """Know no more of a sequence than its first `length` tokens; return the numbers of the states that go with the others."""
        salt, blocks = self._ends.get(sequence, ("", []))
        gone = []
        while len(blocks) * self.grain > length:
            block = blocks.pop()
            del block.holders[sequence]
            if not block.holders and block.parent is not None:
                del block.parent.below[block.tokens]
                if block.states is not None:
                    del self._saved[block.states]
                    gone.append(block.states)
        if not blocks and sequence in self:
            del self._ends[sequence]
            if not self._roots[salt].below:
                del self._roots[salt]
        return gone
