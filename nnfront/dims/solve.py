# SPDX-License-Identifier: Apache-2.0
"""Find symbols: from observed numbers (`solve`; `determined` says which these tell), or from sizes over another function's symbols (`unify`)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from fractions import Fraction
from math import gcd

from nnfront.dims.dim import Dim, Size, form_of, size_of
from nnfront.dims.divide import clear_fractions, divide
from nnfront.dims.polynomial import Form, Monomial, add, constant, of_atom, single_symbol, subtract, symbols
from nnfront.dims.sizes import as_symbol, equal, same, satisfies, substitute
from nnfront.dims.substitution import rebuild
from nnfront.dims.symbol import Symbol, describe_facts
from nnfront.dims.work import spend
from nnfront.errors import DimError

_Equations = Sequence[tuple[Size, int]]
_Row = dict[Monomial, Fraction]
"""A linear equation over monomials: their weighted sum, with the constant under the empty monomial, is 0."""


def solve(equations: _Equations) -> dict[Symbol, int]:
    """Find the symbols that the equations (size, observed number) determine: `2*n` is 8 gives n = 4, then `n*m` is 12 gives m = 3.

    Linear systems are solved over the rationals, products once all factors but one are known, and the rest is checked. Symbols
    that stay undetermined (`n` in `n//16` is 2) are left out. Raises DimError, naming the equation, if there is no integer solution inside the facts.
    """
    known: dict[Symbol, int] = {}
    while True:
        found = _solve_linear(equations, known)
        if not found:
            break
        known |= found
        _check_facts(equations, found)
    for index, (size, number) in enumerate(equations):
        if equal(substitute(size, known), number) is False:
            raise DimError(f"'{size}' cannot be {number}", details=_reasons(equations, index, known))
    return known


def _solve_linear(equations: _Equations, known: dict[Symbol, int]) -> dict[Symbol, int]:
    """What follows from the equations as linear ones over monomials, beyond what is known."""
    values = {symbol: constant(number) for symbol, number in known.items()}
    rows: dict[Monomial, _Row] = {}
    for index, (size, number) in enumerate(equations):
        terms, offset = rebuild(form_of(size), values)
        row = {monomial: Fraction(value) for monomial, value in terms}
        row[()] = Fraction(offset - number)
        for pivot, other in rows.items():
            _eliminate(row, pivot, other)
        pivot = next((monomial for monomial in row if monomial), ())
        if not pivot:
            if row[()]:
                raise DimError(f"'{size}' cannot be {number}", details=_reasons(equations, index, known))
            continue
        row = {monomial: value / row[pivot] for monomial, value in row.items()}
        for other in rows.values():
            _eliminate(other, pivot, row)
        rows[pivot] = row
    found = {}
    for pivot, row in rows.items():
        (atom, power), *more = pivot
        if len(row) == 2 and isinstance(atom, Symbol) and power == 1 and not more:
            solution = -row[()]
            if solution.denominator > 1:
                said = [f"{size} is {number}" for size, number in equations if atom in symbols(form_of(size))]
                raise DimError(f"no integer '{atom}' fits: it would be {solution}", details=said)
            found[atom] = int(solution)
    return found


def _eliminate(row: _Row, pivot: Monomial, other: _Row) -> None:
    """Subtract from row the multiple of other that makes the pivot vanish; the constant stays even if it is 0."""
    factor = row.get(pivot)
    if factor:
        spend(len(other))
        for monomial, value in other.items():
            row[monomial] = row.get(monomial, Fraction(0)) - factor * value
        for monomial in [monomial for monomial, value in row.items() if monomial and not value]:
            del row[monomial]


def _check_facts(equations: _Equations, found: dict[Symbol, int]) -> None:
    for size, observed in equations:
        for symbol in size.symbols if isinstance(size, Dim) else ():
            if symbol in found and satisfies(found[symbol], symbol) is False:
                raise DimError(
                    f"'{size}' cannot be {observed}: '{symbol}' would be {found[symbol]}",
                    details=[f"{symbol} is {describe_facts(*symbol.facts)}"],
                )


def _reasons(equations: _Equations, index: int, known: dict[Symbol, int]) -> list[str]:
    """What an equation that cannot hold is in conflict with: known symbols in it, or equations before it that share one."""
    occurring = symbols(form_of(equations[index][0]))
    if occurring & known.keys():
        return [f"{symbol} is {number}" for symbol, number in known.items() if symbol in occurring]
    before = equations[:index]
    return [f"{size} is {number}" for size, number in before if occurring & symbols(form_of(size))]


def within(
    size: Size, low: int | None, high: int | None, step: int | None
) -> tuple[Symbol, int | None, int | None, int | None] | None:
    """What a size's range and divisor say of its symbol: `2*n + 1` from 4 to 9 gives n from 2 to 4. None if it is not linear in one."""
    if not isinstance(size, Dim) or len(size.symbols) != 1:
        return None
    (symbol,) = size.symbols
    terms, offset = form_of(size)
    ((monomial, factor), *more) = terms
    if more or monomial != ((symbol, 1),) or factor.denominator > 1 or factor < 0:
        return None
    times = int(factor)
    least = None if low is None else -((offset - low) // times)
    most = None if high is None else (high - offset) // times
    return symbol, least, most, None if not step or offset % step else step // gcd(times, step)


def determined(sizes: Sequence[Size], known: Container[Symbol] = ()) -> dict[Symbol, int]:
    """Return the symbols that numbers for these sizes tell, each with the index of the size that does, in the order in which they are found.

    First those that stand alone, then the last one in a size of which all others are known, if the size is linear in it. What
    `known` has is not asked for.
    """
    found: dict[Symbol, int] = {}
    for index, size in enumerate(sizes):
        symbol = as_symbol(size)
        if symbol is not None and symbol not in known:
            found.setdefault(symbol, index)
    while True:
        for index, size in enumerate(sizes):
            if isinstance(size, Dim):
                unknown = [symbol for symbol in size.symbols if symbol not in known and symbol not in found]
                if len(unknown) == 1 and _is_linear(size, unknown[0]):
                    found[unknown[0]] = index
                    break
        else:
            return found


def _is_linear(size: Dim, symbol: Symbol) -> bool:
    """Whether a number for the size gives one for the symbol, all others known: it is in no power, and in no floor, min or max."""
    terms, _ = form_of(size)
    return all(
        (atom == symbol and power == 1) or symbol not in symbols(of_atom(atom))
        for monomial, _ in terms
        for atom, power in monomial
    )


def unify(patterns: Sequence[Size], sizes: Sequence[Size], bound: dict[Symbol, Size]) -> int | None:
    """Bind the symbols of a callee's patterns so that the patterns are the caller's sizes; both sequences have one length.

    `bound` maps the callee's symbols to sizes over the caller's; it is read and extended, so that several arguments share one.
    Plain names are bound first; then expressions that are linear in the one name still unbound (`2*n` against `2*m` gives
    n = m); then every pattern, with the names substituted, must be provably equal to its size.

    Returns the index of the first mismatch, or None. It is a mismatch if equality is not proved, if a name stays unbound, or if
    a size certainly breaks the facts of the name it is bound to; facts that nothing decides are left to be checked at run time.
    The two sides own their names: a callee's `n` and a caller's `n` have nothing to do with each other.
    """
    assert len(patterns) == len(sizes)
    for pattern, size in zip(patterns, sizes, strict=True):
        plain = single_symbol(form_of(pattern))
        if plain is not None:
            bound.setdefault(plain, size)
    while any([_bind(pattern, size, bound) for pattern, size in zip(patterns, sizes, strict=True)]):
        pass
    for index, (pattern, size) in enumerate(zip(patterns, sizes, strict=True)):
        if not _fits(pattern, size, bound):
            return index
    return None


def _fits(pattern: Size, size: Size, bound: dict[Symbol, Size]) -> bool:
    if isinstance(pattern, Dim):
        if any(
            symbol not in bound or satisfies(bound[symbol], symbol) is False for symbol in pattern.symbols
        ):
            return False
        pattern = substitute(pattern, bound)
    return same(pattern, size) or equal(pattern, size) is True


def _bind(pattern: Size, size: Size, bound: dict[Symbol, Size]) -> bool:
    """Bind the only unbound symbol of the pattern, if it occurs linearly and the division comes out even."""
    spend(1 + len(form_of(pattern)[0]))
    unbound = [symbol for symbol in symbols(form_of(pattern)) if symbol not in bound]
    if len(unbound) != 1:
        return False
    (symbol,) = unbound
    (terms, offset), target = clear_fractions(form_of(pattern), form_of(size))
    factor: Form = (), 0
    rest: Form = (), offset
    for monomial, value in terms:
        others = tuple(item for item in monomial if item[0] != symbol)
        if len(others) == len(monomial):
            rest = add(rest, (((monomial, value),), 0))
        elif (symbol, 1) in monomial:
            factor = add(factor, (((others, value),), 0) if others else constant(int(value)))
        else:
            return False
    if symbol in symbols(rest) or symbol in symbols(factor):
        return False
    values = {each: form_of(value) for each, value in bound.items()}
    factor, rest = rebuild(factor, values), rebuild(rest, values)
    if factor == ((), 0):
        return False
    quotient, remainder = divide(subtract(target, rest), factor)
    if remainder != ((), 0):
        return False
    bound[symbol] = size_of(quotient)
    return True
