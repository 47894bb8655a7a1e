# SPDX-License-Identifier: Apache-2.0
"""When answers go on while a chunk of a prompt is computed: learned from how long their steps take, and nothing that a text depends on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LEAST, MOST = 0.5, 0.9
"""Which part of the time prompts have at least, however long steps of answers take, and at most, however many wait for a first token."""

KEPT = 0.9
"""What is left of having been late once, a step later."""

SEVERAL = 4
"""Prompts have as many times the answers' part of the time as this is in the square of how many requests wait for a first token."""

KEPT_CALLS = 0.97
"""What a call still counts a call later."""


@dataclass(slots=True)
class Pace:
    """`gap`: seconds that two tokens of an answer are to be apart, at most. Where a step of all answers takes most of them, prompts still get their part. `rows`: that kernels take together."""

    gap: float
    rows: int = 4
    clock: Callable[[], float] = time.perf_counter
    step: float = 0.0
    part: float = LEAST
    late: float = 0.0
    _last: float = 0.0
    # How many, and sums of rows, seconds, rows squared, rows times seconds.
    _calls: tuple[float, ...] = (0.0,) * 5

    def divide(self, prompts: int, answers: int) -> None:
        """Give prompts as large a part of the time as those that wait for a first token are of all, where an answer counts twice: few answers do not keep many waiting."""
        self.part = min(max(prompts / (prompts + 2 * answers), LEAST), MOST)

    def took(self, began: float) -> None:
        """Count a step of all answers, which began then and ends now, and how late it was: it can begin between two steps of a chunk only."""
        late = began - self._last - self._share
        if late < self._share:  # else there was no answer to go on
            self.late = max(late, self.late * KEPT)
        self._last = self.clock()
        self.step = self._last - began

    def wait(self) -> None:
        """Begin to count anew, as no answer can go on."""
        self._last = self.clock()

    def tokens(self, answers: int, prompts: int, most: int) -> int:
        """How many tokens of prompts a call computes beside so many of answers, at most `most`: as many as it has time for, and whole `rows`. Of its time prompts have
        half at least, and more where more than half of all requests wait for a first token, as then steps keep few answers, or more than two, as then more would answer together.
        """
        base, each = self._cost
        if not (answers and self.gap and each):
            return most
        part = max(prompts / (prompts + answers), prompts**2 / (prompts**2 + SEVERAL))
        part = min(max(part, LEAST), MOST)
        alone = base + each * answers
        rows = answers + int((max(self.gap, alone / (1 - part)) - alone) / each)
        whole = rows // self.rows * self.rows - answers
        return min(whole if whole > 0 else self.rows, most)

    def computed(self, began: float, rows: int) -> None:
        """Count a call, which began then and ends now, of so many rows."""
        seconds = self.clock() - began
        new = 1, rows, seconds, rows * rows, rows * seconds
        self._calls = tuple(KEPT_CALLS * before + now for before, now in zip(self._calls, new, strict=True))

    @property
    def _cost(self) -> tuple[float, float]:
        """The seconds that a call takes whatever it computes, and those of a row: the line through the calls of late that is nearest to them."""
        count, rows, seconds, squares, products = self._calls
        spread = count * squares - rows * rows
        if not count or spread <= count * squares / 100:
            return 0.0, seconds / max(rows, 1.0)
        each = max((count * products - rows * seconds) / spread, 0.0)
        return max((seconds - each * rows) / count, 0.0), each

    @property
    def is_due(self) -> bool:
        """Whether answers are to go on: so much sooner than they must as they have been late."""
        share = self._share
        return self.clock() - self._last >= share - min(self.late, share / 4)

    @property
    def _share(self) -> float:
        """How long prompts may take between two steps of answers."""
        return max(self.gap - self.step, self.step * self.part / (1 - self.part))
