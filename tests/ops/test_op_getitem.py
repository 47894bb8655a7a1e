# SPDX-License-Identifier: Apache-2.0
"""`x[...]` is Python's indexing, for ints and for dims."""

from typing import Any

import pytest
import torch
from call import attrs_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case
from op_strategies import CASES

from nnfront import ops
from nnfront.dims import Dim, Size, Symbol, substitute
from nnfront.errors import NnfrontError, RunError
from nnfront.ir.types import TensorType

DIMS = {size: Dim(f"s{size}") for size in range(5)}
VALUES: dict[Symbol, Size] = {dim.symbols[0]: size for size, dim in DIMS.items()}


def python(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return `x[index]`, None if that is an error."""
    try:
        return x[index]
    except IndexError:
        return None


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a.float(), b.float())


@settings(max_examples=50, deadline=None)
@given(CASES["getitem"])
def test_known_sizes(case: Case) -> None:
    (x,), index = case.operands, case.attrs["index"]
    try:
        result = run(ops.getitem, x, index=index)
    except NnfrontError:
        result = None
    assert same(result, python(x, index))


def at_values(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(map(at_values, entry))
    return substitute(entry, VALUES) if isinstance(entry, Dim) else entry


@settings(max_examples=50, deadline=None)
@given(CASES["getitem"], st.sets(st.integers(0, 4)))
def test_dims_give_what_their_values_give(case: Case, known: set[int]) -> None:
    (x,), index = case.operands, case.attrs["index"]
    shape = tuple(size if size in known else DIMS[size] for size in x.shape)
    kind = TensorType(shape, str(x.dtype).removeprefix("torch."))
    try:
        attrs = attrs_of(ops.getitem, [kind], {"index": index})
    except NnfrontError:
        assert python(x, index) is None
        return
    try:
        result = ops.getitem.run([x], {"index": at_values(attrs["index"])})
    except (RunError, IndexError):
        result = None
    assert same(result, python(x, index))


def test_a_position_before_a_dim_is_an_error_not_the_other_end() -> None:
    with pytest.raises(RunError, match="getitem: a position lies 1 before the first element"):
        ops.getitem.run([torch.arange(2)], {"index": (2 - 3,)})


@pytest.mark.parametrize(("seq", "expected"), [(0, []), (2, [0, 1]), (5, [2, 3, 4])])
def test_the_last_few_of_a_dim(seq: int, expected: list[int]) -> None:
    n = Dim("n")
    attrs = attrs_of(ops.getitem, [TensorType((n,), "int64")], {"index": (slice(-3, None),)})
    index = tuple(tuple(substitute(s, {n.symbols[0]: seq}) for s in entry) for entry in attrs["index"])
    assert ops.getitem.run([torch.arange(seq)], {"index": index}).tolist() == expected
