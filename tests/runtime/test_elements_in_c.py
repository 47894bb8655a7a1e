# SPDX-License-Identifier: Apache-2.0
"""What C computes of elements and of rows against torch, each op by itself, for shapes that broadcast and are no multiple of anything."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_case import WAYS, Case, in_panels
from torch.nn import functional as F

from nnfront.backends.cpu import embedding
from nnfront.backends.cpu.backend import WRITERS
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import written
from nnfront.backends.cpu.rope import TABLES
from nnfront.lower import Run, Structure
from nnfront.quant_format import FORMATS

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]
KINDS = (torch.bfloat16, torch.float32)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])
kinds = st.sampled_from(KINDS)
shapes = st.builds(
    lambda outer, last: (*outer, last),
    st.lists(st.integers(1, 3), max_size=2),
    st.one_of(st.integers(1, 70), st.sampled_from([511, 513, 1025])),
)
few = settings(max_examples=10, deadline=None)


def in_c(op: str, *operands: Any, results: int = 1, **attrs: Any) -> list[torch.Tensor]:
    """What the kernel in C of an op makes of operands, which it has to take."""
    leaves = [Structure(i) for i in range(results)]
    run = Run(op, op, (), leaves[0] if results == 1 else Structure(fields=tuple(leaves)), attrs)
    tape = written(WRITERS[op], run, operands, {})
    assert tape is not None
    return tape.run([x for x in operands if isinstance(x, torch.Tensor)])


def drawn(data: st.DataObject, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers about zero, of some tensors a third such as are infinite, none or zeros of either sign."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    x = 3 * torch.randn(shape)
    if data.draw(st.booleans()):
        x = torch.where(torch.rand(shape) < 1 / 3, SPECIAL[torch.randint(len(SPECIAL), shape)], x)
    return x.to(dtype)


def broadcast(data: st.DataObject, shape: Sequence[int]) -> Sequence[int]:
    """A shape that this one results from."""
    kept = [size if data.draw(st.booleans()) else 1 for size in shape]
    return kept[data.draw(st.integers(0, len(kept) - 1)) :]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_rounded(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to what float64 gives, but for the last bits."""
    limit = {torch.bfloat16: 2**-7, torch.float32: 2e-6}[got.dtype]
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=limit, atol=1e-6, equal_nan=True)


def test_any_number_of_elements_is_computed() -> None:
    x = torch.linspace(-9, 9, 300 * 1024).reshape(300, 1024)
    assert_same(in_c("add", x, x[:1])[0], x + x[:1])


BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "less": operator.lt,
    "less_equal": operator.le,
}


@pytest.mark.parametrize("name", BINARY)
@given(st.data())
@few
def test_two_tensors_that_broadcast_in_either_order(name: str, data: st.DataObject):
    shape = data.draw(shapes)
    x, y = (drawn(data, each, data.draw(kinds)) for each in (shape, broadcast(data, shape)))
    for pair in ((x, y), (y, x)):
        assert_same(*in_c(name, *pair), BINARY[name](*pair))


@pytest.mark.parametrize("name", BINARY)
@given(st.data())
@few
def test_a_tensor_and_a_number_in_either_order(name: str, data: st.DataObject):
    x, number = (
        drawn(data, data.draw(shapes), data.draw(kinds)),
        data.draw(st.sampled_from([-1.7, 0.1, 3, 0.0])),
    )
    of = torch.tensor(number, dtype=x.dtype) if name in ("minimum", "maximum") else number
    assert_same(*in_c(name, x, number), BINARY[name](x, of))
    assert_same(*in_c(name, number, x), BINARY[name](of, x))


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "negative": torch.neg,
    "square": torch.square,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "rsqrt": torch.rsqrt,
    "cos": torch.cos,
    "sin": torch.sin,
}


@pytest.mark.parametrize("name", UNARY)
@given(st.data())
@few
def test_functions_of_each_element(name: str, data: st.DataObject):
    x = drawn(data, data.draw(shapes), data.draw(kinds)) * data.draw(st.sampled_from([0.01, 1, 30]))
    (got,) = in_c(name, x)
    assert_rounded(got, UNARY[name](x.double()))


def test_exp_is_finite_wherever_a_float_holds_it():
    x = torch.cat(
        [torch.linspace(-87.3, 88.72, 4001), torch.tensor([88.73, 1e30, torch.inf, -90.0, -torch.inf])]
    )
    assert_rounded(in_c("exp", x)[0][:-2], torch.exp(x.double())[:-2])
    assert in_c("exp", x)[0][-5:].tolist() == [torch.inf] * 3 + [0.0] * 2


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_angles_of_far_positions_are_as_exact_as_near_ones(name):
    angles = torch.arange(0, 1 << 20, 331).float()[:, None] * 10_000.0 ** -(torch.arange(32) / 32)
    assert (in_c(name, angles)[0].double() - UNARY[name](angles.double())).abs().max() < 2**-23


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
def test_tables_of_rotary_embedding(is_interleaved, dtype):
    attrs = {"dtype": "float32", "interleaved": is_interleaved}
    cos, sin = (torch.randn(2, 3, 5).to(dtype) for _ in range(2))
    expected = TABLES.bind(Run("rope_tables", "rope", (), Structure(0), attrs))(cos, sin)
    for got, of_torch in zip(in_c("rope_tables", cos, sin, results=2, **attrs), expected, strict=True):
        assert_same(got, of_torch)


@pytest.mark.parametrize("dtype", [*KINDS, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(50,), (50, 7), (50, 3, 2)])
@pytest.mark.parametrize("places", [(1,), (2, 3)])
def test_rows_are_taken_by_tensors_of_positions(dtype, shape, places):
    x, rows = (9 * torch.randn(shape)).to(dtype), torch.randint(50, places)
    assert_same(*in_c("take", x, rows, axis=0), x[rows])


@pytest.mark.parametrize("row", [50, -1, 1 << 40])
def test_rows_that_there_are_not_are_refused(row):
    with pytest.raises(ValueError, match=f"rows from 0 to 49, got {row}"):
        in_c("take", torch.zeros(50, 3), torch.tensor([2, row]), axis=0)


@pytest.mark.parametrize("count", [48, 50])
@pytest.mark.parametrize(("name", "group"), WAYS, ids=str)
def test_rows_of_a_weight_in_few_bits_are_what_it_stands_for(name, group, count):
    torch.manual_seed(0)
    case = Case(name, group, 1, 384, count, is_wide=False)
    tokens = torch.randint(count, (2, 3))
    attrs = {**case.format.attrs, "dtype": "bfloat16"}
    stored = case.weight, tokens, case.scales, case.zeros
    (got,) = in_c("quantized_embedding", *stored, **attrs)
    torch.testing.assert_close(got, case.dense[tokens].bfloat16(), rtol=2**-8, atol=1e-5)
    if case.format.block is None:
        packed = in_panels(case.weight, 4), tokens, in_panels(case.scales, 1), in_panels(case.zeros, 1)
        assert_same(*in_c("packed_quantized_embedding", *packed, **attrs), got)


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("mxfp4", torch.uint8),
        ("nvfp4", torch.float8_e4m3fn),
        ("nl4", torch.float8_e4m3fn),
        ("fp8", torch.float32),
    ],
)
def test_rows_have_scales_of_any_kind(name, scales):
    torch.manual_seed(0)
    format, count, columns = FORMATS[name], 50, 256
    groups = columns // format.group_size if format.group_size else 1
    weight = torch.randint(
        0, 120, (count, columns // (1 if format.packing is None else 2)), dtype=torch.uint8
    )
    beside = torch.randint(100, 130, (count, groups), dtype=torch.uint8)
    beside = beside if scales == torch.uint8 else (beside / 64).to(scales)
    factors = torch.rand(count, 1) if format.has_factor else None
    tokens, attrs = torch.randint(count, (7,)), {**format.attrs, "dtype": "bfloat16"}
    run = Run("quantized_embedding", "quantized_embedding", (), Structure(0), attrs)
    weight = weight if name != "fp8" else weight.view(torch.float8_e4m3fn)
    taken = next(k for k in embedding.KERNELS if k.name == run.kernel).bind(run)(
        weight, tokens, beside, factors
    )
    assert_same(*in_c("quantized_embedding", weight, tokens, beside, factors, **attrs), taken)


@given(st.data())
@few
def test_where_takes_tensors_and_numbers_on_both_sides(data: st.DataObject):
    shape, dtype = data.draw(shapes), data.draw(kinds)
    condition = torch.rand(broadcast(data, shape)) < 0.5
    x, y = (drawn(data, each, dtype) for each in (shape, broadcast(data, shape)))
    for first, second in ((x, y), (y, x), (x, -1.5), (-1.5, x)):
        assert_same(*in_c("where", condition, first, second), torch.where(condition, first, second))


@given(st.data())
@few
def test_equal_compares_floats_and_integers_that_broadcast(data: st.DataObject):
    shape = data.draw(shapes)
    x, y = (torch.randint(-2, 3, each) for each in (shape, broadcast(data, shape)))
    x, y = x.to(data.draw(kinds)), y.to(data.draw(st.sampled_from([*KINDS, torch.int32])))
    for pair in ((x, y), (y, x)):
        assert_same(*in_c("equal", *pair), torch.eq(*pair))


@given(st.data())
@few
def test_conversions_round_to_the_nearest(data: st.DataObject):
    pairs = [(a, b) for a in (*KINDS, torch.bool, torch.int32, torch.int64) for b in KINDS if a != b]
    dtype, to = data.draw(st.sampled_from(pairs))
    x = drawn(data, data.draw(shapes), torch.float32) * 31
    x = (x if dtype in KINDS else x.nan_to_num(0, 9, -9)).to(dtype)
    assert_same(*in_c("astype", x, dtype=str(to).removeprefix("torch.")), x.to(to))


@given(st.data())
@few
def test_reductions_over_axes_that_follow_one_another(data: st.DataObject):
    x = drawn(data, data.draw(shapes), data.draw(kinds))
    first = data.draw(st.integers(0, x.ndim - 1))
    axes, keepdims = list(range(first, data.draw(st.integers(first + 1, x.ndim)))), data.draw(st.booleans())
    (total,) = in_c("sum", x, axis=axes, keepdims=keepdims)
    assert_rounded(total, x.double().sum(axes, keepdim=keepdims))
    for of in (x, x > 1):
        (found,) = in_c("any", of, axis=axes, keepdims=keepdims)
        expected = of != 0
        for axis in reversed(axes):
            expected = expected.any(axis, keepdim=keepdims)
        assert_same(found, expected)


@given(st.data())
@few
def test_softmax_along_any_axis(data: st.DataObject):
    x = drawn(data, data.draw(shapes), data.draw(kinds))
    axis = data.draw(st.integers(0, x.ndim - 1))
    (got,) = in_c("softmax", x, axis=axis)
    assert_rounded(got, torch.softmax(x.double(), axis))


@given(st.data())
@few
def test_the_largest_come_first_and_their_places_gather_them(data: st.DataObject):
    shape, dtype = data.draw(shapes), data.draw(kinds)
    width = min(shape[-1], 250)  # integers up to 256 are apart in bfloat16
    rows = [torch.randperm(width) for _ in range(torch.Size(shape[:-1]).numel())]
    x = torch.stack(rows).view(*shape[:-1], width).to(dtype) - width // 2
    k = data.draw(st.integers(1, width))
    values, places = in_c(
        "topk", x, results=2, k=k, axis=x.ndim - 1, ret_type="both", largest=True, dtype="int32"
    )
    expected = torch.topk(x, k)
    assert_same(values, expected.values)
    assert_same(places, expected.indices.int())
    assert_same(*in_c("gather", x, places, axis=x.ndim - 1), expected.values)


@pytest.mark.parametrize("is_transposed", [False, True])
@given(st.data())
@few
def test_heads_have_a_matrix_each(is_transposed: bool, data: st.DataObject):
    tokens, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    columns, outputs = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([1, 7, 64, 129, 256, 300]))
    torch.manual_seed(0)
    x = torch.randn(tokens, heads, columns).bfloat16()
    weight = torch.randn(heads, *((columns, outputs) if is_transposed else (outputs, columns))).bfloat16()
    subscripts = "thc,hco->tho" if is_transposed else "thc,hoc->tho"
    (got,) = in_c("einsum_heads", x, weight, subscripts=subscripts)
    expected = torch.einsum(subscripts, x.double(), weight.double())
    sizes = torch.einsum(subscripts, x.double().abs(), weight.double().abs())
    assert ((got.double() - expected).abs() <= expected.abs() * 2**-8 + sizes * 1e-5).all()
    for token in range(tokens):  # a token has the same bits whatever is beside it
        assert_same(
            *in_c("einsum_heads", x[token : token + 1], weight, subscripts=subscripts), got[token : token + 1]
        )
