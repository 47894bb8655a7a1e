# SPDX-License-Identifier: Apache-2.0
"""All kernels by name: from an instruction to the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from nnfront.lower import Run, reference
from nnfront.runtime.cpu import kernels as cpu
from nnfront.runtime.cuda import attention, products, rows

Maker: TypeAlias = Callable[[Run], Callable[..., Any]]

ON_DEVICE: dict[str, Maker] = {**products.KERNELS, **attention.KERNELS, **rows.KERNELS}
"""Kernels that launch those of `nnfront_kernels`."""

KERNELS: dict[str, Maker] = {**cpu.KERNELS, **ON_DEVICE}
"""Kernels of all targets, and those that users have registered. A kernel that is missing is the reference of its op."""


def resolve(run: Run) -> Callable[..., Any]:
    """Return the function that runs an instruction: operands by position, sized attributes by keyword."""
    return KERNELS.get(run.kernel, reference)(run)
