# SPDX-License-Identifier: Apache-2.0
"""Decode steps of one generation after the other: the cache that they were captured over, and the draws that were captured with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

import torch

from nnfront.engine.params import Sampling
from nnfront.llm.sampling import Sampler
from nnfront.runtime.method import Method
from nnfront.state.cache import Cache

Drawn: TypeAlias = Callable[[Sampler, torch.Tensor], torch.Tensor]
"""Draws from the logits of the last tokens: float [batch, vocab] to int64 [batch]."""

Step: TypeAlias = Callable[[torch.Tensor, Cache], torch.Tensor]
"""One more token for each sequence: int64 [batch, 1] to int64 [batch]."""


@dataclass(frozen=True)
class _Draw:
    """A draw from the last logits of each sequence, behind a decode step."""

    sampler: Sampler
    drawn: Drawn

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        return self.drawn(self.sampler, result[:, -1])

    def state(self) -> list[torch.Tensor]:
        return self.sampler.state()


@dataclass
class Stepping:
    """A cache, and of each way of drawing the sampler whose buffers were captured with steps over it."""

    cache: Cache
    _ways: dict[Sampling, tuple[Sampler, Method]] = field(default_factory=dict)

    def sampler(self, wanted: Sampler) -> Sampler:
        """What draws as `wanted` would, in the buffers that steps were captured with, if there are any."""
        kept = self._ways.get(replace(wanted.sampling, seed=None))
        if kept is None:
            return wanted
        kept[0].restart(wanted)
        return kept[0]

    def begin(self, prompts: Sequence[torch.Tensor], prefill: Method, device: torch.device) -> torch.Tensor:
        """Compute prompts; return the logits behind each: float [batch, vocab]. Those of one length that follow one another are one call."""
        parts, first = [], 0
        for _, group in groupby(prompts, key=len):
            same = torch.stack(list(group)).to(device, torch.int64)
            rows = self.cache if len(same) == len(prompts) else self.cache.rows(first, first + len(same))
            parts.append(prefill(same, rows)[:, -1])
            first += len(same)
        return torch.cat(parts)

    def step(self, sampler: Sampler, decode: Method, drawn: Drawn) -> Step:
        """A decode step and the draw behind it, as one capture where a kernel draws. The sampler has drawn before."""
        if not sampler.on_kernel:
            return lambda token, cache: drawn(sampler, decode(token, cache)[:, -1])
        method = decode.followed_by(_Draw(sampler, drawn))
        return self._ways.setdefault(replace(sampler.sampling, seed=None), (sampler, method))[1]
