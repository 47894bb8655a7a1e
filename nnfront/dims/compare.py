# SPDX-License-Identifier: Apache-2.0
"""Decide comparisons of forms: yes (True), no (False) or unknown (None). A yes or no holds for every value inside the facts."""

from __future__ import annotations

import math

from nnfront.dims.divide import check_divisor, floordiv, is_nonnegative, map_atoms, mod
from nnfront.dims.polynomial import (
    Call,
    Coefficient,
    Form,
    Monomial,
    add,
    add_all,
    bounds,
    constant,
    divisor,
    monomial_bounds,
    multiply,
    negate,
    of_atom,
    scale,
    subtract,
    terms_divisor,
    whole,
)
from nnfront.dims.symbol import Symbol

_DEPTH = 4
"""How many atoms in a row a proof may replace; each replacement may branch."""
_TERMS = 500
"""How many terms a proof may look at; those of sizes that occur take fewer than 20. What is not proved by then is unknown."""


def equal(a: Form, b: Form) -> bool | None:
    difference = plain(subtract(a, b))
    if not difference[0]:
        return difference[1] == 0
    low, high = bounds(difference)
    if low > 0 or high < 0:
        return False
    if difference[1] % terms_divisor(difference[0]):
        return False
    if all(type(atom) is Symbol and power == 1 and not more for ((atom, power), *more), _ in difference[0]):
        # The range of a linear form is exact, so no proof will find more.
        return True if low == high else None
    opposite = negate(difference)
    if is_never_negative(difference) and is_never_negative(opposite):
        return True
    one = constant(1)
    if is_never_negative(subtract(difference, one)) or is_never_negative(subtract(opposite, one)):
        return False
    return None


def less_equal(a: Form, b: Form) -> bool | None:
    difference = subtract(b, a)
    if is_never_negative(difference):
        return True
    if is_never_negative(subtract(negate(difference), constant(1))):
        return False
    return None


def divides(k: int, a: Form) -> bool | None:
    """Whether k divides a. Raises DimError if k is 0."""
    check_divisor(constant(k))
    if divisor(a) % k == 0:
        return True
    rest = mod(plain(a), constant(abs(k)))
    if not rest[0]:
        return rest[1] == 0
    return False if bounds(rest)[0] > 0 else None


def plain(a: Form) -> Form:
    """A normal form for comparing, not for reading: no `mod`, and coefficients under `//` reduced to [0, divisor)."""
    return map_atoms(a, _plain_atom)


def _plain_atom(atom: Symbol | Call) -> Form:
    if isinstance(atom, Symbol) or atom.kind in ("min", "max"):
        return of_atom(atom)
    x, y = (plain(arg) for arg in atom.args)
    quotient = floordiv(x, y) if y[0] else _plain_quotient(x, y[1])
    return quotient if atom.kind == "floordiv" else subtract(x, multiply(quotient, y))


def _plain_quotient(x: Form, k: int) -> Form:
    if any(value.denominator > 1 for _, value in x[0]):
        return floordiv(x, constant(k))
    quotient = tuple((monomial, value // k) for monomial, value in x[0] if value // k)
    rest = tuple((monomial, value % k) for monomial, value in x[0] if value % k)
    return add((quotient, 0), floordiv((rest, x[1]), constant(k)))


def is_never_negative(a: Form) -> bool:
    """Whether a >= 0 is proved: by its range, or by replacing an atom with what bounds it (`min(x, y) <= x`, `k * (x // k) <= x`)."""
    return bounds(a)[0] >= 0 or _Proof().holds(a, _DEPTH)


class _Proof:
    """One search for a proof, and how much it may still look at."""

    def __init__(self) -> None:
        self.left = _TERMS

    def holds(self, a: Form, depth: int) -> bool:
        """Whether a >= 0 is found to hold."""
        if bounds(a)[0] >= 0:
            return True
        self.left -= len(a[0])
        if not a[0] or depth == 0 or self.left < 0:
            return False
        shifted = _shift(a)
        if shifted is not a and bounds(shifted)[0] >= 0:
            return True
        for monomial, value in a[0]:
            for atom, power in monomial:
                if isinstance(atom, Call) and power == 1:
                    others: Monomial = tuple(item for item in monomial if item[0] is not atom)
                    if monomial_bounds(others)[0] >= 0 and self._without(a, atom, others, value, depth - 1):
                        return True
        return False

    def _without(self, a: Form, call: Call, others: Monomial, value: Coefficient, depth: int) -> bool:
        """Whether a >= 0 follows when the term value * others * call, with others >= 0, is replaced by a bound from below."""
        weight = value.numerator
        around = ((((others, weight),), 0)) if others else constant(weight)
        term = multiply(around, of_atom(call))
        scaled = scale(a, value.denominator)

        def holds(replacement: Form) -> bool:
            return self.holds(add(subtract(scaled, term), multiply(around, replacement)), depth)

        if call.kind in ("min", "max"):
            enough = any if (weight < 0) == (call.kind == "min") else all
            return enough(holds(arg) for arg in call.args)
        x, k = call.args
        if not is_nonnegative(k):
            return False
        if call.kind == "mod":
            return weight < 0 and (holds(subtract(k, constant(1))) or (is_nonnegative(x) and holds(x)))
        # x - k + 1 <= k * (x // k) <= x, so look at k * a instead; as a is an integer, k * a > -k is enough.
        bound = x if weight < 0 else add(subtract(x, k), constant(math.gcd(divisor(x), divisor(k))))
        slack = constant(k[1] - 1) if not k[0] and value.denominator == 1 else constant(0)
        relaxed = add(multiply(k, subtract(scaled, term)), multiply(around, bound))
        return self.holds(add(relaxed, slack), depth)


def _shift(a: Form) -> Form:
    """Count each name from its minimum, so that `batch*seq - batch` with seq >= 1 becomes `batch*seq'` and its range is seen."""
    if not any(len(monomial) > 1 or monomial[0][1] > 1 for monomial, _ in a[0]):
        return a
    parts = [constant(a[1])]
    for monomial, value in a[0]:
        product: Form = constant(1)
        for atom, power in monomial:
            factor = of_atom(atom)
            if isinstance(atom, Symbol) and 0 < atom.low < math.inf:
                span = None if atom.max is None else int(atom.high - atom.low)
                factor = add(of_atom(Symbol(atom.name, atom.uid, 0, span)), constant(int(atom.low)))
            for _ in range(power):
                product = multiply(product, factor)
        terms = tuple((each, whole(value * share)) for each, share in product[0])
        parts.append((terms, int(value * product[1])))
    return add_all(parts)
