# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of one request from its logits, with nothing that another request has a part in.

The number that decides a draw is a function of the request's seed and of how many tokens it has drawn before. Each row is worked on alone, so
its sums have one order, whoever its neighbours are. The order of steps is that of `nnfront.llm.sampling`, with the other penalties and the bias
behind the repetition penalty.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nnfront.engine.params import Params
from nnfront.errors import RunError

Row = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log probability of a token, and the likeliest tokens with theirs, likeliest first; before penalties and temperature."""

    token: float
    top: tuple[tuple[int, float], ...]


class Draw:
    """The draws of one request: `prompt` are the tokens that it was given, `ends` those that it must not draw before `min_tokens`."""

    def __init__(self, params: Params, prompt: Sequence[int], ends: Sequence[int] = ()) -> None:
        self.params = params
        self._seed = (secrets.randbits(64) if params.seed is None else params.seed) % (1 << 128)
        self._counts: Counter[int] = Counter()
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self._ends = sorted({*ends, *params.stop_tokens}) if params.min_tokens else []
        self.drawn = 0

    def __call__(self, logits: Row) -> int:
        """Return the next token: float32 [vocab] to an int. Raises RunError for logits that no token can be drawn from."""
        scores = self._scores(logits)
        token = int(scores.argmax())  # the first of equals, and NaN before all
        if not np.isfinite(scores[token]):
            raise RunError(
                "the model's logits hold NaN, or no token to draw",
                help="check the weights, or use a wider dtype",
            )
        if self.params.temperature != 0:
            token = self._drawn(scores)
        self._took(token)
        return token

    def probabilities(self, logits: Row) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The tokens that the next one is drawn from, and how likely each is."""
        return self._probabilities(self._scores(logits))

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as the request's grammar says."""
        return [] if self.params.grammar is None else self.params.grammar.forced(most)

    @property
    def is_over(self) -> bool:
        """Whether the request's grammar has come to its end."""
        return self.params.grammar is not None and self.params.grammar.is_over

    def logprobs(self, logits: Row, token: int) -> Logprobs | None:
        """What the request wants to know of a token that was drawn from these logits."""
        count = self.params.logprobs
        if count is None:
            return None
        wide = logits.astype(np.float64)
        total = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        likeliest = np.argpartition(-wide, count)[:count] if count else np.empty(0, np.int64)
        likeliest = likeliest[np.argsort(-wide[likeliest], kind="stable")]
        top = tuple((int(i), float(wide[i] - total)) for i in likeliest)
        return Logprobs(float(wide[token] - total), top)

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
            changed[~p.grammar.allowed(len(changed))] = -np.inf
        return changed

    def _drawn(self, scores: Row) -> int:
        tokens, likely = self._probabilities(scores)
        sums = likely.cumsum()
        # A generator whose state is the key and the counter: no draw leaves anything to the next.
        number = np.random.Generator(np.random.Philox(key=self._seed, counter=self.drawn)).random()
        return int(tokens[min(int(sums.searchsorted(number * sums[-1], "right")), len(tokens) - 1)])

    def _probabilities(self, scores: Row) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        p = self.params
        if p.top_k is not None and p.top_k < len(scores):
            least = np.partition(scores, len(scores) - p.top_k)[len(scores) - p.top_k]
            tokens = np.flatnonzero((scores >= least) & (scores > -np.inf))
        else:
            tokens = np.flatnonzero(scores > -np.inf)
        wide = scores[tokens].astype(np.float64) / p.temperature
        likely = np.exp(wide - wide.max())
        likely /= likely.sum()
        if p.top_p is not None and p.top_p < 1:
            order = np.argsort(-likely, kind="stable")
            sums = likely[order].cumsum()
            kept = order[: int(sums.searchsorted(p.top_p, "left")) + 1]
            tokens, likely = tokens[kept], likely[kept]
        if p.min_p:
            kept = likely >= p.min_p * likely.max()
            tokens, likely = tokens[kept], likely[kept]
        return tokens, likely / likely.sum()
