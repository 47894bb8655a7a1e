# SPDX-License-Identifier: Apache-2.0
"""Constants as text: short lists where they are exact, the same values that torch has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront import dtypes
from nnfront.ir import Constant, TensorType, parse_function
from nnfront.ir.literals import constant_bytes, constant_text

LISTED = [name for name in dtypes.DTYPES if not name.startswith("float8")]


def data_of(values: list[object], dtype: str) -> bytes:
    """The bytes that torch gives to a list."""
    return torch.tensor(values, dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", LISTED)
def test_list_is_rounded_as_torch_rounds(dtype: str) -> None:
    values: list[object] = [True, False] if dtype == "bool" else [1, 0, 100]
    if dtypes.is_float(dtype):
        values = [0.1, -2.7, 65519.0, 1e-7, 0.0, -0.0, float("inf"), 3.0]
    assert constant_bytes(values, dtype) == data_of(values, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=5))
def test_floats_round_as_torch_rounds(dtype: str, values: list[float]) -> None:
    values = [value * 1.001 for value in values if abs(value) < 60000]
    assert constant_bytes(values, dtype) == data_of([*values], dtype)


@pytest.mark.parametrize(
    ("values", "dtype", "text"),
    [
        ([0.1, 1.0], "float32", "[0.1, 1.0]"),
        ([0.1, 1.0], "float16", "[0.1, 1.0]"),
        ([0.1, 1.0], "bfloat16", "[0.1, 1.0]"),
        ([0.1, 1 / 3], "float64", "[0.1, 0.3333333333333333]"),
        ([1e30, -0.0], "float32", "[1e+30, -0.0]"),
        ([float("nan"), float("-inf")], "float32", "[nan, -inf]"),
        ([-128, 127], "int8", "[-128, 127]"),
        ([True, False], "bool", "[True, False]"),
        ([], "int64", "[]"),
    ],
)
def test_short_constant_is_a_list_of_short_numbers(values: list[object], dtype: str, text: str) -> None:
    assert constant_text(data_of(values, dtype), dtype) == text


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (bytes(17), "int8"),
        (b"\1\0\xc0\x7f", "float32"),
        (b"\2", "bool"),
        (b"\0", "float8_e4m3fn"),
        (bytes(3), "int16"),
    ],
    ids=["long", "nan with a payload", "bool that is 2", "float8", "half an element"],
)
def test_other_bytes_are_base64(data: bytes, dtype: str) -> None:
    text = constant_text(data, dtype)
    assert text.startswith('"')
    function = parse_function(f"def f() -> {dtype}[1] {{ return const({dtype}[1], {text}) }}")
    assert isinstance(function.result, Constant)
    assert function.result.data == data


@pytest.mark.parametrize("dtype", dtypes.DTYPES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(raw=st.binary(min_size=32, max_size=32))
def test_any_bytes_read_back(dtype: str, raw: bytes) -> None:
    count = 4
    data = raw[: count * dtypes.size_bytes(dtype)]
    text = constant_text(data, dtype)
    function = parse_function(f"def f() -> {dtype}[4] {{ return const({dtype}[4], {text}) }}")
    assert isinstance(function.result, Constant)
    assert function.result.data == data
    assert function.result.type == TensorType((4,), dtype)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([256], "uint8"),
        ([-1], "uint8"),
        ([1e39], "float32"),
        ([70000.0], "float16"),
        ([2**70], "float32x"),
        ([1], "bool"),
        ([True], "int8"),
    ],
)
def test_element_that_does_not_fit_has_no_bytes(values: list[int | float], dtype: str) -> None:
    assert constant_bytes(values, dtype) is None
