# SPDX-License-Identifier: Apache-2.0
"""How one request wants its tokens chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnfront.errors import RunError
from nnfront.files import shown

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
class Sampling:
    """How to choose. Temperature 0 takes the likeliest token; of everything else only the penalty then has a say.

    temperature >= 0; top_k >= 1: only the k likeliest; 0 < top_p <= 1: the fewest likeliest whose probabilities reach p;
    0 <= min_p <= 1: those with at least min_p times the highest probability; seed: the same seed draws the same tokens, on the same
    kind of device. repetition_penalty > 0: the logits of tokens in the prompt or drawn before are divided by it where they are
    positive, multiplied where negative, so more than 1 makes repetition less likely (arXiv 1909.05858, section 4.1).
    Raises RunError that lists every value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise RunError("the sampling parameters are out of range", details=problems)

    def changed(self, said: Mapping[str, Any]) -> Sampling:
        """The same with other values; what is None stays. Raises RunError as it does itself."""
        return replace(self, **{name: value for name, value in said.items() if value is not None})

    def _problems(self) -> Iterator[str]:
        if not _is_number(self.temperature) or self.temperature < 0:
            yield f"temperature is {shown(self.temperature)}, expected a number >= 0"
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            yield f"top_k is {shown(self.top_k)}, expected an int >= 1"
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            yield f"top_p is {shown(self.top_p)}, expected a number in (0, 1]"
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            yield f"min_p is {shown(self.min_p)}, expected a number in [0, 1]"
        if self.seed is not None and type(self.seed) is not int:
            yield f"seed is {shown(self.seed)}, expected an int"
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            yield f"repetition_penalty is {shown(self.repetition_penalty)}, expected a number > 0"


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

    @staticmethod
    def of(sampling: Sampling, **more: Any) -> Params:
        """Return what a request says that has its tokens chosen so, and `more`."""
        return Params(**{**vars(sampling), **more})

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.max_tokens is not None and self.max_tokens < 1:
            yield f"max_tokens is {self.max_tokens}, expected an int >= 1"
        if self.min_tokens < 0:
            yield f"min_tokens is {self.min_tokens}, expected an int >= 0"
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                yield f"{name} is {value!r}, expected a number in [-2, 2]"
        if not all(_is_number(bias) and -100 <= bias <= 100 for bias in self.logit_bias.values()):
            yield "logit_bias has a value that is no number in [-100, 100]"
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            yield "min_tokens and ignore_eos cannot be kept where a grammar says when an answer ends"
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            yield f"logprobs is {self.logprobs}, expected an int in [0, {MOST_LOGPROBS}]"


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
