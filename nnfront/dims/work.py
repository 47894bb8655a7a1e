# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic dims may take together: what a text says in a few characters may take hours to bring to canonical form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from nnfront.errors import DimError
from nnfront.holding import holding

_left: ContextVar[list[int] | None] = ContextVar("work_left", default=None)


@contextmanager
def bounded_work(terms: int) -> Iterator[None]:
    """Inside, dims may be computed with until so many terms have been looked at; then DimError is raised. The outermost bound counts."""
    if _left.get() is not None:
        yield
        return
    with holding(_left, [terms]):
        yield


def spend(terms: int) -> None:
    """Note that terms have been looked at."""
    left = _left.get()
    if left is not None:
        left[0] -= terms
        if left[0] < 0:
            raise DimError(
                "the dims take too long to compute", help="give parts of the largest ones names of their own"
            )
