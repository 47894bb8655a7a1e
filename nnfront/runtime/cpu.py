# SPDX-License-Identifier: Apache-2.0
"""The kernels of the CPU that are more than an op's reference. Each maker gets the instruction and returns the function to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnfront.lower import Run, reference


def _tuple(run: Run) -> Callable[..., Any]:
    return lambda *values: values


KERNELS: dict[str, Callable[[Run], Callable[..., Any]]] = {
    "tuple": _tuple,
}


def resolve(run: Run) -> Callable[..., Any]:
    """Return the function that runs an instruction: operands by position, sized attributes by keyword."""
    make = KERNELS.get(run.kernel, reference)
    return make(run)
