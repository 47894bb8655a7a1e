# SPDX-License-Identifier: Apache-2.0
"""Sequences of an engine, and what their tokens alone say of them: whose prompt comes next, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, of which the first `prompt` were given and the first `computed` are in the cache; it ends with at most `most`.

    `arrival` numbers it and says who came first; `cached` is how many tokens of the prompt others had computed; `adapter` is the number of its adapter, -1 for none. `drafts` are tokens
    that may come behind those that are computed next, which are computed with them and kept as far as they are drawn; some of them may have been drawn already.
    `ahead` is an older one that it waits for, as that is about to compute what both begin with, `common` tokens.
    """

    arrival: int
    tokens: list[int]
    prompt: int
    most: int
    salt: str = ""
    adapter: int = -1
    computed: int = 0
    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    ahead: Sequence | None = field(default=None, repr=False)
    common: int = 0

    @property
    def answers(self) -> bool:
        """Whether its prompt is computed, so that it goes on token by token."""
        return self.computed >= self.prompt

    @property
    def room(self) -> int:
        """How many tokens can be computed behind the next one."""
        return self.most - self.computed - 1

    @property
    def own(self) -> str:
        """With whom it shares what is computed of tokens: that is something else with another adapter."""
        return f"{self.adapter} {self.salt}"

    @property
    def next(self) -> list[int]:
        """The tokens that are computed next."""
        return [self.tokens[self.computed], *self.drafts]


def in_turn(prompts: list[Sequence], *, was_passed_over: bool) -> list[Sequence]:
    """Whose prompt is computed next, of some in the order in which they came: that of which least is left, and the oldest before it if it was passed over.

    The turn of one that waits is that of the one that it waits for.
    """
    by_rest = sorted(prompts, key=lambda sequence: sequence.prompt - sequence.computed)
    turns = prompts[:1] * was_passed_over
    for sequence in by_rest:
        while sequence.ahead is not None:
            sequence = sequence.ahead
        turns.append(sequence)
    return list(dict.fromkeys(turns))


def ahead_of(
    sequence: Sequence, older: Iterable[Sequence], known: int, grain: int
) -> tuple[Sequence | None, int]:
    """Which of some older ones is about to compute most of what the sequence begins with, and how many tokens of it, in whole blocks of `grain`; None and 0 if none more than are `known`."""
    found, most = None, known
    for other in older:
        if not other.answers and other.own == sequence.own:
            common = _common(sequence, other, grain)
            if common > max(most, other.computed):
                found, most = other, common
    return (None, 0) if found is None else (found, most)


def _common(sequence: Sequence, other: Sequence, grain: int) -> int:
    """With how many tokens of their prompts both begin, in whole blocks, the sequence's last one left out."""
    at, most = 0, min(sequence.prompt - 1, other.prompt) - grain
    while at <= most and sequence.tokens[at : at + grain] == other.tokens[at : at + grain]:
        at += grain
    return at
