# SPDX-License-Identifier: Apache-2.0
"""Rows of a quantised matrix, dequantised: as it is, or in panels, as the head that it is as well wants it (`int8_linear`).

Shapes: tokens [...], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups]; the result is [..., columns].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import find_dequantizer, takes_scales
from nnfront.backends.cpu.quantized_pieces import dequantized_by_ops
from nnfront.backends.kernel import Kernel
from nnfront.backends.workspace import metered
from nnfront.lower import Run
from nnfront.passes.weight_layouts import LAYOUTS, PANEL, WORD
from nnfront.quant_format import QuantFormat

Taken: TypeAlias = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""(matrix, bytes of a word, rows [n]) -> these rows of it."""


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


_WHY = "rows are taken and dequantised in one"
_PLAIN, _PACKED = (partial(_embedding, taken) for taken in (_rows, _rows_of_panels))
KERNELS = (
    Kernel("quantized_embedding", "quantized_embedding", _PLAIN, _WHY, workspace=metered(_PLAIN)),
    Kernel(
        "packed_quantized_embedding",
        "packed_quantized_embedding",
        _PACKED,
        f"{_WHY}; they lie in panels of {PANEL}, as the head reads them",
        workspace=metered(_PACKED),
        layout=LAYOUTS["packed_quantized_embedding"],
    ),
)
