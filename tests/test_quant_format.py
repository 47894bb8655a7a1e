# SPDX-License-Identifier: Apache-2.0
"""Formats of quantised weights: what a fusion says of one is all that there is to it, and which one a dequantised weight is in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnfront as nn
from nnfront import op, spec
from nnfront.passes import outline
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

VARIED = st.fixed_dictionaries(
    {},
    optional={
        "group_size": st.none() | st.integers(1, 256),
        "symmetric": st.booleans(),
        "axis": st.integers(0, 2),
        "packing": st.none() | st.integers(0, 2),
    },
)


@given(name=st.sampled_from(sorted(FORMATS)), varied=VARIED)
def test_a_format_is_what_its_attributes_say(name, varied):
    format = replace(FORMATS[name], **varied)
    assert QuantFormat.of(format.attrs) == format
    assert (format.attrs == {"format": name}) == (format == FORMATS[name]) == (str(format) == name)


def test_a_format_is_named_with_what_differs_from_that_of_its_name():
    texts = {
        str(replace(FORMATS[name], **varied))
        for name, varied in [
            ("int8", {"group_size": 16}),
            ("int8", {"symmetric": False, "axis": 0}),
            ("int4", {"group_size": None, "packing": 0}),
            ("uint4", {"symmetric": True}),
        ]
    }
    assert texts == {
        "int8 in groups of 16",
        "int8 with zero points with scales along axis 0",
        "int4 with one scale for each output packed along axis 0",
        "uint4 without zero points",
    }


INTEGERS = ("int4", "int8", "uint4", "uint8")
IN_PARTS = [name for name in FORMATS if name not in BLOCK_FORMATS]
WAYS = [
    (name, group, False) for name in IN_PARTS for group in (None, 32, 16) if group or not FORMATS[name].values
]
WAYS += [(name, group, True) for name in INTEGERS for group in (None, 32, 16)]


@pytest.mark.parametrize(("name", "group", "has_zeros"), WAYS, ids=str)
def test_outlining_says_which_format_a_weight_is_in_that_an_author_dequantises(name, group, has_zeros):
    is_packed, is_table = FORMATS[name].packing is not None, bool(FORMATS[name].values)
    dtype, groups = FORMATS[name].dtype, 1 if group is None else 64 // group

    class Model(nn.Module):
        def __init__(self) -> None:
            self.q = nn.Parameter((6, 32 if is_packed else 64), "uint8" if is_packed else dtype)
            self.scales = nn.Parameter((6, groups), "uint8" if FORMATS[name].scale_values else "float32")
            self.zeros = nn.Parameter((6, groups), dtype) if has_zeros else None

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            q = op.unpack_int4(self.q, signed=name == "int4") if is_packed else self.q
            table = name if is_table else None
            w = op.dequantize(q, self.scales, self.zeros, group, format=table, dtype="float32")
            return op.linear(x, w)

    ir = outline(Model().export({"forward": {"x": spec.Tensor(["n", 64], "float32")}}))
    (fused,) = [f for f in ir.functions if f.kind == "fused"]
    expected = replace(FORMATS[name], group_size=group, symmetric=not has_zeros)
    assert QuantFormat.of(fused.attrs) == expected
    assert expected.attrs.items() <= fused.attrs.items()
    assert fused.attrs.keys() - expected.attrs.keys() == {"kind", "region", "operands"}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_outlining_says_which_format_blocks_are_in(name):
    class Model(nn.Module):
        def __init__(self) -> None:
            self.q = nn.Parameter((6, FORMATS[name].block.row_bytes(384)), "uint8")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.linear(x, op.dequantize_blocks(self.q, name, dtype="float32"))

    ir = outline(Model().export({"forward": {"x": spec.Tensor(["n", 384], "float32")}}))
    (fused,) = [f for f in ir.functions if f.kind == "fused"]
    assert QuantFormat.of(fused.attrs) == FORMATS[name]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_bytes_of_blocks_say_how_many_numbers_they_hold(name):
    block = FORMATS[name].block
    assert [block.columns(block.row_bytes(128 * n)) for n in range(9)] == [128 * n for n in range(9)]
    held = {block.row_bytes(128 * n) for n in range(9)}
    assert all(block.columns(n) is None for n in range(block.row_bytes(1024)) if n not in held)
