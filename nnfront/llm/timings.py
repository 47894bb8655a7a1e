# SPDX-License-Identifier: Apache-2.0
"""`Timings`: where the time went, as a table."""

from __future__ import annotations

import time


class Timings:
    """Seconds spent in each phase, in order, and how many tokens it handled where that is a rate worth showing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._last = time.perf_counter()

    def end(self, phase: str, tokens: int = 0) -> None:
        """Book the time since the last phase ended (or `start`) under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        if tokens:
            self.tokens[phase] = self.tokens.get(phase, 0) + tokens
        self._last = now

    def start(self) -> None:
        """Begin a phase now; what passed since the last one belongs to none."""
        self._last = time.perf_counter()

    def table(self) -> str:
        """Return the times as text, a line for each phase."""
        rows = [f"{'phase':<12}{'seconds':>9}{'tokens':>8}{'tokens/s':>10}"]
        for phase, seconds in self.seconds.items():
            tokens = self.tokens.get(phase)
            rate = f"{tokens:>8}{tokens / seconds:>10.1f}" if tokens and seconds else ""
            rows.append(f"{phase:<12}{seconds:>9.3f}{rate}")
        rows.append(f"{'total':<12}{sum(self.seconds.values()):>9.3f}")
        return "\n".join(rows)
