# SPDX-License-Identifier: Apache-2.0
"""Guesses of a model's own head for further tokens, which reads what the model has made of each token; of all texts of a batch together.

Texts lack different numbers of tokens in the head's cache, as different numbers of guesses were right. So that one call takes all of them, those that lack
fewer go back, and have their last tokens computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nnfront.engine.changes import Cut, Drop, Make
from nnfront.engine.pages import Pages
from nnfront.engine.pool import FILLER, Pool
from nnfront.engine.schedule import Limits
from nnfront.errors import RunError
from nnfront.llm.methods import DRAFT
from nnfront.session import Session

MOST = 7
"""How many tokens the head can be asked for at a time."""
ROWS = 32
"""Tokens of one call, where they are of several texts."""
PAGE = 16


@dataclass(slots=True)
class MultiTokenHead:
    """What the head has seen of one text, of which it is asked for up to `count` tokens at a time.

    It begins with the first token that the model computes for this text: what others have computed of a prompt it has not seen, and guesses without.
    """

    count: int
    first: int = 0
    """Tokens of the text that the head's cache holds: from the first on, and to those that are known."""
    known: int = 0
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """What the model made of tokens behind these, and of a few before."""

    def saw(self, first: int, made: torch.Tensor) -> None:
        """Be told what the model made of some tokens of the text, right or wrong, from position `first` on: [tokens, hidden_size]."""
        if first > self.known and first - 1 not in self.made:  # others have computed what is between
            self.begin(first)
        self.made.update(zip(range(first, first + len(made)), made, strict=True))

    def begin(self, first: int) -> None:
        """Forget all, and go on with a position."""
        self.first = self.known = first
        self.made.clear()


class Wish(NamedTuple):
    """What is to be guessed: at most so many tokens behind a text's; all of them but the last have been computed."""

    head: MultiTokenHead
    tokens: Sequence[int]
    most: int


class Heads:
    """The head at work on the texts of a batch, which are known by their sequences' numbers, in a paged cache of its own."""

    def __init__(self, session: Session, limits: Limits) -> None:
        """`limits`: of the sequences; there are pages for as many tokens as they have together. What finds no page is guessed later."""
        self._session = session
        size = next(iter(session.backend.page_sizes(session.program.target) or [PAGE]))
        pages = limits.pages * limits.page_size // size + limits.max_num_seqs
        self._longest = limits.max_model_len
        own = Limits(self._longest, pages, limits.max_num_seqs, page_size=size, chunk=size, step_tokens=size)
        self._pool = Pool(session, own, argument="drafted")
        self._pages = Pages(pages, size)

    def end(self, number: int) -> None:
        """Forget a text."""
        if number in self._pages:
            self._pages.drop(number)
            self._pool.apply([Drop(number)])

    def guess(self, wishes: Mapping[int, Wish]) -> dict[int, list[int]]:
        """What may come behind each text; those are left out of which the head has not seen enough."""
        ready = {number: wish for number, wish in wishes.items() if self._has_place(number, wish)}
        found: dict[int, list[int]] = {number: [] for number in ready}
        hidden: dict[int, torch.Tensor] = {}
        for count, numbers in self._in_groups(ready).items():
            self._call(
                {number: self._last(number, ready[number], count) for number in numbers}, found, hidden
            )
        for head, tokens, _ in ready.values():
            head.known = len(tokens) - 1
            head.made = {at: x for at, x in head.made.items() if head.known - MOST <= at < head.known}
        for behind in range(1, MOST):
            asked = [number for number, wish in ready.items() if min(wish.most, wish.head.count) > behind]
            asked = [number for number in asked if self._takes(number, 1)]
            if asked:
                self._call({n: (found[n][-1:], hidden[n]) for n in asked}, found, hidden)
        return found

    def _has_place(self, number: int, wish: Wish) -> bool:
        """Whether there is what to guess from, and a place for it, which it then has."""
        head, tokens, most = wish
        last = len(tokens) - 1
        missing = range(head.known, last)
        if most < 1 or not missing or not all(place in head.made for place in missing):
            return False
        if number not in self._pages:
            self._pages.add(number)
            self._pool.apply([Make(number)])
        self._pages.truncate(number, head.known - head.first)  # behind them lie guesses
        if not self._takes(number, len(missing)):
            self.end(number)
            head.begin(last)
            return False
        return True

    def _takes(self, number: int, count: int) -> bool:
        """Whether there is a place for more tokens of a text, which they then have."""
        fits = self._pages.length(number) + count <= self._longest
        fits = fits and self._pages.need(number, count) <= self._pages.free
        if fits:
            self._pages.append(number, count)
        return fits

    @staticmethod
    def _in_groups(ready: Mapping[int, Wish]) -> dict[int, list[int]]:
        """The texts by how many of their last tokens are computed in one call."""
        missing = {number: len(wish.tokens) - 1 - wish.head.known for number, wish in ready.items()}
        few = max((count for count in missing.values() if count <= MOST + 1), default=0)
        groups: dict[int, list[int]] = {}
        for number, (head, tokens, _) in ready.items():
            begin = len(tokens) - 1 - few
            again = begin >= head.first and all(at in head.made for at in range(begin, head.known))
            count = few if again and missing[number] <= few else missing[number]
            groups.setdefault(count, []).append(number)
        return groups

    def _last(self, number: int, wish: Wish, count: int) -> tuple[list[int], torch.Tensor]:
        """The last tokens of a text, which its row in the cache goes back for, and what was made of those before each."""
        last = len(wish.tokens) - 1
        self._pool.apply([Cut(number, last - count - wish.head.first)])
        made = torch.stack([wish.head.made[place] for place in range(last - count, last)])
        return list(wish.tokens[last + 1 - count :]), made

    def _call(
        self,
        given: Mapping[int, tuple[list[int], torch.Tensor]],
        found: Mapping[int, list[int]],
        hidden: dict[int, torch.Tensor],
    ) -> None:
        """Compute as many tokens of each of some texts; add the likeliest next one of each, and keep what stands in the place of `hidden` for it."""
        some = next(iter(given.values()))
        count = len(some[0])
        for numbers, rows in self._pool.rows([*given], max(ROWS // count, 1), count):
            several = [given.get(number, some) for number in numbers]
            ids = torch.tensor([tokens for tokens, _ in several], device=self._session.device)
            logits, made = self._session[DRAFT](ids, torch.stack([x for _, x in several]), rows)
            for number, token, x in zip(numbers, logits[:, -1].argmax(-1).tolist(), made, strict=True):
                if number != FILLER:
                    found[number].append(token)
                    hidden[number] = x


def head_of(session: Session, how: str) -> MultiTokenHead:
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
    return MultiTokenHead(int(number or 1))
