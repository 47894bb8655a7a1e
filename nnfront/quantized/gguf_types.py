# SPDX-License-Identifier: Apache-2.0
"""What the blocks of GGUF's types stand for: from bytes [rows, blocks, bytes of one] to numbers.

A block begins or ends with its scale `d`, in float16. Of 32 numbers the first 16 are in the low halves of 16 bytes, the others in the high ones. Blocks of 256 have scales of their own for
16 or 32 numbers, integers that `d` is multiplied with. Q4_K, Q5_K and Q6_K are formats of ours.
Elsewhere a number that is an integer times one scale stays one: `int4`, or `int8` if it has more bits than 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nnfront import ops
from nnfront.ir import Constant, FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded, cast
from nnfront.quant_format import FORMATS, QuantFormat
from nnfront.quantized.stored import grouped, looked_up, table

Number: TypeAlias = int | float

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What four bits stand for in IQ4_NL and IQ4_XS."""


@dataclass
class Blocks:
    """The bytes of blocks [rows, blocks, bytes], and what is emitted for them."""

    b: FunctionBuilder
    data: Var

    @property
    def rows(self) -> int:
        return self.sizes(self.data)[0]

    @property
    def count(self) -> int:
        return self.sizes(self.data)[1]

    @staticmethod
    def sizes(x: Var) -> tuple[int, ...]:
        assert isinstance(x.type, TensorType) and x.type.static_shape is not None
        return x.type.static_shape

    def bytes(self, begin: int, end: int) -> Var:
        """[rows, blocks, end - begin]."""
        return self.b.call(ops.getitem, self.data, index=(..., slice(begin, end)))

    def half(self, begin: int) -> Var:
        """A float16 in each block, in float32 [rows, blocks, 1]."""
        return cast(self.b, self.half16(begin), "float32")

    def half16(self, begin: int) -> Var:
        """A float16 in each block [rows, blocks, 1]."""
        return self.b.call(ops.bitcast, self.bytes(begin, begin + 2), dtype="float16")

    def bits(self, x: Var, shift: int, mask: int) -> Var:
        """(x >> shift) & mask."""
        moved = self.b.call(ops.right_shift, x, Scalar(shift)) if shift else x
        return self.b.call(ops.bitwise_and, moved, Scalar(mask))

    def fields(self, x: Var, width: int, axis: int = -2) -> Var:
        """All fields of so many bits of each byte, from the lowest on, along a new axis in front of the last."""
        parts = [self.bits(x, shift, 2**width - 1) for shift in range(0, 8, width)]
        return self.b.call(ops.stack, *parts, dim=len(self.sizes(x)) + 1 + axis)

    def shaped(self, x: Var, *sizes: int) -> Var:
        """x as [rows, blocks, *sizes]."""
        return self.b.call(ops.reshape, x, shape=(self.rows, self.count, *sizes))

    def raised(self, x: Var, high: Var, by: int) -> Var:
        """x | high << by."""
        return self.b.call(ops.bitwise_or, x, self.b.call(ops.left_shift, high, Scalar(by)))

    def moved(self, x: Var, by: int) -> Var:
        """Numbers of uint8 less an offset, as int8."""
        return self.b.call(ops.subtract, cast(self.b, x, "int8"), Scalar(by))

    def times(self, x: Var, y: Var) -> Var:
        return self.b.call(ops.multiply, cast(self.b, x, "float32"), cast(self.b, y, "float32"))

    def less(self, x: Var, y: Var) -> Var:
        return self.b.call(ops.subtract, x, y)

    def matrix(self, x: Var) -> Var:
        """x as [rows, all that a row has]."""
        return self.b.call(ops.reshape, x, shape=(self.rows, -1))

    def encoded(self, name: str, group: int, q: Var, scales: Var) -> Encoded:
        """Integers and the scales of groups."""
        return Encoded(grouped(name, group), self.matrix(q), self.matrix(scales))


def _nibbles(k: Blocks, begin: int, size: int = 16) -> Var:
    """[rows, blocks, 2 * size]: the low halves of bytes, then the high ones."""
    return k.shaped(k.fields(k.bytes(begin, begin + size), 4), 2 * size)


def _q4_0(k: Blocks) -> Encoded:
    packed = k.b.call(ops.pack_int4, k.moved(_nibbles(k, 2), 8), axis=2)
    return k.encoded("int4", 32, packed, k.half16(0))


def _q4_1(k: Blocks) -> Var:
    return k.matrix(k.b.call(ops.add, k.times(k.half(0), _nibbles(k, 4)), k.half(2)))


def _fives(k: Blocks, begin: int) -> Var:
    """Numbers of 5 bits: 32 bits of their highest, then nibbles."""
    high = k.fields(k.shaped(k.bytes(begin, begin + 4), 4, 1), 1)  # [rows, blocks, bytes, bits, 1]
    return k.raised(_nibbles(k, begin + 4), k.shaped(high, 32), 4)


def _q5_0(k: Blocks) -> Encoded:
    return k.encoded("int8", 32, k.moved(_fives(k, 2), 16), k.half16(0))


def _q5_1(k: Blocks) -> Var:
    return k.matrix(k.b.call(ops.add, k.times(k.half(0), _fives(k, 4)), k.half(2)))


def _q8_0(k: Blocks) -> Encoded:
    return k.encoded("int8", 32, k.b.call(ops.bitcast, k.bytes(2, 34), dtype="int8"), k.half16(0))


def _twos(k: Blocks, begin: int) -> Var:
    """256 numbers of 2 bits, [rows, blocks, 2, 4, 32]: of 32 bytes the lowest fields, then the next."""
    return k.fields(k.shaped(k.bytes(begin, begin + 64), 2, 32), 2)


def _q2_k(k: Blocks) -> Var:
    both = k.bytes(0, 16)
    scales = k.shaped(k.times(k.half(80), k.bits(both, 0, 15)), 16, 1)
    least = k.shaped(k.times(k.half(82), k.bits(both, 4, 15)), 16, 1)
    return k.matrix(k.less(k.times(scales, k.shaped(_twos(k, 16), 16, 16)), least))


def _q3_k(k: Blocks) -> Encoded:
    high = k.shaped(k.fields(k.bytes(0, 32), 1), 2, 4, 32)
    q = k.moved(k.raised(_twos(k, 32), high, 2), 4)
    low = k.shaped(k.fields(k.bytes(96, 104), 4), 16)
    scales = k.moved(k.raised(low, k.shaped(k.fields(k.bytes(104, 108), 2), 16), 4), 32)
    return k.encoded("int8", 16, q, k.times(k.half(108), scales))


def _in_blocks(name: str, k: Blocks) -> Encoded:
    """Blocks that products read as they are."""
    return Encoded(FORMATS[name], k.matrix(k.data))


def _of_table(k: Blocks, q: Var) -> Var:
    return cast(k.b, looked_up(k.b, _IQ4, q), "int8")


def _iq4_nl(k: Blocks) -> Encoded:
    return k.encoded("int8", 32, _of_table(k, _nibbles(k, 2)), k.half16(0))


def _iq4_xs(k: Blocks) -> Encoded:
    high = k.shaped(k.fields(k.shaped(k.bytes(2, 4), 2, 1), 2), 8)
    low = k.shaped(k.fields(k.shaped(k.bytes(4, 8), 4, 1), 4), 8)
    scales = k.times(k.half(0), k.moved(k.raised(low, high, 4), 32))
    q = k.fields(k.shaped(k.bytes(8, 136), 8, 16), 4)
    return k.encoded("int8", 32, _of_table(k, q), scales)


def _mxfp4(k: Blocks) -> Encoded:
    packed = k.b.call(ops.pack_int4, _nibbles(k, 1), axis=2)
    return k.encoded("mxfp4", 32, packed, k.bytes(0, 1))


_IQ4: Constant = table([float(value) for value in IQ4])


@dataclass(frozen=True)
class Encoding:
    """How the blocks of a type are read: bytes and numbers of one, what makes the numbers, and as which format, with which scales."""

    size_bytes: int
    numbers: int
    make: Callable[[Blocks], Encoded | Var]
    format: QuantFormat | None = None
    scale_dtype: str = "float32"


ENCODINGS: dict[str, Encoding] = {
    "Q4_0": Encoding(18, 32, _q4_0, grouped("int4", 32), "float16"),
    "Q4_1": Encoding(20, 32, _q4_1),
    "Q5_0": Encoding(22, 32, _q5_0, grouped("int8", 32), "float16"),
    "Q5_1": Encoding(24, 32, _q5_1),
    "Q8_0": Encoding(34, 32, _q8_0, grouped("int8", 32), "float16"),
    "Q2_K": Encoding(84, 256, _q2_k),
    "Q3_K": Encoding(110, 256, _q3_k, grouped("int8", 16)),
    "Q4_K": Encoding(144, 256, partial(_in_blocks, "q4_k"), FORMATS["q4_k"]),
    "Q5_K": Encoding(176, 256, partial(_in_blocks, "q5_k"), FORMATS["q5_k"]),
    "Q6_K": Encoding(210, 256, partial(_in_blocks, "q6_k"), FORMATS["q6_k"]),
    "IQ4_NL": Encoding(18, 32, _iq4_nl, grouped("int8", 32), "float16"),
    "IQ4_XS": Encoding(136, 256, _iq4_xs, grouped("int8", 32)),
    "MXFP4": Encoding(17, 32, _mxfp4, grouped("mxfp4", 32), "uint8"),
}
"""By the name that `nnfront.weights.gguf` gives a type."""
