# SPDX-License-Identifier: Apache-2.0
"""Floor division and remainder of forms, with Python's meaning.

Each rule holds wherever the expression has a value, that is, where no divisor is 0: `batch*seq // seq` is `batch`. What no rule
decides becomes one atom, normalised so that equal quotients meet: the divisor and the leading coefficient are positive, the
constant lies in [0, divisor), and common factors are cancelled. A rounded-up quotient is `(a + k - 1) // k`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from nnfront.dims.polynomial import (
    INF,
    ONE,
    ZERO,
    Atom,
    Bounds,
    Call,
    Coefficient,
    Form,
    Monomial,
    Terms,
    add,
    add_all,
    bounds,
    constant,
    divisor,
    monomial_divisor,
    multiply,
    negate,
    of_atom,
    scale,
    subtract,
    terms_divisor,
    whole,
)
from nnfront.errors import DimError


def floordiv(a: Form, b: Form) -> Form:
    """`a // b`, rounded towards minus infinity. Raises DimError if b is certainly 0."""
    check_divisor(b)
    if leads_negative(b):
        return floordiv(negate(a), negate(b))
    if _is_below(a, b):
        return ZERO
    a, b = clear_fractions(a, b)
    quotient, rest = divide(a, b)
    least, most = quotient_bounds(bounds(rest), _divisor_bounds(b))
    if least == most:
        return add(quotient, constant(int(least)))
    positive = is_nonnegative(b)
    step = math.gcd(terms_divisor(rest[0]), divisor(b))
    if positive:
        # (g*x + c) // (g*y) is (x + c // g) // y.
        rest = rest[0], rest[1] // step * step
    reduced, by = cancel(rest, b)
    if by == b and rest[1] == -step and positive:
        # A quotient rounded up, less 1: a product of dims can be cancelled as well.
        reduced, by = cancel((rest[0], 0), b)
        reduced, by = (subtract(reduced, ONE), by) if is_nonnegative(by) else (rest, b)
    if by != b:
        return add(quotient, floordiv(reduced, by))
    if not positive:
        return add(quotient, _floordiv_atom(rest, b))
    if leads_negative(rest):
        # For b > 0: -x // b is -1 - (x - 1) // b.
        flipped = floordiv(subtract(negate(rest), ONE), b)
        return subtract(quotient, add(flipped, ONE))
    inner = single_call(rest[0], "floordiv")
    if inner:
        x, k = inner.args
        return add(quotient, floordiv(add(x, scale(k, rest[1])), multiply(k, b)))
    return add(quotient, _floordiv_atom(rest, b))


def mod(a: Form, b: Form) -> Form:
    """`a % b`, with the sign of b. Raises DimError if b is certainly 0."""
    check_divisor(b)
    if leads_negative(b):
        return negate(mod(negate(a), negate(b)))
    if _is_below(a, b):
        return a
    rest = divide(a, b)[1]
    least, most = quotient_bounds(bounds(rest), _divisor_bounds(b))
    if least == most:
        return subtract(rest, scale(b, int(least)))
    extra = rest[1] % math.gcd(terms_divisor(rest[0]), divisor(b)) if is_nonnegative(b) else 0
    if extra:
        # (g*x + extra) % (g*y) is g*x % (g*y) + extra.
        return add(mod((rest[0], rest[1] - extra), b), constant(extra))
    if not b[0]:
        return _mod_int(rest, b[1])
    inner = single_call(rest[0], "mod")
    if inner and rest[1] == 0 and inner.args[1] == b:
        return rest
    reduced, by = cancel(rest, b)
    if by != b:
        # (g*x) % (g*y) is g * (x % y).
        return multiply(mod(reduced, by), divide(b, by)[0])
    return _mod_atom(rest, b)


def map_atoms(form: Form, atom: Callable[[Atom], Form]) -> Form:
    """The form with something in the place of each atom."""
    parts = [constant(form[1])]
    for monomial, value in form[0]:
        product = constant(value.numerator)
        for each, power in monomial:
            factor = atom(each)
            for _ in range(power):
                product = multiply(product, factor)
        parts.append(product if value.denominator == 1 else floordiv(product, constant(value.denominator)))
    return add_all(parts)


def ceildiv(a: Form, b: Form) -> Form:
    """`a / b`, rounded towards plus infinity. Raises DimError if b is certainly 0."""
    return negate(floordiv(negate(a), b))


def _mod_int(rest: Form, k: int) -> Form:
    simpler = rest
    for monomial, value in rest[0]:
        if not isinstance(value, int):
            continue
        inner = single_call(((monomial, 1),), "mod")
        if inner and not inner.args[1][0] and value * inner.args[1][1] % k == 0:
            # (x % (j*k) + y) % k is (x + y) % k.
            simpler = add(simpler, scale(subtract(inner.args[0], of_atom(inner)), value))
        elif abs(value) > k:
            # Towards zero: a coefficient keeps its sign, so `-n % 16` stays readable.
            sign = 1 if value > 0 else -1
            simpler = subtract(simpler, (((monomial, sign * (abs(value) // k * k)),), 0))
    if simpler != rest:
        return mod(simpler, constant(k))
    reduced, by = cancel(rest, constant(k))
    if by[1] != k:
        return scale(mod(reduced, by), k // by[1])
    return _mod_atom(rest, constant(k))


def divide(a: Form, b: Form) -> tuple[Form, Form]:
    """Quotient and rest of long division that takes exact steps only: a = quotient * b + rest, every coefficient integral."""
    lead, lead_value = b[0][0] if b[0] else ((), b[1])
    quotient, rest = ZERO, a
    while step := _exact_step(rest[0], lead, lead_value):
        quotient = add(quotient, step)
        rest = subtract(rest, multiply(step, b))
    if not b[0]:
        quotient = add(quotient, constant(rest[1] // b[1]))
        rest = rest[0], rest[1] % b[1]
    return quotient, rest


def _exact_step(terms: Terms, lead: Monomial, lead_value: Coefficient) -> Form | None:
    for monomial, value in terms:
        ratio = _divide_monomial(monomial, lead)
        if ratio is not None and value * monomial_divisor(ratio) % lead_value == 0:
            share = whole(Fraction(value, lead_value))
            return (((ratio, share),), 0) if ratio else ((), int(share))
    return None


def _divide_monomial(a: Monomial, b: Monomial) -> Monomial | None:
    if not b:
        return a
    powers = dict(a)
    for atom, power in b:
        left = powers.get(atom, 0) - power
        if left < 0:
            return None
        powers[atom] = left
    return tuple((atom, power) for atom, power in powers.items() if power)


def cancel(a: Form, b: Form) -> tuple[Form, Form]:
    """Divide both by their common integer factor and common monomial; needs integer coefficients (else returns both as they are)."""
    terms = (*a[0], *b[0])
    if any(not isinstance(value, int) for _, value in terms):
        return a, b
    factor = math.gcd(a[1], b[1], *(int(value) for _, value in terms))
    shared: Monomial = ()
    if a[1] == 0 and b[1] == 0:
        common = dict(terms[0][0])
        for monomial, _ in terms[1:]:
            powers = dict(monomial)
            common = {atom: min(power, powers[atom]) for atom, power in common.items() if atom in powers}
        shared = tuple(common.items())
    return _over(a, shared, factor), _over(b, shared, factor)


def _over(a: Form, monomial: Monomial, factor: int) -> Form:
    result = constant(a[1] // factor)
    for each, value in a[0]:
        ratio = _divide_monomial(each, monomial)
        assert ratio is not None
        assert isinstance(value, int)
        part: Form = (((ratio, value // factor),), 0) if ratio else constant(value // factor)
        result = add(result, part)
    return result


def clear_fractions(a: Form, b: Form) -> tuple[Form, Form]:
    factor = math.lcm(*(value.denominator for _, value in (*a[0], *b[0])))
    return (a, b) if factor == 1 else (scale(a, factor), scale(b, factor))


def leads_negative(a: Form) -> bool:
    return (a[0][0][1] if a[0] else a[1]) < 0


def is_nonnegative(a: Form) -> bool:
    return bounds(a)[0] >= 0


def _is_below(a: Form, b: Form) -> bool:
    """Whether 0 <= a < b, for a dim b: asked of a as it stands, as long division may hide it."""
    return bool(b[0]) and is_nonnegative(a) and bounds(subtract(b, a))[0] > 0


def single_call(terms: Terms, kind: str) -> Call | None:
    """The call, if the terms are nothing but one call of this kind."""
    if len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:
        atom, power = terms[0][0][0]
        if power == 1 and isinstance(atom, Call) and atom.kind == kind:
            return atom
    return None


def check_divisor(b: Form) -> None:
    if bounds(b) == (0, 0):
        raise DimError(
            "division by zero in a dim expression",
            help="the divisor must be able to be something else than 0",
        )


def _divisor_bounds(b: Form) -> Bounds:
    """Range of b where it is not 0."""
    low, high = bounds(b)
    return (divisor(b), high) if low == 0 else (low, high)


def quotient_bounds(a: Bounds, b: Bounds) -> Bounds:
    """Range of x // y for x in a and y in b, where b holds 0 only if it holds numbers of both signs."""
    if b[1] < 0:
        return quotient_bounds((-a[1], -a[0]), (-b[1], -b[0]))
    if b[0] < 0:
        most = max(-a[0], a[1])
        return -most, most
    corners = [_quotient(x, y) for x in a for y in b]
    return min(corners), max(corners)


def _quotient(x: float, y: float) -> float:
    if y == INF:
        return 0 if x >= 0 else -1
    return x if x in (INF, -INF) else x // y


def _floordiv_atom(a: Form, b: Form) -> Form:
    return of_atom(Call("floordiv", (a, b), *quotient_bounds(bounds(a), _divisor_bounds(b))))


def _mod_atom(a: Form, b: Form) -> Form:
    step = math.gcd(divisor(a), divisor(b))
    low, high = bounds(b)
    least, most = min(low + 1, 0), max(high - 1, 0)
    if low >= 0 and is_nonnegative(a):
        most = min(most, bounds(a)[1])
    return of_atom(Call("mod", (a, b), least, most, step))
