# SPDX-License-Identifier: Apache-2.0
"""Products of rows with their RMS norm on CUDA: each kernel for a product once more, for the region that has the norm before it.

Few rows are normalised inside of the product, which reads them anyway; what rounds them to float8 normalises them on the way; others have a launch of
their own. How many there are is known on a call only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from nnfront.backends.cuda import rowwise
from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.kernel import Bind, Context, Kernel
from nnfront.lower import Run
from nnfront.passes.regions import OF_NORM
from nnfront.passes.weight_layouts import LAYOUTS


@dataclass(frozen=True)
class RowNorm:
    """An RMS norm that is still to be done to rows: its weight [K] or None, and epsilon."""

    weight: torch.Tensor | None
    epsilon: float

    @property
    def options(self) -> dict[str, Any]:
        """Options of the kernels that normalise rows themselves."""
        return {"norm_eps": self.epsilon, "norm_weight": self.weight}

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [M, K] with their norm, by a launch of its own."""
        normalised: torch.Tensor = kernel_module("rms_norm").launch(rows, self.weight, eps=self.epsilon)
        return normalised


def is_inside(norm: RowNorm | None, rows: torch.Tensor) -> bool:
    """Whether a product for few rows does the norm of so many."""
    return norm is not None and len(rows) <= kernel_module("row_norm").MOST_NORMALISED


@cache
def _after_norm(product: Bind) -> Bind:
    """The function of a kernel after a norm: one for all kernels that have one function."""

    def bind(run: Run) -> Callable[..., Any]:
        multiply = product(replace(run, op=run.op.removeprefix(OF_NORM)))
        epsilon = run.attrs["epsilon"]

        def triton_norm_product(
            x: torch.Tensor, norm_weight: torch.Tensor | None, *others: torch.Tensor | None
        ) -> torch.Tensor:
            weight = None if norm_weight is None else norm_weight.contiguous()
            y: torch.Tensor = multiply(x, *others, norm=RowNorm(weight, epsilon))
            return y

        return triton_norm_product

    return bind


def of_norm(kernel: Kernel) -> Kernel:
    """The kernel for the same region with a norm before it: its function is given a `RowNorm` after the operands that it knows."""

    def without(run: Run) -> Run:
        x, _, *others = run.inputs
        return replace(run, op=run.op.removeprefix(OF_NORM), inputs=(x, *others))

    def rewrite(run: Run, context: Context) -> Run | str:
        seen = kernel.rewrite(without(run), context)
        if isinstance(seen, str):
            return seen
        x, *others = seen.inputs
        return replace(seen, op=run.op, inputs=(x, run.inputs[1], *others))

    def accepts(run: Run, context: Context) -> str:
        x, weight = run.inputs[:2]
        attrs = {**run.attrs, "axes": (context.tensor(x).ndim - 1,)}
        norm = replace(run, op="rms_norm", inputs=(x, weight, context.frame.constant(None)), attrs=attrs)
        return rowwise.rms_norm_accepts(norm, context) or kernel.accepts(without(run), context)

    return replace(
        kernel,
        name=kernel.name.replace("triton_", "triton_norm_"),
        op=OF_NORM + kernel.op,
        bind=_after_norm(kernel.bind),
        why=f"rows are normalised where they are read; {kernel.why}",
        accepts=accepts,
        rewrite=rewrite,
        layout=kernel.layout and LAYOUTS[OF_NORM + kernel.layout.region],
    )
