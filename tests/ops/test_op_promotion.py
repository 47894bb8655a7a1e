# SPDX-License-Identifier: Apache-2.0
"""Result dtypes are torch's, for every pair of dtypes and every mix of tensors with axes, without axes, and numbers."""

from itertools import product
from typing import Any

import pytest
import torch
from call import infer, t
from op_cases import type_of

from nnfront import ops
from nnfront.dims import Dim
from nnfront.dtypes import DTYPES, promote
from nnfront.errors import InferError
from nnfront.ops.rules import result_dtype

TENSORS = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype in DTYPES for shape in ((2,), ())]
NUMBERS: list[Any] = [True, 2, 0.5]


def torchs(*values: Any) -> str:
    """Return what torch says, 'refused' if it refuses."""
    try:
        return str(torch.result_type(*values)).removeprefix("torch.")
    except RuntimeError:
        return "refused"


def ours(*values: Any) -> str:
    try:
        return result_dtype(*map(type_of, values))  # type: ignore[arg-type]
    except InferError:
        return "refused"


@pytest.mark.parametrize("a", TENSORS, ids=lambda x: f"{x.dtype}-{x.ndim}")
def test_two_operands_promote_as_in_torch(a: torch.Tensor) -> None:
    others = [*TENSORS, *NUMBERS]
    assert {i: ours(a, b) for i, b in enumerate(others)} == {i: torchs(a, b) for i, b in enumerate(others)}
    assert {i: ours(b, a) for i, b in enumerate(others)} == {i: torchs(b, a) for i, b in enumerate(others)}


def test_promotion_of_dtypes_is_torchs() -> None:
    for a, b in product(DTYPES, DTYPES):
        try:
            expected = str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.")
        except RuntimeError:
            with pytest.raises(InferError, match=f"{a} and {b} have no common dtype"):
                promote(a, b)
        else:
            assert promote(a, b) == expected


def test_a_dim_is_a_number() -> None:
    n = Dim("n")
    assert infer(ops.multiply, t(n, dtype="int32"), type_of(n)) == t(n, dtype="int32")
    assert infer(ops.divide, t(n, dtype="int32"), type_of(n)) == t(n, dtype="float32")
