# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a product on a CPU: of few rows in C, of many sequence by sequence. Nothing is done for a sequence without an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu.extension import TILES
from nnfront.backends.cpu.in_c import kernel
from nnfront.backends.cpu.quantized_gemv import MOST_ROWS
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value, demand, demand_bfloat16
from nnfront.backends.kernel import always
from nnfront.lower import Run
from nnfront.memory.layout import Layout


def by_sequence(run: Run) -> Callable[..., torch.Tensor]:
    """Return the function of an instruction: what a sequence gets depends on no other."""

    def add_low_rank(
        y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: torch.Tensor
    ) -> torch.Tensor:
        result = y.clone(memory_format=torch.contiguous_format)
        for i, number in enumerate(adapter.tolist()):
            if 0 <= number < len(a) and x.numel() and y.numel():
                hidden = F.linear(x[i].reshape(-1, x.shape[-1]), a[number])
                result[i].view(-1, y.shape[-1]).addmm_(hidden, b[number].mT)
        return result

    return add_low_rank


def _bytes(run: Run, y: Layout, x: Layout, a: Layout, b: Layout, adapter: Layout) -> int:
    """What one sequence's vectors are in few features, and these where they are not in one piece."""
    vectors = prod(x.shape[1:-1])
    return x.item * vectors * a.shape[1]


def _write(
    builder: TapeBuilder, run: Run, y: Value, x: Value, a: Value, b: Value, adapter: Value
) -> Sequence[Operand]:
    """A few rows in bfloat16."""
    (sequences, *_, size), (count, rank, _), outputs = x.shape, a.shape, y.shape[-1]
    tokens = prod(x.shape[1:-1])
    demand_bfloat16(y=y, x=x, a=a, b=b)
    demand(adapter.dtype == torch.int32, f"adapters are {adapter.dtype}")
    builder.limit_count(sequences * tokens if min(count, size, rank, outputs) else 0, MOST_ROWS, "rows")
    made = builder.make(run.outputs[0], y.shape)
    sizes: tuple[Any, ...] = sequences, tokens, count, size, rank, outputs, TILES, builder.threads
    builder.call("add_low_rank", *sizes, adapter, x, a, b, y, made)
    return (made,)


KERNELS = (
    kernel(
        "low_rank_by_adapter",
        "add_low_rank",
        _write,
        by_sequence,
        "the adapters that are there, each with its rows",
        always,
        held=_bytes,
        reads_back=True,
    ),
)
