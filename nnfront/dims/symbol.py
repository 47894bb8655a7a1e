# SPDX-License-Identifier: Apache-2.0
"""Names of sizes, and what is known about each: a range and a divisor.

A `Symbol` is its name (and, for a fresh one, its number). The facts ride along: they let the canonical form simplify, and take
no part in equality. The same name may be written with facts in one place and without in another; `merge_facts` brings
all places together before anything is decided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nnfront.errors import DimError

FUNCTIONS = ("min", "max", "floordiv", "ceildiv", "mod")
"""Names that stand for functions in dim texts and so cannot name a dim."""

_fresh_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """A named size with its facts: `min <= value <= max` (inclusive), a multiple of `multiple_of`.

    `uid` is 0 for a name that means the same dim everywhere; a fresh symbol has a number of its own.
    Equality and hash are by (name, uid). `low`, `high`, `divisor` are the facts in the form every atom of a canonical form
    has them: the tightest range that holds multiples only, infinity for "no bound".
    Raises DimError for a bad name or facts that contradict each other.
    """

    name: str
    uid: int = 0
    min: int = 0
    max: int | None = None
    multiple_of: int = 1
    low: float = field(init=False, repr=False)
    high: float = field(init=False, repr=False)
    divisor: int = field(init=False, repr=False)
    key: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_facts(self)
        step = self.multiple_of
        put = object.__setattr__
        put(self, "low", -(-self.min // step) * step)
        put(self, "high", math.inf if self.max is None else self.max // step * step)
        put(self, "divisor", step)
        put(self, "key", (0, self.name, self.uid, ()))
        put(self, "_hash", hash((self.name, self.uid)))

    @classmethod
    def fresh(cls, name: str, min: int = 0, max: int | None = None, multiple_of: int = 1) -> Symbol:
        """A symbol equal only to itself."""
        return cls(name, next(_fresh_numbers), min, max, multiple_of)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Symbol and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash holds in one process only.
        return Symbol, (self.name, self.uid, self.min, self.max, self.multiple_of)

    def __str__(self) -> str:
        return self.name

    @property
    def facts(self) -> tuple[int, int | None, int]:
        """(min, max, multiple_of)."""
        return self.min, self.max, self.multiple_of

    @property
    def only(self) -> int | None:
        """The number that the facts leave, if it is one only."""
        return int(self.low) if self.low == self.high else None


def describe_facts(minimum: float | None, maximum: float | None, multiple_of: int = 1) -> str:
    """`between 1 and 8`, `at least 0`, `at least 16, a multiple of 16`: facts in words, for messages."""
    low = None if minimum is None or minimum == -math.inf else minimum
    high = None if maximum is None or maximum == math.inf else maximum
    if low is not None and high is not None:
        words = f"exactly {low}" if low == high else f"between {low} and {high}"
    elif low is not None:
        words = f"at least {low}"
    elif high is not None:
        words = f"at most {high}"
    else:
        words = "any integer"
    return f"{words}, a multiple of {multiple_of}" if multiple_of > 1 else words


def merge_facts(symbols: Iterable[tuple[Symbol, str]]) -> dict[Symbol, Symbol]:
    """Combine what different places say about each symbol: every (symbol, place) to one symbol with all its facts.

    Returns a dict from each symbol to the one that carries all facts, in order of first occurrence; feed it to `with_facts`.
    Raises DimError, naming the places, if no number satisfies them all.
    """
    places: dict[Symbol, list[tuple[Symbol, str]]] = {}
    for symbol, place in symbols:
        places.setdefault(symbol, []).append((symbol, place))
    return {symbol: _merge_one(said) for symbol, said in places.items()}


def _merge_one(said: list[tuple[Symbol, str]]) -> Symbol:
    merged: Symbol | None = said[0][0]
    for symbol, _ in said:
        merged = merged and join_facts(merged, symbol)
    if merged is None:
        name = said[0][0].name
        stated = [
            f"{place}: {describe_facts(*symbol.facts)}"
            for symbol, place in said
            if symbol.facts != (0, None, 1)
        ]
        raise DimError(
            f"the facts about dim '{name}' contradict each other",
            details=dict.fromkeys(stated),
            help=f"no number satisfies all of them; one name is one dim, so rename one '{name}' if they may differ",
        )
    return merged


def join_facts(a: Symbol, b: Symbol) -> Symbol | None:
    """The symbol with the facts of both, None if they contradict each other."""
    assert a == b
    return a if a.facts == b.facts else narrowed(a, *b.facts)


def narrowed(symbol: Symbol, low: int | None, high: int | None, step: int | None) -> Symbol | None:
    """The symbol with more facts, None for one that is not said; None if no number has them all."""
    low = symbol.min if low is None else max(symbol.min, low)
    high = min((most for most in (symbol.max, high) if most is not None), default=None)
    step = symbol.multiple_of if step is None else math.lcm(symbol.multiple_of, step)
    return None if _is_empty(low, high, step) else Symbol(symbol.name, symbol.uid, low, high, step)


def names(symbols: Iterable[Symbol]) -> dict[Symbol, str]:
    """Distinct names to print: named symbols keep their own, fresh ones become `n`, `n_1`, ... in order of occurrence."""
    ordered = list(dict.fromkeys(symbols))
    result = {symbol: symbol.name for symbol in ordered}
    taken = {symbol.name for symbol in ordered if symbol.uid == 0}
    for symbol in ordered:
        if symbol.uid:
            candidates = itertools.chain([symbol.name], (f"{symbol.name}_{i}" for i in itertools.count(1)))
            result[symbol] = next(name for name in candidates if name not in taken)
            taken.add(result[symbol])
    return result


def _is_empty(low: int, high: int | None, step: int) -> bool:
    return high is not None and -(-low // step) * step > high


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in FUNCTIONS:
        raise DimError(
            f"{name!r} cannot name a dim",
            help="a name is a word of letters, digits and underscores, and not "
            + ", ".join(FUNCTIONS[:-1])
            + f" or {FUNCTIONS[-1]}",
        )


def _check_facts(symbol: Symbol) -> None:
    name, (low, high, step) = symbol.name, symbol.facts
    for fact, value in (("min", low), ("max", high), ("multiple_of", step)):
        if type(value) is not int and not (fact == "max" and value is None):
            raise DimError(f"dim '{name}': {fact} must be an int, got {value!r}")
    if low < 0:
        raise DimError(f"dim '{name}': min is {low}, but a dim is never negative")
    if step < 1:
        raise DimError(f"dim '{name}': multiple_of is {step}, but must be at least 1")
    if high is not None and high < low:
        raise DimError(f"dim '{name}': max is {high}, which is less than min, {low}")
    if _is_empty(low, high, step):
        raise DimError(f"dim '{name}': there is no multiple of {step} between {low} and {high}")
