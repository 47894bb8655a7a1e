# SPDX-License-Identifier: Apache-2.0
"""How many tokens each sequence of a cache holds, as an immutable value that remembers what was derived from it.

All layers of a cache go through the same lengths, one after the other. As `grow` gives the second layer the object that it gave
the first, positions and masks are made once for a call and not once for a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nnfront.backends.device import CPU, sent

Value = TypeVar("Value")


class SequenceLengths:
    """One length for each sequence; `equal` is the length if it is the same for all, else None. `device` is that of what is derived."""

    __slots__ = ("_earlier", "_memo", "device", "equal", "longest", "values")

    def __init__(self, values: tuple[int, ...], device: torch.device = CPU) -> None:
        self.values = values
        self.device = device
        self.longest = max(values, default=0)
        self.equal: int | None = self.longest if min(values, default=0) == self.longest else None
        self._memo: dict[Any, Any] = {}
        # Counts of others on the device, and how many more tokens these have: added when somebody asks.
        self._earlier: tuple[torch.Tensor, int] | None = None

    def like(self, values: tuple[int, ...]) -> SequenceLengths:
        """Other lengths on the same device."""
        return SequenceLengths(values, self.device)

    def remember(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return what `make` made for this key the first time."""
        found: Value | None = self._memo.get(key)
        if found is None:
            found = self._memo[key] = make()
        return found

    def part(self, first: int, count: int) -> SequenceLengths:
        """The lengths of some sequences in a row."""
        if first == 0 and count == len(self.values):
            return self
        return self.remember(("part", first, count), lambda: self.like(self.values[first : first + count]))

    def replaced(self, first: int, part: SequenceLengths) -> SequenceLengths:
        """These lengths with those of some sequences in a row replaced."""
        stop = first + len(part.values)
        if first == 0 and stop == len(self.values):
            return part
        return self.remember(
            ("replaced", first, part.values),
            lambda: self.like(self.values[:first] + part.values + self.values[stop:]),
        )

    def grow(self, first: int, count: int, seq: int) -> SequenceLengths:
        """The lengths after `seq` more tokens in each of some sequences in a row."""
        found: SequenceLengths | None = self._memo.get((first, count, seq))
        if found is None:
            values = [n + seq if first <= i < first + count else n for i, n in enumerate(self.values)]
            found = self._memo[first, count, seq] = self.like(tuple(values))
            if count == len(values):
                found._earlier = self._before(seq)
        return found

    def _before(self, seq: int) -> tuple[torch.Tensor, int] | None:
        """What the lengths with so many more tokens know of counts that are on the device."""
        if (counts := self._memo.get("counts")) is not None:
            return counts, seq
        return None if self._earlier is None else (self._earlier[0], self._earlier[1] + seq)

    def _shifted(self, counts: torch.Tensor, seq: int) -> torch.Tensor:
        """Counts with so many more tokens in each sequence."""
        return counts + seq

    def back(self, seq: int) -> SequenceLengths:
        """The lengths before the last `seq` tokens of each sequence."""

        def make() -> SequenceLengths:
            found = self.like(tuple(n - seq for n in self.values))
            found._earlier = self._before(-seq)
            return found

        return self.remember(("back", seq), make)

    def counts(self) -> torch.Tensor:
        """The lengths as kernels read them: int32 [sequences]."""

        def make() -> torch.Tensor:
            if self._earlier is None:
                return sent(self.values, torch.int32, self.device)
            counts, seq = self._earlier
            return self._shifted(counts, seq) if seq else counts

        return self.remember("counts", make)

    def starts(self, seq: int) -> torch.Tensor:
        """Where each sequence begins among the next tokens of all, and where the last one ends: int32 [sequences + 1]."""
        count = len(self.values) + 1
        return self.remember(
            ("starts", seq), lambda: torch.arange(count, dtype=torch.int32, device=self.device).mul_(seq)
        )

    def positions(self, seq: int) -> torch.Tensor:
        """Positions of the next tokens: int64 [sequences, seq]."""

        def make() -> torch.Tensor:
            steps = torch.arange(seq, device=self.device)
            if self._before(0) is not None:  # the device may know more of them than this does
                return self.counts()[:, None] + steps
            if self.equal is not None:
                return (steps + self.equal).expand(len(self.values), seq)
            return sent(self.values, torch.int64, self.device)[:, None] + steps

        return self.remember(("positions", seq), make)

    def stored(self, capacity: int) -> torch.Tensor:
        """Positions of the tokens in the slots of a ring of `capacity` slots: int64 [sequences, slots in use], -1 for an empty one.

        The token at position p lies in slot p % capacity.
        """

        def make() -> torch.Tensor:
            slots = torch.arange(min(self.longest, capacity), device=self.device)
            last = sent(self.values, torch.int64, self.device)[:, None] - 1
            positions = last - (last - slots) % capacity
            return positions.clamp_(min=-1)

        return self.remember(("stored", capacity), make)
