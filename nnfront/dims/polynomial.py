# SPDX-License-Identifier: Apache-2.0
"""The canonical form of an integer expression: a sum of products of atoms, and its arithmetic.

    form      (terms, constant)                     2*batch*seq + seq // 16 + 1
    terms     ((monomial, coefficient), ...)        sorted: higher degree first, then by atom keys
    monomial  ((atom, power), ...)                  sorted by atom keys
    atom      Symbol, or Call: floordiv(a, b), mod(a, b), min(a, ...), max(a, ...), whose arguments are forms again

Two expressions are the same if their forms are equal as tuples. Coefficients are ints, or Fractions where the monomial is
known to be divisible: for a `seq` that is a multiple of 16, `seq // 16` is one sixteenth of `seq`, so that `seq // 16 * 16` is
`seq` without a rule for it. No order depends on hashes or addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeAlias

from nnfront.dims.symbol import Symbol
from nnfront.dims.work import spend
from nnfront.errors import DimError

INF = math.inf


class Call:
    """A function atom: `kind` is floordiv, mod, min or max; its range and a divisor of its value are found once, by its maker."""

    __slots__ = ("_hash", "args", "depth", "divisor", "high", "key", "kind", "low")

    def __init__(self, kind: str, args: tuple[Form, ...], low: float, high: float, divisor: int = 1) -> None:
        self.kind = kind
        self.args = args
        self.low = low
        self.high = high
        self.divisor = divisor
        self.depth: int = 1 + max(
            (
                atom.depth
                for arg in args
                for monomial, _ in arg[0]
                for atom, _ in monomial
                if type(atom) is Call
            ),
            default=0,
        )
        if self.depth > MAX_NESTING:
            raise DimError(
                f"a dim expression has more than {MAX_NESTING} divisions, minima and maxima inside each other",
                help=_NAME_IT,
            )
        self.key: tuple[Any, ...] = (1, kind, 0, tuple(form_key(arg) for arg in args))
        self._hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Call and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash holds in one process only.
        return Call, (self.kind, self.args, self.low, self.high, self.divisor)


Atom: TypeAlias = Symbol | Call
Coefficient: TypeAlias = int | Fraction
Monomial: TypeAlias = tuple[tuple[Atom, int], ...]
Terms: TypeAlias = tuple[tuple[Monomial, Coefficient], ...]
Form: TypeAlias = tuple[Terms, int]
Bounds: TypeAlias = tuple[float, float]

MAX_TERMS = 4096
"""A product of sums grows exponentially when it is multiplied out, which the canonical form is."""
MAX_DEGREE = 64
"""A dim that is squared again and again, from one function to the next, has a degree that grows exponentially."""
MAX_NESTING = 50
"""Function atoms inside each other; more would exhaust Python's stack."""

_NAME_IT = "give a part of it a name of its own"

ZERO: Form = ((), 0)
ONE: Form = ((), 1)


def constant(value: int) -> Form:
    return (), value


def of_atom(atom: Atom) -> Form:
    return ((((atom, 1),), 1),), 0


def monomial_key(monomial: Monomial) -> tuple[Any, ...]:
    # Degree first, then more of the earlier atom: an order that multiplication keeps, as long division needs.
    return -sum(power for _, power in monomial), tuple((atom.key, -power) for atom, power in monomial)


def form_key(form: Form) -> tuple[Any, ...]:
    """A key of plain numbers and strings that orders forms the same way in every process."""
    return tuple((monomial_key(monomial), value) for monomial, value in form[0]), form[1]


def whole(value: Coefficient) -> Coefficient:
    """The same number, as an int if it is one."""
    return value.numerator if value.denominator == 1 else value


def _sorted_form(terms: dict[Monomial, Coefficient], offset: int) -> Form:
    kept = [term for term in terms.items() if term[1]]
    if len(kept) > 1:
        spend(len(kept))
        _check_length(len(kept))
        kept.sort(key=lambda term: monomial_key(term[0]))
    return tuple(kept), offset


def _check_length(terms: int) -> None:
    if terms > MAX_TERMS:
        raise DimError(
            f"a dim expression multiplies out to some {terms} terms, {MAX_TERMS} are the most",
            help=_NAME_IT,
        )


def add(a: Form, b: Form) -> Form:
    if not a[0]:
        return b[0], a[1] + b[1]
    if not b[0]:
        return a[0], a[1] + b[1]
    terms = dict(a[0])
    for monomial, value in b[0]:
        terms[monomial] = whole(terms.get(monomial, 0) + value)
    return _sorted_form(terms, a[1] + b[1])


def add_all(forms: Iterable[Form]) -> Form:
    """The sum of many forms, in time that is linear in their length."""
    terms: dict[Monomial, Coefficient] = {}
    offset = 0
    for more, number in forms:
        offset += number
        for monomial, value in more:
            terms[monomial] = whole(terms.get(monomial, 0) + value)
    return _sorted_form(terms, offset)


def scale(a: Form, factor: int) -> Form:
    if factor == 0:
        return ZERO
    return tuple([(monomial, whole(value * factor)) for monomial, value in a[0]]), a[1] * factor


def negate(a: Form) -> Form:
    return scale(a, -1)


def subtract(a: Form, b: Form) -> Form:
    return add(a, scale(b, -1))


def multiply(a: Form, b: Form) -> Form:
    if not a[0]:
        return scale(b, a[1])
    if not b[0]:
        return scale(a, b[1])
    # Before some are found to be alike, as it is the work that is bounded.
    _check_length(len(a[0]) * len(b[0]))
    spend(len(a[0]) * len(b[0]))
    terms: dict[Monomial, Coefficient] = {}
    for left, left_value in (*a[0], ((), a[1])):
        for right, right_value in (*b[0], ((), b[1])):
            value = left_value * right_value
            if value:
                monomial = multiply_monomials(left, right)
                terms[monomial] = whole(terms.get(monomial, 0) + value)
    offset = terms.pop((), 0)
    assert isinstance(offset, int)
    return _sorted_form(terms, offset)


def multiply_monomials(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    if sum(power for _, power in a) + sum(power for _, power in b) > MAX_DEGREE:
        raise DimError(f"a dim expression has a degree of more than {MAX_DEGREE}", help=_NAME_IT)
    if a[-1][0].key < b[0][0].key:
        return a + b
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].key))


def monomial_divisor(monomial: Monomial) -> int:
    """A number that is known to divide the monomial."""
    return math.prod(atom.divisor**power for atom, power in monomial)


def terms_divisor(terms: Terms) -> int:
    """The greatest number known to divide the sum of the terms; 0 for no terms."""
    # A term p/q * m is an integer, so what is left of p after reduction divides it.
    return math.gcd(*((value * monomial_divisor(monomial)).numerator for monomial, value in terms))


def divisor(a: Form) -> int:
    """The greatest number known to divide the form; 0 for the constant 0."""
    return math.gcd(terms_divisor(a[0]), a[1])


def times(a: float, b: float) -> float:
    """A product of bounds, where 0 times infinity is 0 (and a huge int is never made a float)."""
    if not a or not b:
        return 0
    if math.inf in (a, b) or -math.inf in (a, b):
        return INF if (a > 0) == (b > 0) else -INF
    return a * b


def multiply_bounds(a: Bounds, b: Bounds) -> Bounds:
    if a[0] >= 0 and b[0] >= 0:
        return times(a[0], b[0]), times(a[1], b[1])
    corners = [times(x, y) for x in a for y in b]
    return min(corners), max(corners)


def monomial_bounds(monomial: Monomial) -> Bounds:
    result: Bounds = (1, 1)
    for atom, power in monomial:
        one: Bounds = (atom.low, atom.high)
        several = one
        for _ in range(power - 1):
            several = multiply_bounds(several, one)
        if power % 2 == 0 and several[0] < 0:
            several = (0, several[1])
        result = multiply_bounds(result, several)
    return result


def bounds(a: Form) -> Bounds:
    """Inclusive range by interval arithmetic: sound, not always tight."""
    low: Any = a[1]
    high: Any = a[1]
    if len(a[0]) > 1:
        spend(len(a[0]))
    for monomial, value in a[0]:
        least, most = monomial_bounds(monomial)
        if value < 0:
            least, most = most, least
        # The exact product of a Fraction and a large int must not pass through a float.
        low += -INF if least in (INF, -INF) else value * least
        high += INF if most in (INF, -INF) else value * most
    return (
        math.ceil(low) if type(low) is Fraction else low,
        math.floor(high) if type(high) is Fraction else high,
    )


def symbols(a: Form) -> set[Symbol]:
    found: set[Symbol] = set()
    for monomial, _ in a[0]:
        for atom, _ in monomial:
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                for arg in atom.args:
                    found |= symbols(arg)
    return found


def sorted_symbols(a: Form) -> tuple[Symbol, ...]:
    return tuple(sorted(symbols(a), key=lambda symbol: symbol.key))


def single_symbol(a: Form) -> Symbol | None:
    """The symbol, if the form is nothing but one."""
    terms = a[0]
    if len(terms) == 1 and a[1] == 0:
        monomial, value = terms[0]
        if value == 1 and len(monomial) == 1:
            atom, power = monomial[0]
            if power == 1 and type(atom) is Symbol:
                return atom
    return None
