# SPDX-License-Identifier: Apache-2.0
"""`WeightLayout`: how a kernel wants weights to be stored, as formulas over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nnfront.ir.builder import FunctionBuilder
from nnfront.ir.expr import Var
from nnfront.ir.module import Function

Formula: TypeAlias = Callable[[FunctionBuilder, Var], Var]
"""Emits what becomes of a value."""

Packing: TypeAlias = tuple[Mapping[str, Formula], Mapping[str, Formula]]
"""How operands are packed, and how that is undone, by their names. A weight that several functions pack by one formula is stored once."""


@dataclass(frozen=True)
class WeightLayout:
    """How kernels of the fusion `region` want their weights.

    of        the fusion whose calls become calls of `region` when their weights are stored so
    packing   gives the formulas for a function of that fusion; None for one whose weights cannot be stored so
    follows   whether that is worth nothing by itself: weights are stored so only where another fusion wants them so
    """

    of: str
    region: str
    packing: Callable[[Function], Packing | None]
    follows: bool = False
