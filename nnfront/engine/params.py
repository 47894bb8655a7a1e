# SPDX-License-Identifier: Apache-2.0
"""How one request wants its tokens chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nnfront.llm.sampling import Sampling, is_number

MOST_LOGPROBS = 20


class Grammar(Protocol):
    """What says which tokens may come next; it belongs to one request."""

    is_over: bool
    """Whether nothing can come any more."""

    def allowed(self, vocab: int) -> npt.NDArray[np.uint8]:
        """Which of `vocab` tokens may come next: uint8, a bit for each, the lowest of the first byte for the first; those without one may not."""

    def took(self, token: int) -> None:
        """Go on behind a token."""

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next, at most so many: there is no other way to go on."""


@dataclass(frozen=True)
class Params(Sampling):
    """A `Sampling`, and what else a request may say.

    max_tokens: how many tokens at most, all that the context has room for if None; min_tokens: so many before an end token may come.
    presence_penalty, frequency_penalty: taken from the logits of tokens that were drawn before, once and for each time. logit_bias: added to
    the logits of tokens. stop_tokens: ends besides the model's; ignore_eos: the model's end tokens are tokens like others.
    logprobs: give the log probabilities of the token and of so many of the likeliest. grammar: says which tokens may come.
    Raises RunError that lists every value out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.max_tokens is not None and self.max_tokens < 1:
            yield f"max_tokens is {self.max_tokens}, expected an int >= 1"
        if self.min_tokens < 0:
            yield f"min_tokens is {self.min_tokens}, expected an int >= 0"
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_number(value) or not -2 <= value <= 2:
                yield f"{name} is {value!r}, expected a number in [-2, 2]"
        if not all(is_number(bias) and -100 <= bias <= 100 for bias in self.logit_bias.values()):
            yield "logit_bias has a value that is no number in [-100, 100]"
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            yield "min_tokens and ignore_eos cannot be kept where a grammar says when an answer ends"
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            yield f"logprobs is {self.logprobs}, expected an int in [0, {MOST_LOGPROBS}]"
