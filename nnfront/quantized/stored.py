# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, as readers ask for it; and what several of them emit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeAlias

from nnfront import dtypes, ops
from nnfront.ir import Constant, FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import cast
from nnfront.quant_format import FORMATS, QuantFormat
from nnfront.quantized.formula import Formula


class StoredTensor(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> Sequence[Any]:
        """Its sizes."""

    @property
    def dtype(self) -> str:
        """Its dtype."""


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint by name, and how to read a small one's bytes; None if they are not there."""

    tensors: Mapping[str, StoredTensor]
    read: Callable[[str], bytes | None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def type(self, name: str, shape: Sequence[int], dtype: str) -> TensorType:
        """The type that a tensor must have: floats may be of any dtype of 16 bits or more."""
        found = self.tensors[name].dtype if name in self.tensors else dtype
        is_free = dtypes.is_float(dtype) and dtypes.size_bytes(dtype) > 1
        is_other = found in dtypes.COMPUTED
        return TensorType(tuple(shape), found if is_free and is_other else dtype)

    def encoding(self, name: str) -> str:
        """How the bytes of a tensor are to be read, where its dtype does not say it."""
        return getattr(self.tensors.get(name), "encoding", "")

    def scale_type(self, name: str, outputs: int) -> TensorType:
        """The type of one scale for all or one for each output, as it is stored."""
        shape = tuple(self.tensors[name].shape) if name in self.tensors else (1,)
        count = prod(int(size) for size in shape)
        return self.type(
            name, shape if count in (1, outputs) and len(shape) <= 2 else (outputs, 1), "float32"
        )


Layout: TypeAlias = Callable[[StoredTensors, str, TensorType], Formula | None]
"""Says how a weight of a name and a type is made of what is stored; None if it is stored as it is."""


def matrix(type: TensorType) -> tuple[int, int] | None:
    """The sizes of a weight [out, in]; None for other weights, and those whose sizes the checkpoint says."""
    sizes = type.static_shape
    return None if sizes is None or len(sizes) != 2 else (sizes[0], sizes[1])


def grouped(name: str, group: int | None, *, has_zeros: bool | None = None) -> QuantFormat:
    """A format in groups along the inputs, with zero points as usual for it, if it is not said."""
    known = FORMATS[name]
    return replace(known, group_size=group, symmetric=known.symmetric if has_zeros is None else not has_zeros)


def transposed(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.permute_dims, x, axes=(1, 0))


def as_bytes(b: FunctionBuilder, words: Var) -> Var:
    """Emit the bytes of words along the last axis, the lowest first."""
    return b.call(ops.bitcast, words, dtype="uint8")


def unpacked(b: FunctionBuilder, packed: Var, bits: int) -> Var:
    """Emit numbers of 2, 4 or 8 bits from the bytes that hold them along the last axis, the first in the lowest bits."""
    assert isinstance(packed.type, TensorType)
    shape = packed.type.shape
    if bits == 8:
        return packed
    if bits == 4:
        return b.call(ops.unpack_int4, packed, axis=packed.type.ndim - 1, signed=False)
    parts = [
        b.call(ops.bitwise_and, b.call(ops.right_shift, packed, Scalar(shift)), Scalar(2**bits - 1))
        for shift in range(0, 8, bits)
    ]
    return b.call(ops.reshape, b.call(ops.stack, *parts, dim=len(shape)), shape=(*shape[:-1], -1))


def for_outputs(b: FunctionBuilder, scale: Var, outputs: int) -> Var:
    """Emit a scale for all or one for each output as [out, 1]."""
    assert isinstance(scale.type, TensorType)
    column = b.call(ops.reshape, scale, shape=(-1, 1))
    assert isinstance(column.type, TensorType)
    if column.type.shape[0] == outputs:
        return column
    return b.call(ops.broadcast_to, column, shape=(outputs, 1))


def each_output(b: FunctionBuilder, scales: Var, rows: int, outputs: int) -> Var:
    """Emit the scales of blocks of so many outputs [blocks, groups] as [out, groups]."""
    return first(b, b.call(ops.repeat, scales, repeats=rows, axis=0), outputs, axis=0)


def over_blocks(
    b: FunctionBuilder, q: Var, scales: Var, block: tuple[int, int], outputs: int, inputs: int
) -> Var:
    """Emit q [out, in] with a scale for each block of so many outputs and inputs, in float32."""
    for axis, size in enumerate(block):
        scales = b.call(ops.repeat, scales, repeats=size, axis=axis)
    if scales.type != TensorType((outputs, inputs), _dtype(scales)):
        scales = b.call(ops.getitem, scales, index=(slice(0, outputs), slice(0, inputs)))
    return b.call(ops.multiply, cast(b, q, "float32"), cast(b, scales, "float32"))


def _dtype(x: Var) -> str:
    assert isinstance(x.type, TensorType)
    return x.type.dtype


def looked_up(b: FunctionBuilder, table: Var | Constant, places: Var) -> Var:
    """Emit the entries of a table at places."""
    return b.call(ops.take, table, cast(b, places, "int32"), axis=0)


def first(b: FunctionBuilder, x: Var, count: int, axis: int = -1) -> Var:
    """Emit the first elements along an axis; x itself if there are no others."""
    assert isinstance(x.type, TensorType)
    if x.type.shape[axis] == count:
        return x
    return b.call(ops.getitem, x, index=(..., slice(0, count)) if axis else (slice(0, count),))


def ungrouped(
    b: FunctionBuilder, q: Var, zeros: Var | Scalar, scales: Var, each: int, index: Var | None = None
) -> Var:
    """Emit (q - zeros) * scales in float32, where groups are no whole number of neighbours, or `index` says the group of each input."""
    assert isinstance(q.type, TensorType)
    inputs = q.type.shape[-1]
    assert isinstance(inputs, int)

    def spread(x: Var) -> Var:
        x = cast(b, x, "float32")
        if index is not None:
            return b.call(ops.take, x, index, axis=1)
        return first(b, b.call(ops.repeat, x, repeats=each, axis=1), inputs)

    middle = spread(zeros) if isinstance(zeros, Var) else zeros
    return b.call(ops.multiply, b.call(ops.subtract, cast(b, q, "float32"), middle), spread(scales))


def table(values: Sequence[float]) -> Constant:
    """A constant of float32."""
    return Constant(TensorType((len(values),), "float32"), struct.pack(f"<{len(values)}f", *values))
