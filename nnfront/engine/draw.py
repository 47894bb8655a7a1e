# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of one request from its logits, with nothing that another request has a part in.

The number that decides a draw is a function of the request's seed and of how many tokens it has drawn before. Each row is worked on alone, so
its sums have one order, whoever its neighbours are. A kernel that draws for a request (`taken`) has other numbers, of the same seed and count. The order of steps: penalties, the repetition penalty first, and the bias; temperature, top-k, top-p and
min-p, as transformers applies them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nnfront.engine.likely import Row, Tokens, Wide, drawn, largest, nucleus, weights
from nnfront.engine.params import Params
from nnfront.errors import RunError

COLDEST = 1e-4
"""From this temperature on a kernel draws: by less logits may be divided to infinity."""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED: Row = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""What a byte of a mask adds to the scores of its eight tokens: a mask is looked up, as a choice for each token takes ten times as long."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log probability of a token, and the likeliest tokens with theirs, likeliest first; before penalties and temperature."""

    token: float
    top: tuple[tuple[int, float], ...]


class Way(NamedTuple):
    """How tokens are drawn, as a kernel has it."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None


class Draw:
    """The draws of one request: `prompt` are the tokens that it was given, `ends` those that it must not draw before `min_tokens`."""

    def __init__(self, params: Params, prompt: Sequence[int], ends: Sequence[int] = ()) -> None:
        self.params = params
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) % (1 << 128)
        self._counts: Counter[int] = Counter()
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self._ends = sorted({*ends, *params.stop_tokens}) if params.min_tokens else []
        self.drawn = 0

    @cached_property
    def way(self) -> Way | None:
        """How a kernel draws for the request; None if it says of the tokens what only the host knows, or a temperature by which a kernel cannot divide."""
        p = self.params
        is_plain = (
            p.grammar is None
            and p.logprobs is None
            and not (p.logit_bias or p.min_tokens or p.presence_penalty or p.frequency_penalty)
            and p.repetition_penalty == 1
            and (p.temperature == 0 or p.temperature >= COLDEST)
        )
        return Way(p.temperature, p.top_k, p.top_p, p.min_p) if is_plain else None

    def __call__(self, logits: Row | int) -> int:
        """Return the next token: float32 [vocab] to an int, or one that a kernel has drawn, -1 for none. Raises RunError for logits that no token can be drawn from."""
        token = logits if isinstance(logits, int) else self._token(self._scores(logits))
        if token < 0:
            raise no_token()
        self._took(token)
        return token

    def probabilities(self, logits: Row) -> tuple[Tokens, Wide]:
        """The tokens that the next one is drawn from, and how likely each is."""
        tokens, likely = self._weights(self._scores(logits))
        found = np.arange(len(likely)) if tokens is None else tokens
        wide = likely.astype(np.float64)
        return found, wide / wide.sum()

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as the request's grammar says."""
        return [] if self.params.grammar is None else self.params.grammar.forced(most)

    @property
    def is_over(self) -> bool:
        """Whether the request's grammar has come to its end."""
        return self.params.grammar is not None and self.params.grammar.is_over

    def logprobs(self, logits: Row | int, token: int) -> Logprobs | None:
        """What the request wants to know of a token that was drawn from these logits."""
        count = self.params.logprobs
        if count is None or isinstance(logits, int):
            return None
        total = float(logits.max()) + float(np.log(weights(logits, 1.0).sum()))
        likeliest = largest(logits, count) if count else np.empty(0, np.int64)
        likeliest = likeliest[np.argsort(-logits[likeliest], kind="stable")][:count]
        top = tuple((int(i), float(logits[i]) - total) for i in likeliest)
        return Logprobs(float(logits[token]) - total, top)

    def _took(self, token: int) -> None:
        self.drawn += 1
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token] += 1
        if self.params.repetition_penalty != 1:
            self._seen.add(token)
        if self.params.grammar is not None:
            self.params.grammar.took(token)

    def _scores(self, logits: Row) -> Row:
        """The logits with penalties, bias, and what must not come."""
        p, changed = self.params, logits
        if self._seen or self._counts or p.logit_bias or p.grammar is not None or self.drawn < p.min_tokens:
            changed = logits.copy()
        if self._seen:
            seen = np.fromiter(self._seen, np.int64)
            old = changed[seen]
            changed[seen] = np.where(old < 0, old * p.repetition_penalty, old / p.repetition_penalty)
        if self._counts:
            tokens = np.fromiter(self._counts, np.int64)
            times = np.fromiter(self._counts.values(), np.float32)
            changed[tokens] -= p.presence_penalty + p.frequency_penalty * times
        for token, bias in p.logit_bias.items():
            changed[token] += bias
        if self.drawn < p.min_tokens:
            changed[self._ends] = -np.inf
        if p.grammar is not None:
            _forbid(changed, p.grammar.allowed(len(changed)))
        return changed

    def _token(self, scores: Row) -> int:
        """The next token, -1 if there is none."""
        token = int(scores.argmax())  # the first of equals, and NaN before all
        if not np.isfinite(scores[token]):
            return -1
        return self._drawn(scores) if self.params.temperature else token

    def _drawn(self, scores: Row) -> int:
        # A generator whose state is the key and the counter: no draw leaves anything to the next.
        number = np.random.Generator(np.random.Philox(key=self.seed, counter=self.drawn)).random()
        tokens, likely = self._weights(scores)
        at = drawn(likely, number)
        return at if tokens is None else int(tokens[at])

    def _weights(self, scores: Row) -> tuple[Tokens | None, Row]:
        """The tokens that the next one is drawn from, None for all, and numbers in proportion to how likely each is."""
        p = self.params
        tokens = None if p.top_k is None or p.top_k >= len(scores) else largest(scores, p.top_k)
        likely = weights(scores if tokens is None else scores[tokens], p.temperature)
        if p.top_p is not None and p.top_p < 1:
            kept = nucleus(likely, p.top_p)
            tokens, likely = kept if tokens is None else tokens[kept], likely[kept]
        if p.min_p:
            kept = np.flatnonzero(likely >= p.min_p * likely.max())
            tokens, likely = kept if tokens is None else tokens[kept], likely[kept]
        return tokens, likely


def no_token() -> RunError:
    """Return the error for logits that no token can be drawn from."""
    what = "the model's logits hold NaN, or no token to draw"
    return RunError(what, help="check the weights, or use a wider dtype")


def _forbid(scores: Row, allowed: npt.NDArray[np.uint8]) -> None:
    """Take out the tokens that have no bit, or none that is set."""
    count = min(8 * len(allowed), len(scores))
    scores[:count] += _ADDED.take(allowed[: -(-count // 8)], 0).reshape(-1)[:count]
    scores[count:] = -np.inf
