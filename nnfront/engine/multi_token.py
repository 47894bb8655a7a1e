# SPDX-License-Identifier: Apache-2.0
"""Guesses of a model's own head for further tokens, which reads what the model has made of each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnfront.errors import RunError
from nnfront.llm.methods import DRAFT
from nnfront.session import Session

MOST = 7
"""How many tokens the head can be asked for at a time."""


class MultiTokenHead:
    """Guesses `count` tokens behind one text of up to `longest`. The head has a cache of its own, one sequence long.

    It begins with the first token that the model computes for this text: what others have computed of a prompt it has not seen, and guesses without.
    """

    def __init__(self, session: Session, longest: int, count: int) -> None:
        self._session, self._count = session, count
        self._cache = session.make_cache("drafted", batch=1, max_seq=longest)
        self._first = self._known = (
            0  # tokens of the text that the head's cache holds: from the first on, and to where
        )
        self._made: dict[int, torch.Tensor] = {}  # of tokens behind these

    def saw(self, first: int, made: torch.Tensor) -> None:
        """Be told what the model made of some tokens of the text, right or wrong, from position `first` on: [tokens, hidden_size]."""
        if first > self._known and first not in self._made:  # others have computed what is between
            self._cache.reset()
            self._first = self._known = first
            self._made.clear()
        self._made.update(zip(range(first, first + len(made)), made, strict=True))

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Guesser`. All tokens but the last have been computed."""
        last = len(tokens) - 1
        most = min(most, self._count, self._cache.max_seq - (last - self._first) + 1)
        places = range(self._known, last)
        if most < 1 or not places or not all(place in self._made for place in places):
            return []
        self._cache.truncate(self._known - self._first)  # behind them lie guesses
        hidden = torch.stack([self._made[place] for place in places])[None]
        found = list(tokens[self._known + 1 :])
        self._known, self._made = last, {}
        for behind in range(most):
            ids = torch.tensor([found if not behind else found[-1:]], device=self._session.device)
            logits, hidden = self._session[DRAFT](ids, hidden, self._cache)
            found.append(int(logits[0, -1].argmax()))
        return found[-most:]


def head_of(session: Session, how: str, longest: int) -> MultiTokenHead:
    """What a user asks for as `mtp`, or `mtp:N` for N tokens at a time. Raises RunError for anything else, and for a model without a head."""
    _, _, number = how.partition(":")
    if number and not (number.isdecimal() and 1 <= int(number) <= MOST):
        raise RunError(f"{how!r} does not say how many tokens to guess", help=f"mtp, or mtp:1 to mtp:{MOST}")
    if DRAFT not in session.methods:
        raise RunError(
            "tokens cannot be guessed by the model's own head: it was loaded without one",
            details=[f"methods are {', '.join(map(repr, session.methods))}"],
            help="LLM.load(DIR, mtp=True), or nnfront export DIR --mtp; where the checkpoint has no head: --spec ngram",
        )
    return MultiTokenHead(session, longest, int(number or 1))
