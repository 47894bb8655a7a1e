# SPDX-License-Identifier: Apache-2.0
"""Elementwise ops, products, reductions, shapes and positions against numpy."""

import math

import numpy as np
import pytest
import torch
from call import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from nnfront import ops
from nnfront.ir.op import Op


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


UNARY = {
    ops.negative: np.negative, ops.abs: np.abs, ops.sign: np.sign, ops.square: np.square, ops.floor: np.floor,
    ops.ceil: np.ceil, ops.round: np.round, ops.sqrt: np.sqrt, ops.rsqrt: lambda x: 1 / np.sqrt(x),
    ops.reciprocal: lambda x: 1 / x, ops.exp: np.exp, ops.log: np.log, ops.sin: np.sin, ops.cos: np.cos, ops.tanh: np.tanh,
    ops.sigmoid: lambda x: 1 / (1 + np.exp(-x)), ops.logical_not: np.logical_not,
    ops.relu: lambda x: np.maximum(x, 0), ops.relu6: lambda x: np.clip(x, 0, 6), ops.silu: lambda x: x / (1 + np.exp(-x)),
    ops.mish: lambda x: x * np.tanh(np.log1p(np.exp(x))), ops.hardswish: lambda x: x * np.clip(x + 3, 0, 6) / 6,
    ops.softplus: lambda x: np.log1p(np.exp(x)), ops.leaky_relu: lambda x: np.where(x > 0, x, 0.01 * x),
    ops.elu: lambda x: np.where(x > 0, x, np.expm1(x)), ops.any: np.any, ops.all: np.all, ops.sum: np.sum, ops.prod: np.prod,
    ops.max: np.max, ops.min: np.min, ops.mean: np.mean, ops.var: np.var, ops.argmax: np.argmax, ops.argmin: np.argmin,
    ops.cumsum: np.cumsum, ops.sort: np.sort, ops.argsort: np.argsort, ops.flip: np.flip, ops.permute_dims: np.transpose,
    ops.triu: np.triu, ops.tril: np.tril, ops.squeeze: lambda x: x, ops.stop_lift_params: lambda x: x,
}  # fmt: skip

BINARY = {
    ops.add: np.add, ops.subtract: np.subtract, ops.multiply: np.multiply, ops.divide: np.divide,
    ops.floor_divide: np.floor_divide, ops.remainder: np.remainder, ops.power: np.power, ops.maximum: np.maximum,
    ops.minimum: np.minimum, ops.less: np.less, ops.less_equal: np.less_equal, ops.greater: np.greater,
    ops.greater_equal: np.greater_equal, ops.equal: np.equal, ops.not_equal: np.not_equal,
    ops.logical_and: np.logical_and, ops.logical_or: np.logical_or, ops.logical_xor: np.logical_xor,
}  # fmt: skip

BITS = {
    ops.bitwise_and: np.bitwise_and, ops.bitwise_or: np.bitwise_or, ops.bitwise_xor: np.bitwise_xor,
    ops.left_shift: np.left_shift, ops.right_shift: np.right_shift,
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_ops_of_one_tensor_are_numpys(op: Op) -> None:
    x = torch.rand(3, 4, dtype=torch.float64) * 4 + 0.1
    if op in (ops.negative, ops.abs, ops.sign, ops.relu, ops.relu6, ops.leaky_relu, ops.elu, ops.hardswish):
        x = x - 2
    attrs = {"axis": ()} if op is ops.squeeze else {}
    expected = np.array(UNARY[op](x.numpy()))  # a copy: torch takes no negative strides
    assert_close(run(op, x, **attrs), torch.from_numpy(expected), check_dtype=False)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.name)
def test_ops_of_two_tensors_are_numpys(op: Op) -> None:
    a, b = torch.randint(1, 5, (3, 1, 4)).double(), torch.randint(1, 5, (2, 4)).double()
    assert_close(run(op, a, b).numpy(), BINARY[op](a.numpy(), b.numpy()))


@pytest.mark.parametrize("op", BITS, ids=lambda op: op.name)
def test_ops_on_bits_are_numpys(op: Op) -> None:
    a, b = torch.randint(-9, 9, (3, 4)), torch.randint(0, 5, (4,))
    assert_close(run(op, a, b).numpy(), BITS[op](a.numpy(), b.numpy()))


def test_bitwise_not_inverts_each_bit() -> None:
    assert run(ops.bitwise_not, torch.tensor([0, 5], dtype=torch.uint8)).tolist() == [255, 250]


def test_a_bool_tensor_is_subtracted_from_a_number() -> None:
    assert run(ops.subtract, 1.0, torch.tensor([True, False])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (None, 1), (-1, None), (2.0, -2.0)])
def test_clip_is_torchs_clamp(low: float | None, high: float | None) -> None:
    x = torch.randn(20) * 3
    assert_close(run(ops.clip, x, low, high), torch.clamp(x, low, high))


def test_erf_is_the_integral_of_the_bell_curve() -> None:
    x = torch.linspace(0, 2, 20001, dtype=torch.float64)
    integral = torch.trapezoid(2 / np.sqrt(np.pi) * torch.exp(-x.square()), x)
    assert_close(run(ops.erf, torch.tensor(2.0, dtype=torch.float64)), integral)


@pytest.mark.parametrize("approximate", [None, "tanh"])
def test_gelu_is_x_times_the_normal_distribution(approximate: str | None) -> None:
    x = torch.randn(100, dtype=torch.float64)
    expected = x * torch.distributions.Normal(0.0, 1.0).cdf(x)
    tolerance = 1e-7 if approximate is None else 1e-3
    assert_close(run(ops.gelu, x, approximate=approximate), expected, rtol=0, atol=tolerance)


def test_gated_activations_multiply_in_float32() -> None:
    gate, up = (torch.randn(4, 8).bfloat16() for _ in range(2))
    assert_close(run(ops.swiglu, gate, up), (F.silu(gate.double()) * up.double()).bfloat16())
    assert_close(run(ops.geglu, gate, up), (F.gelu(gate.double()) * up.double()).bfloat16())


def test_prelu_has_a_slope_for_each_channel() -> None:
    x, slopes = torch.tensor([[[-1.0, 2.0], [-3.0, 4.0]]]), torch.tensor([0.5, 0.1])
    assert_close(run(ops.prelu, x, slopes), torch.tensor([[[-0.5, 2.0], [-0.3, 4.0]]]))


def test_where_takes_any_nonzero_for_true() -> None:
    assert run(ops.where, torch.tensor([0, 2]), 1.5, torch.tensor([7, 7])).tolist() == [7.0, 1.5]


@pytest.mark.parametrize(
    "shape", [((3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (4,)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,))]
)
def test_matmul_is_numpys(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(s, dtype=torch.float64) for s in shape)
    assert_close(run(ops.matmul, a, b).numpy(), np.asarray(np.matmul(a.numpy(), b.numpy())))


def test_a_wider_out_dtype_is_what_products_are_summed_in() -> None:
    a, b = (
        torch.randint(-128, 128, (4, 300), dtype=torch.int8),
        torch.randint(-128, 128, (300, 5), dtype=torch.int8),
    )
    assert (
        run(ops.matmul, a, b, out_dtype="int32").tolist()
        == (a.numpy().astype(int) @ b.numpy().astype(int)).tolist()
    )
    x, w = torch.randn(4, 300).half(), torch.randn(5, 300).half()
    assert_close(run(ops.linear, x, w, out_dtype="float32"), (x.double() @ w.double().T).float())


def test_linear_adds_its_bias() -> None:
    x, w, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    assert_close(run(ops.linear, x, w, bias), x @ w.T + bias)


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk", "bij,bkj->bik", "ii->i", "ij->", "i,j->ji"])
def test_einsum_is_numpys(subscripts: str) -> None:
    terms = subscripts.split("->")[0].split(",")
    operands = [torch.randn(*(3 for _ in term), dtype=torch.float64) for term in terms]
    assert_close(
        run(ops.einsum, *operands, subscripts=subscripts).numpy(),
        np.asarray(np.einsum(subscripts, *operands)),
    )


@pytest.mark.parametrize(
    ("mode", "numpy_mode"), [("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")]
)
def test_pad_is_numpys(mode: str, numpy_mode: str) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert_close(
        run(ops.pad, x, pad=[2, 1, 0, 3], mode=mode).numpy(), np.pad(x.numpy(), [(2, 1), (0, 3)], numpy_mode)
    )


def test_pad_begins_with_the_first_axis() -> None:
    x = torch.ones(2, 3)
    assert_close(run(ops.pad, x, pad=[1, 0], value=7.0), torch.tensor([[7.0] * 3, [1.0] * 3, [1.0] * 3]))


def test_repeat_and_tile_are_numpys() -> None:
    x = torch.arange(6).reshape(2, 3)
    assert run(ops.repeat, x, repeats=2).tolist() == np.repeat(x.numpy(), 2).tolist()
    assert run(ops.repeat, x, repeats=2, axis=1).tolist() == np.repeat(x.numpy(), 2, 1).tolist()
    assert run(ops.tile, x, repeats=(2, 1, 2)).tolist() == np.tile(x.numpy(), (2, 1, 2)).tolist()


def test_split_and_chunk_take_apart_what_concat_joins() -> None:
    x = torch.randn(2, 6)
    for parts in (
        run(ops.split, x, indices_or_sections=3, axis=1),
        run(ops.split, x, indices_or_sections=[1, 4], axis=1),
        run(ops.chunk, x, chunks=4, dim=1),
    ):
        assert torch.equal(run(ops.concat, *parts, dim=1), x)
    assert [p.shape[1] for p in run(ops.split, x, indices_or_sections=[1, 4], axis=1)] == [1, 3, 2]


def test_stack_makes_an_axis_that_getitem_takes_away() -> None:
    x = [torch.randn(2, 3) for _ in range(3)]
    assert torch.equal(run(ops.getitem, run(ops.stack, *x, dim=1), index=(slice(None), 2)), x[2])


def test_reshape_unsqueeze_and_broadcast_keep_the_order() -> None:
    x = torch.arange(6)
    assert run(ops.reshape, x, shape=(2, -1)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert run(ops.unsqueeze, x, dim=-1).tolist() == [[i] for i in range(6)]
    assert run(ops.broadcast_to, x, shape=(2, 6)).tolist() == [list(range(6))] * 2


def test_take_is_numpys() -> None:
    x, indices = torch.randn(3, 4, 5), torch.tensor([[0, 3], [1, 1]], dtype=torch.int32)
    assert_close(run(ops.take, x, indices, axis=1).numpy(), np.take(x.numpy(), indices.numpy(), 1))


def test_gather_and_scatter_are_inverse() -> None:
    x = torch.randn(3, 5)
    order = torch.argsort(torch.rand(3, 5), -1)
    chosen = run(ops.gather, x, order)
    assert chosen[1, 2] == x[1, order[1, 2]]
    assert torch.equal(run(ops.scatter, torch.zeros(3, 5), order, chosen), x)


def test_scatter_add_sums_repeated_positions() -> None:
    result = run(
        ops.scatter_add, torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([1.0, 2.0, 3.0]), axis=0
    )
    assert result.tolist() == [4.0, 4.0, 1.0]


def test_topk_is_the_head_of_a_sort() -> None:
    x = torch.randperm(20).reshape(4, 5)
    values, indices = run(ops.topk, x, k=2)
    assert values.tolist() == np.sort(x.numpy())[:, :-3:-1].tolist()
    assert torch.equal(x.gather(-1, indices.long()), values)
    assert run(ops.topk, x, k=0, largest=False, ret_type="values").tolist() == np.sort(x.numpy()).tolist()


def test_an_exclusive_sum_leaves_out_its_own_element() -> None:
    assert run(ops.cumsum, torch.tensor([1, 2, 3]), axis=0, exclusive=True).tolist() == [0, 1, 3]


@pytest.mark.parametrize("correction", [0, 1])
def test_var_is_torchs(correction: int) -> None:
    x = torch.randn(3, 4, 5)
    assert_close(
        run(ops.var, x, axis=(0, 2), correction=correction), torch.var(x, (0, 2), correction=correction)
    )


def test_softmax_is_exponentials_over_their_sum() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_close(run(ops.softmax, x, axis=0), x.exp() / x.exp().sum(0))
    assert_close(run(ops.log_softmax, x, axis=0), (x.exp() / x.exp().sum(0)).log())


@pytest.mark.parametrize(
    ("start", "end", "step"), [(5, None, 1), (2, 9, 3), (9, 2, -2), (3, 3, 1), (5, 2, 1), (0.0, 1.0, 0.25)]
)
def test_arange_is_numpys(start: float, end: float | None, step: float) -> None:
    expected = np.arange(start, step=step) if end is None else np.arange(start, end, step)
    assert run(ops.arange, start=start, end=end, step=step).tolist() == expected.tolist()


def test_creation_fills() -> None:
    x = torch.randn(2, 3)
    assert run(ops.full, 2.5, shape=(2,)).tolist() == [2.5, 2.5]
    assert run(ops.full, torch.tensor(3), shape=(2,), dtype="int32").tolist() == [3, 3]
    assert run(ops.full_like, x, 4).tolist() == [[4.0] * 3] * 2
    assert run(ops.full_like, x, torch.tensor(4), dtype="int64").tolist() == [[4] * 3] * 2
    assert run(ops.zeros_like, x).sum() + run(ops.zeros, shape=(2,)).sum() == 0
    assert run(ops.ones_like, x).sum() + run(ops.ones, shape=(2,)).sum() == 8
    assert run(ops.dim_value, dim=7).item() == 7


def test_bitcast_reads_bytes_little_endian() -> None:
    words = torch.tensor([[0x04030201, -1]], dtype=torch.int32)
    assert run(ops.bitcast, words, dtype="uint8").tolist() == [[1, 2, 3, 4, 255, 255, 255, 255]]
    assert run(ops.bitcast, torch.tensor([0, 0x3C], dtype=torch.uint8), dtype="float16").tolist() == [1]
    assert run(ops.bitcast, torch.arange(5, dtype=torch.uint8)[1:], dtype="int16").tolist() == [
        0x0201,
        0x0403,
    ]
    assert run(ops.bitcast, words.T, dtype="int16").tolist() == [[0x0201, 0x0403], [-1, -1]]


def test_astype_drops_the_fraction() -> None:
    assert run(ops.astype, torch.tensor([1.9, -1.9]), dtype="int8").tolist() == [1, -1]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_bytes_in_any_order_are_reshaped_as_torch_does_and_stay_views_where_they_can(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
    axes = data.draw(st.permutations(range(len(sizes))))
    step, first = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 3))
    count = math.prod(sizes)
    data_type = data.draw(st.sampled_from([torch.uint8, torch.int8, torch.bool, torch.int16]))
    stored = torch.arange(first + step * count).to(data_type)[first::step]
    x = stored[:count].unflatten(0, sizes).permute(axes)
    shape = data.draw(st.sampled_from([(count,), (1, count), tuple(x.shape), (-1, x.shape[-1])]))
    y, expected = ops.reshape.run((x,), {"shape": shape}), x.reshape(shape)
    assert torch.equal(y, expected)
    assert (y.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr())
