# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows of bfloat16 with a weight in 8 or 4 bits, at the speed of memory: `c/quantized.c`, where it was built and can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeAlias, get_args

import torch

Stored: TypeAlias = Literal["int8", "int8_groups", "fp8", "int4", "uint4"]
"""How weights are stored, in the order of the enum in C. int8 and fp8 have a scale for each output, the others for each group; uint4 has zero points."""

GROUPS = (32, 64, 128)
# Up to how many rows the kernel is the faster way: 9728 x 896, two threads, 64 rows of fp8 5.2 ms against 9.4 by decoding, of int8 5.3 against 5.7.
_MOST: dict[Stored, int] = {"int8": 32, "int8_groups": 32, "fp8": 64, "int4": 64, "uint4": 64}

Multiply: TypeAlias = Callable[..., torch.Tensor]
_ORDER: tuple[Stored, ...] = get_args(Stored)


@dataclass(frozen=True)
class FewRowsQuantized:
    """A kernel for up to `most` rows.

    multiply    (x, weight, scales, zeros, bias, added) -> x @ ((weight - zeros) * scales).T + bias + added

    Shapes: x [..., columns], bias [outputs] and added [..., outputs] bfloat16; weight [outputs, columns] int8 or float8_e4m3fn, or uint8 [outputs, columns / 2] with
    the first of two 4-bit codes in the low half; scales [outputs, groups], bfloat16, or float32 for float8; zeros uint8 [outputs, groups], for uint4 alone.
    """

    most: int
    multiply: Multiply
    stored: Stored
    group: int | None
    scales: torch.dtype
    has_zeros: bool

    @property
    def index(self) -> int:
        """The number of `stored` in C."""
        return _ORDER.index(self.stored)

    def takes(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> bool:
        """Whether `x` is of few rows in bfloat16, and each operand is of its type and lies in one piece."""
        if added is not None:
            is_one_each = added.shape[:-1] == x.shape[:-1] and added.shape[-1] == weight.shape[0]
            if added.dtype != x.dtype or not is_one_each or not added.is_contiguous():
                return False
        is_few = x.dtype == torch.bfloat16 and 0 < x.numel() <= self.most * x.shape[-1]
        are_whole = is_few and x.is_contiguous() and weight.is_contiguous() and scales.is_contiguous()
        return (
            are_whole
            and scales.dtype == self.scales
            and (zeros is not None and zeros.is_contiguous() if self.has_zeros else zeros is None)
            and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        )


def find(module: ModuleType | None, stored: Stored, group: int | None) -> FewRowsQuantized | None:
    """Return the kernel for weights that are stored so, if there is one."""
    if module is None or group not in ((None,) if stored in ("int8", "fp8") else GROUPS):
        return None
    product, threads, how = module.multiply_quantized, torch.get_num_threads, _ORDER.index(stored)

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs, columns = weight.shape[0], x.shape[-1]
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
        rows, groups = x.numel() // columns, columns // group if group else 1
        product(how, rows, columns, outputs, groups, threads(), weight, scales, zeros, x, bias, added, y)
        return y

    scale = torch.float32 if stored == "fp8" else torch.bfloat16
    return FewRowsQuantized(_MOST[stored], multiply, stored, group, scale, stored == "uint4")
