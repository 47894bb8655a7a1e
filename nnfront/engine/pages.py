# SPDX-License-Identifier: Apache-2.0
"""How many pages the sequences of a paged cache hold, counted apart from any tensor: the scheduler asks here what will fit.

A paged cache shares the pages of a fork, copies one that is shared when it is written to, and takes new ones as sequences grow. This counts
the same in the same order, so that a plan made with it never finds the cache out of pages. Layers that have a window hold fewer, in pools of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Held:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class Pages:
    """`count` pages of `size` tokens each, held by sequences that are known by a number."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._holders = [0] * count
        self._free = deque(range(count))
        self._held: dict[int, _Held] = {}

    @property
    def free(self) -> int:
        """How many pages no sequence holds."""
        return len(self._free)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._held

    def __len__(self) -> int:
        return len(self._held)

    def length(self, sequence: int) -> int:
        """How many tokens of a sequence have a place."""
        return self._held[sequence].length

    def held_by(self, sequences: Iterable[int]) -> int:
        """How many pages some sequences hold together, as far as there are such."""
        return len({page for each in sequences if each in self._held for page in self._held[each].pages})

    def of(self, length: int) -> int:
        """How many pages so many tokens need."""
        return -(-length // self.size)

    def add(self, sequence: int) -> None:
        """Begin a sequence without tokens."""
        assert sequence not in self._held
        self._held[sequence] = _Held()

    def fork(self, source: int, length: int, sequence: int) -> None:
        """Begin a sequence with the first `length` tokens of another, whose pages it shares."""
        assert length <= self._held[source].length
        assert sequence not in self._held
        pages = self._held[source].pages[: self.of(length)]
        for page in pages:
            self._holders[page] += 1
        self._held[sequence] = _Held(pages, length)

    def need(self, sequence: int, count: int) -> int:
        """How many free pages `count` more tokens take: new ones, and a copy of a last one that others hold as well."""
        held = self._held[sequence]
        return self.of(held.length + count) - len(held.pages) + (count > 0 and self._copies(held))

    def append(self, sequence: int, count: int) -> None:
        """Give `count` more tokens a place; the caller has seen that there are pages."""
        held = self._held[sequence]
        assert self.need(sequence, count) <= self.free
        if count and self._copies(held):
            self._give_back(held.pages.pop())
        held.length += count
        while len(held.pages) < self.of(held.length):
            page = self._free.popleft()
            self._holders[page] = 1
            held.pages.append(page)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep at most the first `length` tokens."""
        held = self._held[sequence]
        held.length = min(held.length, length)
        while len(held.pages) > self.of(held.length):
            self._give_back(held.pages.pop())

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        self.truncate(sequence, 0)
        del self._held[sequence]

    def _copies(self, held: _Held) -> bool:
        return bool(held.length % self.size) and self._holders[held.pages[-1]] > 1

    def _give_back(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)
