# SPDX-License-Identifier: Apache-2.0
"""The type of a call: the callee's dims are solved from the arguments and replaced by the caller's."""

from __future__ import annotations

import pytest

import nnfront as nn
from nnfront.errors import InferError
from nnfront.ir.infer import call_type, join
from nnfront.ir.types import ScalarType, TensorType

CALLEE = """
private def f[n: ..64](k: input int64, x: input float32[n, 4]) -> float32[2*n] {
    y: float32[4*n] = reshape(x, shape=(4*n,))
    z: float32[2*n] = getitem(y, index=((0, 2*n, 1),))
    return z
}
"""


def tensor(*shape: int | str | nn.Dim) -> TensorType:
    return TensorType(tuple(nn.dims.to_size(s) for s in shape), "float32")


def test_a_number_without_a_value_takes_any_number() -> None:
    f = nn.ir.parse(CALLEE)["f"]
    for k in (ScalarType("int64"), ScalarType("int64", 3), ScalarType("int64", nn.Dim("m"))):
        assert call_type(f, [k, tensor(5, 4)]) == tensor(10)


def test_the_result_has_the_callers_dims_and_what_is_known_of_them() -> None:
    f = nn.ir.parse(CALLEE)["f"]
    assert call_type(f, [ScalarType("int64"), tensor(nn.Dim("m", max=64), 4)]) == tensor("2*m")
    result = call_type(f, [ScalarType("int64"), tensor(nn.Dim("n", max=16), 4)])
    assert isinstance(result, TensorType)
    size = result.shape[0]
    assert isinstance(size, nn.Dim)
    assert size.symbols[0].max == 16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([ScalarType("int64")], "f takes 2 arguments, got 1"),
        ([ScalarType("int64"), tensor(5, 3)], "f expects size 4 where the argument has 3"),
        ([ScalarType("int64"), tensor(5)], "argument 'x' of f has another type"),
        ([ScalarType("bool"), tensor(5, 4)], "argument 'k' of f has another type"),
        ([ScalarType("int64"), tensor(65, 4)], "f expects size n where the argument has 65"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: list[TensorType], message: str) -> None:
    with pytest.raises(InferError, match=message):
        call_type(nn.ir.parse(CALLEE)["f"], args)


@pytest.mark.parametrize(
    ("declared", "given", "known"),
    [
        ("8..8", "m", ["m is at least 0"]),
        ("8..8", "m + 8", ["m is at least 0"]),
        ("1..", "m", ["m is at least 0"]),
        ("..64", "m", ["m is at least 0"]),
        ("%16", "8*m", ["m is at least 0"]),
    ],
)
def test_what_a_function_says_of_its_dims_is_proved_at_the_call(
    declared: str, given: str, known: list[str]
) -> None:
    f = nn.ir.parse(f"private def f[n: {declared}](x: input float32[n, 4]) -> float32[n, 4] {{ return x }}")[
        "f"
    ]
    with pytest.raises(InferError, match=r"^f expects of its dim 'n' that it is .*, and gets ") as error:
        call_type(f, [tensor(given, 4)])
    assert list(error.value.details) == known


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("8..8", 8),
        ("1..", "m + 1"),
        ("..64", nn.Dim("m", max=64)),
        ("%16", "16*m"),
        ("4..64", nn.Dim("m", min=4, max=9)),
    ],
)
def test_a_call_that_keeps_what_the_function_says_is_fine(declared: str, given: int | str | nn.Dim) -> None:
    f = nn.ir.parse(f"private def f[n: {declared}](x: input float32[n]) -> float32[n] {{ return x }}")["f"]
    assert call_type(f, [tensor(given)]) == tensor(given)


def test_the_join_of_a_size_and_a_dim_is_the_dim() -> None:
    assert join(tensor(16, "m"), tensor("n", "m")) == tensor("n", "m")
    assert join(tensor("n"), tensor("m")) is None
    assert join(tensor(16), tensor(17)) is None
