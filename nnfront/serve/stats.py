# SPDX-License-Identifier: Apache-2.0
"""What an engine counts: tokens, ends, and how long things took, in seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from nnfront.engine.sequence import Sequence

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Histogram:
    """How many values were at most each of some bounds, and beyond the last."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Stats:
    """Counts since the engine began. Written by its thread, read by any."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.ends: Counter[str] = Counter()
        self.first_token = Histogram(SECONDS)
        self.between = Histogram(SECONDS)
        self.whole = Histogram(SECONDS)
        self.queued, self.prefill, self.decode = (Histogram(SECONDS) for _ in range(3))
        self.step_tokens = Histogram(TOKENS)

    def step(self, decoded: int, prompts: int) -> None:
        """Count the tokens that a step computed."""
        self.step_tokens.observe(decoded + prompts)

    def first(self, sequence: Sequence, seconds: float, waited: float) -> None:
        """Count a first token, so many seconds after its request came, of which it had to wait for some until anything was computed of it."""
        self.first_token.observe(seconds)
        self.queued.observe(waited)
        self.prefill.observe(seconds - waited)
        self.prompt_tokens += sequence.prompt
        self.prefix_queries += sequence.prompt
        self.prefix_hits += sequence.cached

    def ended(self, reason: str, seconds: float) -> None:
        """Count a request's end, so many seconds after it came."""
        self.ends[reason] += 1
        self.whole.observe(seconds)
