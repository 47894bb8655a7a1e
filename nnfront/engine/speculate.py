# SPDX-License-Identifier: Apache-2.0
"""Guess the next tokens of a text, so that one call computes several of them.

A guess is kept as far as the same tokens would have been drawn, so it changes how long a text takes and never the text. A call of several tokens takes longer
than one of a single token; where guesses are wrong too often to pay for that, no more are made for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nnfront.errors import RunError
from nnfront.session import Session

MOST_GUESSED = 7
"""Tokens of a guess: with the one before them they are as many as kernels attend with in one call."""
PAUSE = 48
"""Tokens without guesses after they did not pay."""
NGRAM = 3


class Guesser(Protocol):
    """What guesses the next tokens of one text."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """What may come behind all of a text's tokens, at most so many; each time they begin like the last time's."""


class NGrams:
    """Guesses that what came after the last few tokens when they were there before comes again."""

    def __init__(self, longest: int = NGRAM) -> None:
        self._sizes = range(longest, 1, -1) if longest > 1 else range(1, 0, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Guesser`. The longest run of tokens counts first, and its last place before."""
        for end in range(max(self._known, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        for size in self._sizes:
            at = self._after.get(tuple(tokens[len(tokens) - size :])) if size <= len(tokens) else None
            if at is not None:
                return list(tokens[at : at + most])
        return []


class DraftModel:
    """Guesses what a smaller model with the same tokens takes for likeliest, in a cache of its own for up to `longest` tokens."""

    def __init__(self, session: Session, longest: int) -> None:
        self._session, self._longest = session, longest
        self._cache = session.make_cache(batch=1, max_seq=longest)
        self._states = self._cache.states()  # behind the tokens of the text that were given last
        self._tokens: list[int] = []
        self._given = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Guesser`."""
        most = min(most, self._longest - len(tokens))
        if most < 1:
            return []
        known = self._go_back(tokens)
        logits = self._session["prefill"](self._ids(tokens[known:]), self._cache)
        self._states = self._cache.states()
        found = [int(logits[0, -1].argmax())]
        while len(found) < most:
            found.append(int(self._session["decode"](self._ids(found[-1:]), self._cache)[0, -1].argmax()))
        self._tokens, self._given = [*tokens, *found[:-1]], len(tokens)
        return found

    def _go_back(self, tokens: Sequence[int]) -> int:
        """Forget what does not come before a text's last token; return how many tokens are left."""
        known = min(self._given, len(tokens) - 1)  # of the text; behind it lie guesses
        if not self._states.buffers:
            while known < min(len(self._tokens), len(tokens) - 1) and self._tokens[known] == tokens[known]:
                known += 1
            self._cache.truncate(known)
        elif self._given == known:
            self._cache.go_on_from(self._states)
        else:
            known = 0
            self._cache.reset()
        return known

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._session.device)


@dataclass(slots=True)
class Pay:
    """Whether guesses of one text pay: how many tokens come of a call with guesses, on average of late."""

    tokens: float = 3.0
    pause: int = 0

    def took(self, tokens: int) -> None:
        """Count what came of a call with guesses."""
        self.tokens += (tokens - self.tokens) / 4

    def is_due(self, cost: float) -> bool:
        """Whether to guess for the next call, where one with guesses takes `cost` times as long as without."""
        if self.pause:
            self.pause -= 1
        elif self.tokens > cost:
            return True
        else:
            self.pause, self.tokens = PAUSE, cost + 0.5  # and then once more
        return False


@dataclass(slots=True)
class Clock:
    """How long calls take with and without guesses, in seconds: the least of late, as a call may be held up by what else a machine does, and never is too short."""

    plain: float = 0.0
    guessed: float = 0.0

    def took(self, seconds: float, with_guesses: bool) -> None:
        """Count a call."""
        name = "guessed" if with_guesses else "plain"
        before = getattr(self, name) or self.plain
        setattr(self, name, min(seconds, before * 9 / 8) if before else seconds)

    @property
    def cost(self) -> float:
        """How many calls without guesses take as long as one with them."""
        return self.guessed / self.plain if self.plain and self.guessed else 1.0


def guesser_of(how: str) -> NGrams:
    """What a user asks for without a model: `ngram`, or `ngram:N` for runs of N tokens. Raises RunError for anything else."""
    kind, _, number = how.partition(":")
    if kind != "ngram" or (number and not (number.isdecimal() and 1 <= int(number) <= 16)):
        raise RunError(
            f"there is no way {how!r} to guess tokens",
            help="ngram, ngram:N to look for runs of 1 to 16 tokens, draft:DIR for a smaller model with the same tokens, or mtp for a head of the checkpoint's own",
        )
    return NGrams(int(number or NGRAM))
