# SPDX-License-Identifier: Apache-2.0
"""How weights are quantised: one value for each format, which goes by its name from `--quant` to the kernels.

    int8   a scale for each output; uint8 has a zero point as well
    int4   two to a byte, a scale for each 32 neighbours; uint4 has a zero point as well
    fp8    float8_e4m3fn, a float32 scale for each output, which all of a matrix (`fp8:tensor`) or those of a block of 128 x 128 (`fp8:block`) may have alike;
           fp8_e5m2 likewise
    nvfp4  floats of 4 bits (e2m1), a scale for each 16 neighbours in float8_e4m3fn, which a float32 for each output multiplies; nl4 likewise, of 16 values
           that lie closer together in the middle
    mxfp4  floats of 4 bits (e2m1), two to a byte, a power of two (e8m0) for each 32 neighbours: OCP Microscaling Formats 1.0
    q4_k   4 bits, a scale and a minimum of 6 bits for each 32 neighbours, two float16 that these are multiples of for 256, all of that in one block of bytes; q5_k
           likewise with 5 bits. q6_k: 6 bits, a scale of 8 bits for 16 neighbours, a float16 for 256. As GGUF stores them

A format is added as one more entry of `FORMATS`. What quantises, dequantises and recognises weights reads nothing but the fields; a kernel says by
name which formats it takes, and where none does the dequantised weight is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sinh
from typing import Any


@dataclass(frozen=True)
class BlockLayout:
    """How neighbours along the last axis lie together with their scales: `numbers` of them in `bytes`, of which those from `unit` on are a float16 that its scales are multiples of.
    The last block of a row may have half as many, in `half` bytes."""

    bytes: int
    half: int
    unit: int = 0
    numbers: int = 256

    def row_bytes(self, columns: int) -> int:
        """The bytes of so many neighbours, which halves of a block divide."""
        whole, rest = divmod(columns, self.numbers)
        return whole * self.bytes + (self.half if rest else 0)

    def columns(self, row_bytes: int) -> int | None:
        """How many neighbours so many bytes hold; None if they are no blocks."""
        whole, rest = divmod(row_bytes, self.bytes)
        return (
            whole * self.numbers + rest // self.half * self.numbers // 2 if rest in (0, self.half) else None
        )


@dataclass(frozen=True)
class QuantFormat:
    """How the weight [out, in] of a product is stored: an element q stands for (q - zero point) * scale, or for values[q] * scale.

    name, bits    the format, and the bits of an element
    dtype         of elements before they are packed
    group_size    how many neighbours along `axis` share a scale; None: all of them
    symmetric     whether there are no zero points
    scale_dtype   None: that of the weight
    packing       the axis along which two elements share a byte, the first in the low half; None: each has its own
    values        what an element stands for, if not for itself as a number
    scale_values  the same for a scale; they rise, and the last one is NaN
    fixed_groups  whether a weight cannot be quantised to it in groups of another size
    shared_outputs  how many outputs are given one scale where a weight is quantised, None being all; each has its own where it is stored
    has_factor    whether scales are multiplied by a float32 for each output, as what they are read in
    block         how elements and scales lie together in bytes, as one tensor; None: each in a tensor of its own
    """

    name: str
    bits: int
    dtype: str
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str | None = None
    axis: int = 1
    packing: int | None = None
    values: tuple[float, ...] = ()
    scale_values: tuple[float, ...] = ()
    fixed_groups: bool = False
    shared_outputs: int | None = 1
    has_factor: bool = False
    block: BlockLayout | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes by which a fusion has this format: its name, and what differs from the format of that name."""
        known = FORMATS[self.name]
        return {"format": self.name} | {
            key: getattr(self, key) for key in VARYING if getattr(self, key) != getattr(known, key)
        }

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> QuantFormat:
        """Return the format that the attributes of a fusion say."""
        return replace(FORMATS[attrs["format"]], **{key: attrs[key] for key in VARYING if key in attrs})

    @property
    def parts(self) -> tuple[str, ...]:
        """What a weight is stored in: elements, under the format's name, and unless they lie in blocks what stands beside them."""
        beside = ["scales"] if self.block is None else []
        beside += ["zero_points"] if beside and not self.symmetric else []
        return (self.name, *beside, *(["factors"] if self.has_factor else []))

    def is_like(self, other: QuantFormat) -> bool:
        """Whether the formats differ in nothing but their groups and zero points."""
        return replace(self, group_size=other.group_size, symmetric=other.symmetric) == other

    @property
    def fit(self) -> bool:
        """Whether scales are found by the least error: for whole rows of 8 bits they lower it by too little to be worth the time."""
        if self.values or "float" in self.dtype:
            return self.has_factor
        return self.bits < 8 or self.group_size is not None

    @property
    def read_scales(self) -> str | None:
        """The dtype of scales where a weight is dequantised; None: that of the weight."""
        return "float32" if self.has_factor else self.scale_dtype

    def __str__(self) -> str:
        known, words = FORMATS[self.name], [self.name]
        if self.group_size != known.group_size:
            words.append(
                "with one scale for each output"
                if self.group_size is None
                else f"in groups of {self.group_size}"
            )
        if self.symmetric != known.symmetric:
            words.append("without zero points" if self.symmetric else "with zero points")
        if self.axis != known.axis:
            words.append(f"with scales along axis {self.axis}")
        if self.packing != known.packing:
            words.append(f"packed along axis {self.packing}")
        return " ".join(words)


TOGETHER = 128
"""Outputs and inputs of a block of float8 that has one scale."""

VARYING = ("group_size", "symmetric", "axis", "packing")
"""Fields in which a weight may differ from the format of its name: a model's author can dequantise in any way."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-size for size in _SIZES))
E8M0 = (*(2.0 ** (exponent - 127) for exponent in range(255)), float("nan"))

# Values of normally distributed groups lie closer together in the middle. The largest of a group is -1, by a scale that may be negative. They are multiples of 2^-7,
# so that kernels hold each of them in a byte.
_BEND = 1.35
NON_LINEAR = tuple(round(128 * sinh(_BEND * place / 8) / sinh(_BEND)) / 128 for place in range(-8, 8))

FORMATS: dict[str, QuantFormat] = {
    format.name: format
    for format in (
        QuantFormat("int4", 4, "int8", group_size=32, packing=1),
        QuantFormat("int8", 8, "int8"),
        QuantFormat("fp8", 8, "float8_e4m3fn", scale_dtype="float32", fixed_groups=True),
        QuantFormat("uint4", 4, "uint8", group_size=32, symmetric=False, packing=1),
        QuantFormat("uint8", 8, "uint8", symmetric=False),
        QuantFormat("fp8_e5m2", 8, "float8_e5m2", scale_dtype="float32", fixed_groups=True),
        QuantFormat(
            "mxfp4",
            4,
            "uint8",
            group_size=32,
            scale_dtype="uint8",
            packing=1,
            values=E2M1,
            scale_values=E8M0,
            fixed_groups=True,
        ),
        *(
            QuantFormat(
                name,
                4,
                "uint8",
                group_size=16,
                scale_dtype="float8_e4m3fn",
                packing=1,
                values=values,
                fixed_groups=True,
                has_factor=True,
            )
            for name, values in (("nvfp4", E2M1), ("nl4", NON_LINEAR))
        ),
        *(
            QuantFormat(
                name,
                bits,
                "uint8",
                group_size=32,
                symmetric=False,
                fixed_groups=True,
                block=BlockLayout(*sizes),
            )
            for name, bits, sizes in (("q4_k", 4, (144, 80)), ("q5_k", 5, (176, 112)))
        ),
        QuantFormat(
            "q6_k", 6, "uint8", group_size=16, fixed_groups=True, block=BlockLayout(210, 106, unit=-2)
        ),
    )
}

BLOCK_FORMATS = tuple(name for name, format in FORMATS.items() if format.block)


def recognise(
    dtype: str,
    *,
    packing: int | None,
    group_size: int | None,
    symmetric: bool,
    axis: int,
    format: str | None = None,
) -> QuantFormat:
    """Return the format of a weight from how it is dequantised: by name where its elements are looked up, else as numbers of a dtype."""
    named = FORMATS.values() if format is None else (FORMATS[format],)
    found = next(
        f
        for f in named
        if f.name == format
        or (not (f.values or f.block) and (f.dtype, f.packing is None) == (dtype, packing is None))
    )
    return replace(found, packing=packing, group_size=group_size, symmetric=symmetric, axis=axis)
