# SPDX-License-Identifier: Apache-2.0
"""Choose the next token from logits: temperature, top-k, top-p, min-p, in that order, as transformers applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from nnfront.errors import RunError


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the likeliest token; everything else then has no say.

    temperature >= 0; top_k >= 1: only the k likeliest; 0 < top_p <= 1: the fewest likeliest whose probabilities reach p;
    0 <= min_p <= 1: those with at least min_p times the highest probability; seed: the same seed draws the same tokens.
    Raises RunError that lists every value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not _is_number(self.temperature) or self.temperature < 0:
            problems.append(f"temperature is {self.temperature!r}, expected a number >= 0")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            problems.append(f"top_k is {self.top_k!r}, expected an int >= 1")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            problems.append(f"top_p is {self.top_p!r}, expected a number in (0, 1]")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            problems.append(f"min_p is {self.min_p!r}, expected a number in [0, 1]")
        if self.seed is not None and type(self.seed) is not int:
            problems.append(f"seed is {self.seed!r}, expected an int")
        if problems:
            raise RunError("the sampling parameters are out of range", details=problems)


@dataclass
class Sampler:
    """Draws tokens as a `Sampling` says, with a random generator of its own."""

    sampling: Sampling
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.sampling.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return one token for each row: float32 [batch, vocab] to int64 [batch]. Raises RunError if a logit is NaN."""
        # NaN spreads into the maximum, so looking at that finds one anywhere in the row.
        best, token = logits.max(-1)
        if bool(best.isnan().any()):
            raise RunError("the model's logits hold NaN", help="check the weights, or use a wider dtype")
        if self.sampling.temperature == 0:
            return token
        probabilities = self.probabilities(logits)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distribution from which tokens are drawn: float32 [batch, vocab] to the same shape."""
        s = self.sampling
        scores = logits.float() / s.temperature
        if s.top_k is not None and s.top_k < scores.shape[-1]:
            least = scores.topk(s.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        probabilities = scores.softmax(-1)
        if s.top_p is not None and s.top_p < 1:
            ordered, order = probabilities.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= s.top_p)
            probabilities = probabilities.masked_fill(dropped, 0.0)
        if s.min_p:
            least = s.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return probabilities / probabilities.sum(-1, keepdim=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
