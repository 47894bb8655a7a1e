# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix; of a quantised one dequantised: as it is, or in panels, as the head that it is as well wants it (`int8_linear`).

Shapes: tokens [...], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups]; the result is [..., columns].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TypeAlias

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import FEW
from nnfront.backends.cpu.quantized_gemv import (
    SCALE_KINDS,
    find_dequantizer,
    stored_as,
    table_of,
    takes_scales,
)
from nnfront.backends.cpu.quantized_pieces import dequantized_by_ops
from nnfront.backends.cpu.tape_builder import Operand, Refused, TapeBuilder, Value, attribute, demand
from nnfront.backends.kernel import Kernel
from nnfront.backends.workspace import metered
from nnfront.lower import Run
from nnfront.lower.reference import reference
from nnfront.passes.weight_layouts import LAYOUTS, PANEL, WORD
from nnfront.quant_format import QuantFormat

Taken: TypeAlias = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""(matrix, bytes of a word, rows [n]) -> these rows of it."""


# Columns of a packed weight that C has room for.
_MOST_COLUMNS = 1 << 16


def _rows(stored: torch.Tensor, word: int, rows: torch.Tensor) -> torch.Tensor:
    return stored.index_select(0, rows)


def _rows_of_panels(packed: torch.Tensor, word: int, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n] of a matrix of which words of PANEL rows follow one another, but for those that fill no panel: [n, columns]."""
    behind = packed.index_select(0, rows)  # which refuses rows that there are not
    if packed.shape[1] == word:
        return behind
    whole = len(packed) // PANEL * PANEL
    panels = packed[:whole].view(-1, packed.shape[1] // word, PANEL, word)
    if whole == len(packed):
        return panels[rows // PANEL, :, rows % PANEL].view(len(rows), -1)
    near = rows.clamp(max=whole - 1)
    found = panels[near // PANEL, :, near % PANEL].view(len(rows), -1)
    return torch.where((rows < whole)[:, None], found, behind)


def _embedding(taken: Taken, run: Run) -> Callable[..., torch.Tensor]:
    format, named = QuantFormat.of(run.attrs), run.attrs.get("dtype")
    in_c = find_dequantizer(NATIVE, format)

    def embedding(
        weight: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        rows = tokens.reshape(-1).long()
        dtype = getattr(torch, named) if named else scales.dtype
        found = taken(weight, WORD, rows)
        scales = taken(scales, 1, rows)
        zeros = None if zeros is None else taken(zeros, 1, rows)
        is_for_c = weight.is_cpu and dtype == torch.bfloat16 and takes_scales(format, scales.dtype)
        if in_c is not None and is_for_c:
            dense = in_c(found, scales, zeros)
        else:
            dense = dequantized_by_ops(format, found, scales, zeros, dtype)
        return dense.view(*tokens.shape, -1)

    return embedding


def _write(
    builder: TapeBuilder,
    run: Run,
    weight: Value,
    tokens: Value,
    scales: Value | None,
    zeros: Value | None,
    *,
    is_packed: bool = False,
) -> Sequence[Operand]:
    format, scale_dtype = QuantFormat.of(run.attrs), None if scales is None else scales.dtype
    stored, group = stored_as(format), format.group_size
    if stored is None or not takes_scales(format, scale_dtype):
        raise Refused(f"there is no kernel for {format} with scales in {scale_dtype}")
    named = run.attrs.get("dtype")
    dtype = getattr(torch, named) if named else scale_dtype
    demand(dtype == torch.bfloat16, f"the result is {dtype}")
    demand(tokens.dtype == torch.int64, f"tokens are {tokens.dtype}")
    outputs, width = weight.shape
    columns = width * (1 if format.packing is None else 2)
    if format.block is not None:
        columns = format.block.columns(width) or 0
    demand(columns > 0 and not (is_packed and columns > _MOST_COLUMNS), f"there are {columns} columns")
    groups = columns // group if group else 1
    demand(scales is None or scales.shape == (outputs, groups), "scales are not one for each group")
    builder.limit_count(prod(tokens.shape) * columns, FEW, "elements")
    y = builder.make(run.outputs[0], (*tokens.shape, columns))
    values, unit = table_of(format)
    kind = 0 if scale_dtype is None else SCALE_KINDS[scale_dtype]
    sizes = prod(tokens.shape), columns, outputs, groups, kind, *values
    operands = tokens, weight, scales, zeros, y
    builder.call("embed", stored, *sizes, is_packed, builder.threads, unit, *operands)
    return (y,)


def _write_taken(builder: TapeBuilder, run: Run, x: Value, rows: Value) -> Sequence[Operand]:
    demand(attribute(run, "axis") == 0, "it is not along the first axis")
    demand(rows.dtype == torch.int64, f"rows are {rows.dtype}")
    builder.limit_count(prod(rows.shape) * prod(x.shape[1:]), FEW, "elements")
    y = builder.make(run.outputs[0], (*rows.shape, *x.shape[1:]), x.dtype)
    size = prod(x.shape[1:]) * x.dtype.itemsize
    builder.call("take_rows", prod(rows.shape), x.shape[0], size, rows, x, y)
    return (y,)


_WHY = "rows are taken and dequantised in one"
_PLAIN, _PACKED = (partial(_embedding, taken) for taken in (_rows, _rows_of_panels))
KERNELS = (
    Kernel("take", "take", reference, write=_write_taken),
    Kernel(
        "quantized_embedding",
        "quantized_embedding",
        _PLAIN,
        _WHY,
        workspace=metered(_PLAIN),
        write=_write,
    ),
    Kernel(
        "packed_quantized_embedding",
        "packed_quantized_embedding",
        _PACKED,
        f"{_WHY}; they lie in panels of {PANEL}, as the head reads them",
        workspace=metered(_PACKED),
        write=partial(_write, is_packed=True),
        layout=LAYOUTS["packed_quantized_embedding"],
    ),
)
