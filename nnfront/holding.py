# SPDX-License-Identifier: Apache-2.0
"""Values that hold for a block of code, in the thread or task that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Inside of this the variable has this value, which is yielded; then what it had before."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
