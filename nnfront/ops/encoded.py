# SPDX-License-Identifier: Apache-2.0
"""A weight as it is stored quantised, in the IR: what it is kept in, and the calls that make it dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfront.ir import Atom, FunctionBuilder, Var, tensor_type
from nnfront.ops.elementwise import astype, multiply
from nnfront.ops.index import take
from nnfront.ops.quant import dequantize, unpack_int4
from nnfront.ops.quant_blocks import dequantize_blocks
from nnfront.ops.shape import permute_dims
from nnfront.quant_format import QuantFormat


@dataclass(frozen=True)
class Encoded:
    """A weight [out, in] as products take it: elements, packed as the format says, and for each group of inputs a scale and maybe a zero point; or blocks with all of that.

    Shapes: elements [out, in] or, in 4 bits, [out, in / 2], or blocks [out, bytes]; scales and zeros [out, groups], factors of scales, in the place of zeros, float32 [out, 1];
    of a stack all with an axis more in front. The weight is the stack of the transposes if `is_transposed`.
    """

    format: QuantFormat
    elements: Var
    scales: Var | None = None
    zeros: Var | None = None
    is_transposed: bool = False

    @property
    def parts(self) -> tuple[Var, ...]:
        """What is stored."""
        return tuple(part for part in (self.elements, self.scales, self.zeros) if part is not None)

    def with_parts(self, parts: Sequence[Var]) -> Encoded:
        """The same of other values."""
        elements, scales, zeros = (*parts, None, None)[:3]
        assert elements is not None
        return Encoded(self.format, elements, scales, zeros, self.is_transposed)

    def rows(self, builder: FunctionBuilder, places: Atom) -> Encoded:
        """Emit some rows of it [..., in]."""
        return self.with_parts([builder.call(take, part, places, axis=0) for part in self.parts])

    def dense(self, builder: FunctionBuilder, dtype: str) -> Var:
        """Emit what it stands for: multiplied in float32, rounded once."""
        q = self.elements
        axis = tensor_type(q).ndim - 1
        if self.format.block is not None:
            return builder.call(dequantize_blocks, q, format=self.format.name, dtype=dtype)
        if self.format.packing is not None:
            q = builder.call(unpack_int4, q, axis=axis, signed=self.format.dtype == "int8")
        scales, zeros = self.scales, self.zeros
        if self.format.has_factor:
            assert scales is not None
            scales, zeros = builder.call(multiply, cast(builder, scales, "float32"), zeros), None
        dense = builder.call(
            dequantize,
            q,
            scales,
            zeros,
            group_size=self.format.group_size,
            axis=axis,
            dtype=dtype,
            format=self.format.name if self.format.values else None,
        )
        return builder.call(permute_dims, dense, axes=(0, 2, 1)) if self.is_transposed else dense


def cast(builder: FunctionBuilder, value: Var, dtype: str) -> Var:
    """Emit a value in a dtype; the value itself if it is in that."""
    return value if tensor_type(value).dtype == dtype else builder.call(astype, value, dtype=dtype)
