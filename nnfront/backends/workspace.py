# SPDX-License-Identifier: Apache-2.0
"""What a kernel allocates while it runs, besides operands and results, found out by asking it.

Its function runs once on tensors without data while a meter counts what it allocates: sums that blocks share, rows in another order, what
comes between two launches. What torch's libraries hold is not counted: cuBLAS has one workspace for each stream, 32 MiB on sm_90.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from nnfront.backends.kernel import Bind
from nnfront.lower import Run
from nnfront.memory.allocations import Meter, Operand, Workspace, address_of
from nnfront.memory.layout import Layout

Metering: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Inside of it kernels launch nothing."""


def metered(
    bind: Bind, metering: Metering = nullcontext, stand_in: Callable[[Operand], Any] | None = None
) -> Workspace:
    """Return the workspace of a kernel as a run of its function shows it; nothing for one that cannot run on tensors without data.

    `stand_in` makes what stands in for an operand that is no tensor.
    """
    return Workspace(partial(_allocated, bind, metering, stand_in))


def _allocated(
    bind: Bind, metering: Metering, stand_in: Callable[[Operand], Any] | None, run: Run, *operands: Operand
) -> int:
    """The most bytes that a kernel's function allocates at a time, its results left out."""
    with torch.no_grad(), torch.device("meta"), metering():
        given = [_without_data(operand, stand_in) for operand in operands]
        call = bind(run)
        with Meter(map(address_of, _tensors(given))) as meter:
            result = call(*given)
    outside = set(map(address_of, _tensors(given)))
    made = {address_of(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
    results = sum(size for address, size in made.items() if address not in outside)
    peak: int = meter.peak
    return max(peak - results, 0)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _without_data(operand: Operand, stand_in: Callable[[Operand], Any] | None) -> Any:
    if isinstance(operand, Layout):
        return torch.empty_strided(operand.shape, operand.strides, dtype=getattr(torch, operand.dtype))
    return operand if stand_in is None else stand_in(operand)
