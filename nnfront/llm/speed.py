# SPDX-License-Identifier: Apache-2.0
"""How fast a language model reads and writes, over lengths of prompts and numbers of sequences at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nnfront.llm.language_model import LLM
from nnfront.llm.timings import Timings


@dataclass(frozen=True)
class Speed:
    """The medians of some runs. `prefill_seconds` are of all prompts, `decode_seconds` of one step, which gives each sequence a token."""

    prompt_tokens: int
    batch: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float


def measure_speed(
    llm: LLM, lengths: Sequence[int], batches: Sequence[int], new_tokens: int = 32, repeats: int = 3
) -> Iterator[Speed]:
    """Yield the speed for every length and batch, of `repeats` runs each after one that does not count. Prompts are random tokens.

    Raises RunError for what does not fit the context.
    """
    draw = torch.Generator().manual_seed(0)
    for batch in batches:
        for length in lengths:
            prompts = torch.randint(0, int(llm.config.vocab_size), (batch, length), generator=draw)
            runs = [_run(llm, prompts, new_tokens) for _ in range(1 + repeats)][1:]
            prefill, decode = (statistics.median(times) for times in zip(*runs, strict=True))
            yield Speed(length, batch, prefill, batch * length / prefill, decode, batch / decode)


def _run(llm: LLM, prompts: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill, and of a step of decode."""
    llm.phases = Timings()
    llm.generate_ids(prompts, new_tokens)
    seconds, tokens = llm.phases.seconds, llm.phases.tokens
    return seconds["prefill"], seconds["decode"] / (tokens["decode"] / len(prompts))
