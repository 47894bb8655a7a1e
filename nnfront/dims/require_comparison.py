# SPDX-License-Identifier: Apache-2.0
"""Comparisons that must have an answer: yes, no, or a DimError that says what is known."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from nnfront.dims import compare
from nnfront.dims.polynomial import ONE, Form, add, single_symbol, sorted_symbols
from nnfront.dims.symbol import Symbol, describe_facts, join_facts, names, narrowed
from nnfront.dims.text import text
from nnfront.errors import DimError
from nnfront.holding import holding

_strict: ContextVar[bool] = ContextVar("strict_comparisons", default=False)
_assumed: ContextVar[dict[Symbol, Symbol] | None] = ContextVar("assumed", default=None)


def strict_comparisons() -> AbstractContextManager[bool]:
    """Inside, `==` and `!=` of a Dim raise DimError unless the answer holds for every value, so that no branch is taken by chance.

    For the time in which a user's code is traced; it belongs to the thread or task that entered it. `same` and `equal` are not
    affected.
    """
    return holding(_strict, True)


def assuming_unequal() -> AbstractContextManager[dict[Symbol, Symbol] | None]:
    """Inside, a strict `==` between a dim and a value at the edge of its range is answered with no where the facts do not decide.

    Yields what that assumes: each such dim with the facts under which the answer holds. 0 and 1 are the least values of
    a dim of which nothing is said, so `n == 1` assumes that n is at least 2.
    """
    return holding(_assumed, {})


def equality(left: Form, right: Form) -> bool:
    """`left == right`: of the canonical forms, or, where comparisons are strict, of the values."""
    if not _strict.get():
        return left == right
    answer = compare.equal(left, right)
    assumed = _assumed.get()
    if answer is None and assumed is not None and (fact := _unequal(left, right) or _unequal(right, left)):
        assumed[fact] = join_facts(assumed.get(fact, fact), fact) or fact
        return False
    return _decided("==", answer, left, right)


def _unequal(left: Form, right: Form) -> Symbol | None:
    """The dim on the left, narrowed so that it is not the number on the right; None where no range says that."""
    symbol, value = single_symbol(left), right[1]
    if symbol is None or right[0]:
        return None
    if value <= max(symbol.min, 1):
        return narrowed(symbol, value + 1, None, None)
    return narrowed(symbol, None, value - 1, None) if value == symbol.max else None


def order(sign: str, left: Form, right: Form) -> bool:
    """`left sign right`, where the sign is < <= > or >=."""
    small, large = (left, right) if "<" in sign else (right, left)
    answer = compare.less_equal(small if "=" in sign else add(small, ONE), large)
    return _decided(sign, answer, left, right)


def known_facts(*forms: Form) -> list[str]:
    """One line for each symbol: `seq is at least 1`."""
    called = names(symbol for form in forms for symbol in sorted_symbols(form))
    return [f"{name} is {describe_facts(*symbol.facts)}" for symbol, name in called.items()]


def _decided(sign: str, answer: bool | None, left: Form, right: Form) -> bool:
    if answer is None:
        called = names([*sorted_symbols(left), *sorted_symbols(right)])
        raise DimError(
            f"cannot decide whether {text(left, called)} {sign} {text(right, called)}",
            details=known_facts(left, right),
            help="say what is known about the dim in the spec, as in nn.Dim('seq', min=1, max=8192), or keep both cases with op.cond(op.dim_value(n) > 4, then, otherwise)",
        )
    return answer
