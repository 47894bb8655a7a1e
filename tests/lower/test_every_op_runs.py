# SPDX-License-Identifier: Apache-2.0
"""Every op of the vocabulary gives the same in a program as by itself, whatever kernel is chosen for it."""

import contextlib
import io

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from op_cases import Layer, type_of
from op_strategies import CASES

from nnfront.backends.lowering import lower
from nnfront.errors import NnfrontError
from nnfront.ir import OPS, FunctionBuilder, IRModule, Scalar
from nnfront.session import Session

# `empty` has no values to compare; loops run in tests/nn/test_scan.py, where they have bodies; ops on a whole cache or one of its handles run in tests/runtime/test_cache.py.
ELSEWHERE = {"empty", "scan", *(name for name in OPS if name.startswith("cache_"))}


@pytest.mark.parametrize("name", sorted(set(OPS) - ELSEWHERE))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_op_gives_the_same_in_a_program(name, data):
    op, case = OPS[name], data.draw(CASES[name])
    operands = [None if isinstance(x, Layer) else x for x in case.operands]
    types = [type_of(x) for x in operands]
    try:
        attrs = canonical_attrs(op, types, case.attrs)
    except NnfrontError:
        reject()  # some of the drawn calls are wrong on purpose
    builder = FunctionBuilder("main")
    atoms = [
        builder.param(f"x{i}", types[i], "input")
        if isinstance(x, torch.Tensor)
        else None
        if x is None
        else Scalar(x)
        for i, x in enumerate(operands)
    ]
    result = builder.call(op, *atoms, **attrs)
    method = Session(lower(IRModule([builder.finish(result)])), {})["main"]
    with contextlib.redirect_stdout(io.StringIO()):
        expected = op.run(operands, attrs)
        got = method(*[x for x in operands if isinstance(x, torch.Tensor)])
    numbers = [x.double().abs().reshape(-1) for x in operands if isinstance(x, torch.Tensor)]
    largest = max([1.0, *torch.cat(numbers).tolist()]) if numbers else 1.0
    assert_same(got, expected, largest)


def canonical_attrs(op, types, given):
    attrs = op.canonical_attrs(types, {n: given.get(n, d) for n, d in op.attributes.items()})
    op.result_type(types, attrs)
    return attrs


def assert_same(got, expected, largest: float) -> None:
    """Equal up to rounding; sums of numbers as large as the `largest` operand may cancel."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        exact = expected if expected.element_size() > 1 else expected.float()
        eps = torch.finfo(exact.dtype).eps if exact.is_floating_point() else 0
        torch.testing.assert_close(
            got.to(exact.dtype), exact, equal_nan=True, rtol=64 * eps, atol=16 * eps * largest
        )
    elif not isinstance(expected, tuple | list):
        assert got == expected
    elif not expected:  # an op that returns nothing
        assert got is None
    else:
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, largest)
