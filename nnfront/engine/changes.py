# SPDX-License-Identifier: Apache-2.0
"""What can happen to the sequences of an engine's cache, as a scheduler says it and every rank does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Make:
    """Begin a sequence in the cache, with the first `length` tokens of another if there is a `source`, and the states of that number behind them;
    `adapter` as its `Sequence` has it."""

    sequence: int
    source: int | None = None
    length: int = 0
    states: int | None = None
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class Cut:
    """Have a sequence in the cache go back to its first tokens: those behind them were guessed."""

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep the first tokens of a sequence in the cache for others to begin with: it does not go on. Of one that is kept already, keep no more than these."""

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a sequence in the cache."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy what layers keep of a whole sequence as it is now, under a number."""

    states: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget a copy."""

    states: int


Change: TypeAlias = Make | Cut | Remember | Drop | Save | Forget
