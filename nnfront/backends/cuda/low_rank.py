# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a product on CUDA: two launches for the rows of a step, torch's batched products for those of a prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.cuda.linear import in_rows
from nnfront.backends.kernel import Context, Kernel
from nnfront.ir import OPS
from nnfront.lower import Run

# Rows up to which the kernel is taken: it reads an adapter's matrices once for each row, from L2. By arithmetic; not measured.
MOST_ROWS = 256


def _accepts(run: Run, context: Context) -> str:
    _, x, a, b, _ = map(context.tensor, run.inputs)
    rank, k, n = a.shape[1], a.shape[2], b.shape[1]
    if not (isinstance(rank, int) and isinstance(k, int) and isinstance(n, int)):
        return "the sizes of the adapters are not known"
    shape = kernel_module("add_low_rank").LowRankShape(1, n, k, rank)
    return asked("add_low_rank", shape, x.dtype, context)


def _add_low_rank(run: Run) -> Callable[..., torch.Tensor]:
    kernel = kernel_module("add_low_rank")

    def triton_add_low_rank(
        y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: torch.Tensor
    ) -> torch.Tensor:
        rows = in_rows(y)
        if not 0 < len(rows) <= MOST_ROWS or not len(a):
            by_torch: torch.Tensor = OPS["add_low_rank"].run((y, x, a, b, adapter), {})
            return by_torch
        made: torch.Tensor = kernel.launch(
            rows, in_rows(x), a.contiguous(), b.contiguous(), _numbers(adapter)
        )
        return made.view(y.shape)

    return triton_add_low_rank


def _numbers(adapter: torch.Tensor) -> torch.Tensor:
    """Numbers of adapters as the kernel reads them."""
    kept = adapter if adapter.dtype in (torch.int32, torch.int64) else adapter.to(torch.int32)
    return kept.contiguous()


KERNELS = (
    Kernel(
        "triton_add_low_rank",
        "add_low_rank",
        _add_low_rank,
        "features of each row and what they add in two launches, whatever adapters the rows have; many rows: torch's batched products",
        _accepts,
    ),
)
