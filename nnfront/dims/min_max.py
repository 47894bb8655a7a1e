# SPDX-License-Identifier: Apache-2.0
"""Minimum and maximum of forms: nested ones flattened, arguments that another one dominates dropped, the rest sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from nnfront.dims.compare import less_equal
from nnfront.dims.divide import single_call
from nnfront.dims.polynomial import Call, Form, bounds, divisor, form_key, of_atom


def extreme(kind: Literal["min", "max"], args: Sequence[Form]) -> Form:
    """The least or the greatest of the arguments (at least one)."""
    kept: list[Form] = []
    for arg in _flat(kind, args):
        if not any(_dominates(kind, other, arg) for other in kept):
            kept = [other for other in kept if not _dominates(kind, arg, other)]
            kept.append(arg)
    if len(kept) == 1:
        return kept[0]
    kept.sort(key=lambda form: (not form[0], form_key(form)))
    pick = min if kind == "min" else max
    ranges = [bounds(form) for form in kept]
    low, high = pick(low for low, _ in ranges), pick(high for _, high in ranges)
    return of_atom(Call(kind, tuple(kept), low, high, math.gcd(*(divisor(form) for form in kept))))


def _flat(kind: str, args: Sequence[Form]) -> list[Form]:
    flat: list[Form] = []
    for arg in args:
        inner = single_call(arg[0], kind) if arg[1] == 0 else None
        flat.extend(inner.args if inner else [arg])
    return flat


def _dominates(kind: str, a: Form, b: Form) -> bool:
    return less_equal(a, b) is True if kind == "min" else less_equal(b, a) is True
