# SPDX-License-Identifier: Apache-2.0
"""What the kernels of CUDA hold while they run, besides operands and results: each is asked itself.

A kernel's function runs once on tensors without data and with a launcher that launches nothing, while a meter counts what it allocates:
the parts of sums that blocks share, rows in another order, what comes between two launches. What torch's libraries hold is not
counted: cuBLAS has one workspace for each stream, 32 MiB on sm_90.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nnfront.backends.cpu.workspace import WORKSPACES
from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.backends.select import Maker
from nnfront.lower import Run
from nnfront.memory.allocations import Meter, Operand, Workspace
from nnfront.memory.layout import Layer, Layout
from nnfront.state.layer import Storage
from nnfront.state.lengths import Lengths


def workspaces_of(kernels: Mapping[str, Maker], target: str) -> Mapping[str, Workspace]:
    """For each kernel of a target that is more than a reference what it holds."""
    asked = Workspace(partial(_held, kernels, arch_of(target)))
    return {**WORKSPACES, **{name: asked for name in kernels if name.startswith("triton_")}}


def _held(kernels: Mapping[str, Maker], arch: str, run: Run, *operands: Operand) -> int:
    """The most bytes that a kernel's function allocates at a time, its results left out."""
    common = kernel_module("common")
    with torch.no_grad(), torch.device("meta"), common.planning_for(arch), common.launched_by(_nothing):
        given = [_without_data(operand) for operand in operands]
        call = kernels[run.kernel](run)
        with Meter(map(_address, _tensors(given))) as meter:
            result = call(*given)
        outside = set(map(_address, _tensors(given)))
        made = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
    results = sum(size for address, size in made.items() if address not in outside)
    held: int = meter.peak - results
    return max(held, 0)


def _nothing(plan: Any) -> None:
    """A launcher that launches nothing."""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _without_data(operand: Operand) -> Any:
    if isinstance(operand, Layer):
        return _LongLayer(operand)
    if not isinstance(operand, Layout):
        return operand
    return torch.empty_strided(operand.shape, operand.strides, dtype=getattr(torch, operand.dtype))


class _LongLayer:
    """A layer of a cache without data, as full as it may be for one more token: what kernels want of one."""

    def __init__(self, layer: Layer) -> None:
        shape = (layer.batch, layer.kv_heads, layer.capacity, layer.head_size)
        self.window = layer.window
        self.max_seq = layer.capacity
        self.lengths = Lengths((max(layer.capacity - 1, 0),) * layer.batch)
        self._keys, self._values = (torch.empty(shape, dtype=getattr(torch, layer.dtype)) for _ in range(2))

    def reserve(self, seq: int) -> Storage:
        """Its place is there already."""
        self.lengths = self.lengths.grow(0, len(self.lengths.values), seq)
        return Storage(self._keys, self._values)
