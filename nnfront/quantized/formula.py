# SPDX-License-Identifier: Apache-2.0
"""What a reader of a format says of one weight: which tensors of the checkpoint hold it, and how it is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nnfront import dtypes
from nnfront.ir import FunctionBuilder, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quant_format import QuantFormat

Make: TypeAlias = Callable[[FunctionBuilder, Sequence[Var]], Encoded | Var]
"""Emits what makes a weight, given its sources in order: as a product takes it, or as it is, in any float dtype."""


@dataclass(frozen=True)
class Formula:
    """How a weight is made of what a checkpoint holds.

    scheme       what the report calls the way in which it is stored
    sources      the tensors that hold it, by name, with the types that they must have
    make         emits it
    format       as which `make` gives it, if that is a format of ours
    scale_dtype  the dtype in which it gives scales
    is_transposed    whether it is a stack of matrices [in, out], of which `make` gives the transposes
    is_plain     whether it is stored as the floats that it is, in another dtype or order
    """

    scheme: str
    sources: Mapping[str, TensorType]
    make: Make
    format: QuantFormat | None = None
    scale_dtype: str = "float32"
    is_plain: bool = False
    is_transposed: bool = False

    def reason_against(
        self,
        dtype: str,
        takes: Callable[[QuantFormat], bool],
        takes_wide_scales: Callable[[QuantFormat], bool],
    ) -> str:
        """Why products of a dtype cannot take it as it is stored; empty if they can, which may be by reading scales in float32."""
        if self.is_plain:
            return ""
        if self.format is None:
            return "no kernel reads them as they are stored"
        if not takes(self.format):
            return f"no kernel reads {self.format}"
        own = self.format.scale_dtype or dtype
        wanted = self.wanted_scales(dtype) if takes_wide_scales(self.format) else own
        if self.format.block is None and not holds(wanted, self.scale_dtype):
            return f"their scales are {self.scale_dtype}, which {wanted} does not hold"
        return ""

    def wanted_scales(self, dtype: str) -> str:
        """The dtype that scales have in products of a dtype: that, or float32 if it does not hold them."""
        assert self.format is not None
        own = self.format.scale_dtype or dtype
        return own if self.format.scale_dtype or holds(own, self.scale_dtype) else "float32"


def holds(wide: str, narrow: str) -> bool:
    """Whether a dtype holds every value of another."""
    if wide == narrow:
        return True
    is_byte = dtypes.size_bytes(narrow) == 1
    if is_byte:
        return dtypes.is_float(narrow) and dtypes.size_bytes(wide) > 1
    return dtypes.promote(wide, narrow) == wide
