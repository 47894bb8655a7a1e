# SPDX-License-Identifier: Apache-2.0
"""Comparisons that must have an answer: yes, no, or a DimError that says what is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from nnfront.dims import compare
from nnfront.dims.form import ONE, Form, add, sorted_symbols
from nnfront.dims.symbol import describe_facts, names
from nnfront.dims.text import text
from nnfront.errors import DimError

_strict: ContextVar[bool] = ContextVar("strict_comparisons", default=False)


@contextmanager
def strict_comparisons() -> Iterator[None]:
    """Inside, `==` and `!=` of a Dim raise DimError unless the answer holds for every value, so that no branch is taken by chance.

    For the time in which a user's code is traced; it belongs to the thread or task that entered it. `same` and `equal` are not
    affected.
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def equality(left: Form, right: Form) -> bool:
    """`left == right`: of the canonical forms, or, where comparisons are strict, of the values."""
    if not _strict.get():
        return left == right
    return _decided("==", compare.equal(left, right), left, right)


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
