# SPDX-License-Identifier: Apache-2.0
"""Writing what a layer keeps of each sequence: a tensor that nobody else reads becomes the buffer, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.backends.kernel import ACCEPTED, NOTHING, Context, Kernel
from nnfront.ir import OPS
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.state.layer import CacheLayer


def _cache_write(run: Run) -> Callable[..., CacheLayer]:
    """Have a tensor [batch, *shape] as the buffer; copied if others read it later, or it is a part of a larger one."""
    name, take_over, fixed = run.attrs["name"], run.inputs[1] in run.frees, run.attrs.get("seq")

    def cache_write(layer: CacheLayer, value: torch.Tensor, seq: Any = fixed) -> CacheLayer:
        layer.write(name, value, seq, take_over=take_over)
        return layer

    return cache_write


def _is_made_here(run: Run, context: Context) -> str:
    """Whether the value is a tensor of its own, that an op of the method has made."""
    maker = context.makers.get(run.inputs[1])
    op = None if maker is None else OPS.get(maker.op)
    return ACCEPTED if op is not None and op.view == "never" else "the value may share memory with others"


KERNELS = (
    Kernel(
        "cache_write_owned",
        "cache_write",
        _cache_write,
        "the value becomes the buffer",
        _is_made_here,
        # The old content, which a call that fails brings back, while the new one is the buffer.
        workspace=Workspace(NOTHING.held, lambda run, layer, value: value.size_bytes),
    ),
)
