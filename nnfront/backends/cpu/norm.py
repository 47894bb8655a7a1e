# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms over the last axis on a CPU; few rows of bfloat16 in C.

`torch.rms_norm` makes twice as many passes over the rows. 896 features in bfloat16, one thread: 512 rows 0.25 ms against 0.65 or more; one row between
large matmuls 20 us against 35, and 15 in C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layout

# Elements up to which C, which keeps to one thread, is the faster way for all that was tried: rows of 128 to 8192 features 21 to 57 us against 65 to 80.
FEW = 1 << 16


def _takes(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernel in C is for these rows."""
    return NATIVE is not None and x.dtype == torch.bfloat16 and weight is not None and 0 < x.numel() <= FEW


def _in_c(
    x: torch.Tensor,
    added: torch.Tensor | None,
    total: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """The norm of x, or of x + added, which is written to `total`."""
    assert NATIVE is not None
    x, weight, y = x.contiguous(), weight.contiguous(), torch.empty(x.shape, dtype=torch.bfloat16)
    size = x.shape[-1]
    NATIVE.rms_norm(x.numel() // size, size, epsilon, x, added, total, weight, y)
    return y


def rms_norm_last(run: Run) -> Callable[..., Any]:
    """The norm of rows."""
    epsilon = run.attrs.get("epsilon", 1e-5)
    zero: dict[torch.dtype, torch.Tensor] = {}

    def rms_norm_last(x: torch.Tensor, weight: torch.Tensor | None, bias: None) -> torch.Tensor:
        if weight is not None and _takes(x, weight):
            return _in_c(x, None, None, weight, epsilon)
        size, dtype = x.shape[-1], x.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if x.numel() == size and weight is not None and dtype != torch.float64:
            # The factor of one row is a number: x * weight * factor is one call, rounded once.
            mean = torch.linalg.vector_norm(x, dtype=wide).item() ** 2 / size + epsilon
            if mean > 0:
                if dtype not in zero:
                    zero[dtype] = torch.zeros((), dtype=dtype)
                return torch.addcmul(zero[dtype], x, weight, value=mean**-0.5)
        factor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        factor = factor.square_().div_(size).add_(epsilon).rsqrt_()
        y = x * factor if dtype == wide else x.to(wide).mul_(factor)
        return (y if weight is None else y.mul_(weight)).to(dtype)

    return rms_norm_last


def rms_norm_of_sum(run: Run) -> Callable[..., Any]:
    """The norm of x + residual, and the sum too where others read it."""
    norm, has_sum, epsilon = rms_norm_last(run), len(run.outputs) == 2, run.attrs.get("epsilon", 1e-5)

    def rms_norm_of_sum(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: None
    ) -> Any:
        if weight is not None and _takes(x, weight):
            total = torch.empty(x.shape, dtype=torch.bfloat16)
            y = _in_c(x, residual.contiguous(), total, weight, epsilon)
        else:
            total = x + residual
            y = norm(total, weight, None)
        return (y, total) if has_sum else y

    return rms_norm_of_sum


def _over_last_axis(run: Run, context: Context) -> str:
    x, weight, bias = run.inputs
    if run.attrs.get("axes") != (context.tensor(x).ndim - 1,):
        return "it is not over the last axis alone"
    if not context.is_none(bias):
        return "it has a bias"
    same = context.is_none(weight) or context.tensor(weight).dtype == context.tensor(x).dtype
    return ACCEPTED if same else "weight and rows differ in dtype"


def _norm_of_sum(run: Run, context: Context) -> str:
    x, residual, *vectors = run.inputs
    if context.is_none(x) or context.is_none(residual):
        return "it is no sum of two tensors"
    if "normalized_shape" in run.attrs:
        return "it is a layer norm"
    y, *operands = (context.tensor(slot) for slot in (run.outputs[0], x, residual))
    if y.dtype != "bfloat16" or any(operand != y for operand in operands):
        return "the sum is not of two tensors in bfloat16 of one shape"
    return _over_last_axis(replace(run, inputs=(x, *vectors)), context)


def _rms_norm_last_bytes(run: Run, x: Layout, weight: Layout | None, bias: None) -> int:
    """For a half type the result in float32, unless there is one row only, or C takes them."""
    is_row = x.count == x.shape[-1] and weight is not None
    if NATIVE and x.dtype == "bfloat16" and weight is not None and x.count <= FEW:
        return 0
    return 4 * x.count if x.is_half and not is_row else 0


def _rms_norm_of_sum_bytes(run: Run, x: Layout, residual: Layout, weight: Layout | None, bias: None) -> int:
    """What the norm holds, and the sum if nobody else reads it."""
    return _rms_norm_last_bytes(run, x, weight, None) + (0 if len(run.outputs) == 2 else x.count * x.item)


KERNELS = (
    Kernel(
        "rms_norm_last",
        "rms_norm",
        rms_norm_last,
        "half the passes over the rows, rounded once",
        _over_last_axis,
        workspace=Workspace(_rms_norm_last_bytes),
    ),
    Kernel(
        "rms_norm_of_sum",
        "norm_residual",
        rms_norm_of_sum,
        "few rows: the sum in the kernel of the norm",
        _norm_of_sum,
        workspace=Workspace(_rms_norm_of_sum_bytes),
    ),
)
