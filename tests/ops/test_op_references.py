# SPDX-License-Identifier: Apache-2.0
"""The references against numpy, torch's functional ops, transformers, and loops written out."""

import numpy as np
import pytest
import torch
from call import run
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import CASES, Case
from torch.nn import functional as F
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nnfront import ops
from nnfront.errors import NnfrontError, RunError
from nnfront.ir.op import Op
from nnfront.ir.types import TensorType


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


@pytest.mark.parametrize("shape", [((3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (4,)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,))])
def test_matmul_is_numpys(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(s, dtype=torch.float64) for s in shape)
    assert_close(run(ops.matmul, a, b).numpy(), np.asarray(np.matmul(a.numpy(), b.numpy())))


def test_a_wider_out_dtype_is_what_products_are_summed_in() -> None:
    a, b = torch.randint(-128, 128, (4, 300), dtype=torch.int8), torch.randint(-128, 128, (300, 5), dtype=torch.int8)
    assert run(ops.matmul, a, b, out_dtype="int32").tolist() == (a.numpy().astype(int) @ b.numpy().astype(int)).tolist()
    x, w = torch.randn(4, 300).half(), torch.randn(5, 300).half()
    assert_close(run(ops.linear, x, w, out_dtype="float32"), (x.double() @ w.double().T).float())


def test_linear_adds_its_bias() -> None:
    x, w, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    assert_close(run(ops.linear, x, w, bias), x @ w.T + bias)


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk", "bij,bkj->bik", "ii->i", "ij->", "i,j->ji"])
def test_einsum_is_numpys(subscripts: str) -> None:
    terms = subscripts.split("->")[0].split(",")
    operands = [torch.randn(*(3 for _ in term), dtype=torch.float64) for term in terms]
    assert_close(run(ops.einsum, *operands, subscripts=subscripts).numpy(), np.asarray(np.einsum(subscripts, *operands)))


@settings(max_examples=300, deadline=None)
@given(CASES["getitem"])
def test_getitem_is_pythons_indexing(case: Case) -> None:
    (x,) = case.operands
    try:
        result = run(ops.getitem, x, **case.attrs)
    except NnfrontError:
        with pytest.raises(IndexError):
            x[case.attrs["index"]]
    else:
        assert torch.equal(result.float(), x[case.attrs["index"]].float())


@pytest.mark.parametrize(("mode", "numpy_mode"), [("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")])
def test_pad_is_numpys(mode: str, numpy_mode: str) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert_close(run(ops.pad, x, pad=[2, 1, 0, 3], mode=mode).numpy(), np.pad(x.numpy(), [(2, 1), (0, 3)], numpy_mode))


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
    for parts in (run(ops.split, x, indices_or_sections=3, axis=1), run(ops.split, x, indices_or_sections=[1, 4], axis=1), run(ops.chunk, x, chunks=4, dim=1)):
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
    result = run(ops.scatter_add, torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([1.0, 2.0, 3.0]), axis=0)
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
    assert_close(run(ops.var, x, axis=(0, 2), correction=correction), torch.var(x, (0, 2), correction=correction))


def test_softmax_is_exponentials_over_their_sum() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_close(run(ops.softmax, x, axis=0), x.exp() / x.exp().sum(0))
    assert_close(run(ops.log_softmax, x, axis=0), (x.exp() / x.exp().sum(0)).log())


@pytest.mark.parametrize(("start", "end", "step"), [(5, None, 1), (2, 9, 3), (9, 2, -2), (3, 3, 1), (5, 2, 1), (0.0, 1.0, 0.25)])
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


def test_astype_drops_the_fraction() -> None:
    assert run(ops.astype, torch.tensor([1.9, -1.9]), dtype="int8").tolist() == [1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 64).to(dtype)
    norm = LlamaRMSNorm(64, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(64).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]  # Llama rounds twice
    assert_close(run(ops.rms_norm, x, norm.weight.data, axes=-1, epsilon=1e-6), norm(x).detach(), rtol=tolerance, atol=1e-6)


def test_rms_norm_over_several_axes_with_bias() -> None:
    x, weight, bias = torch.randn(3, 4, 5), torch.randn(4, 5), torch.randn(4, 5)
    expected = x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt() * weight + bias
    assert_close(run(ops.rms_norm, x, weight, bias, axes=[1, 2]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((2, 3, 4, 5), (4, 5), (4, 5)))
    assert_close(run(ops.layer_norm, x, weight, bias, normalized_shape=(4, 5)), F.layer_norm(x, (4, 5), weight, bias))


def test_group_norm_is_torchs_wherever_the_channels_stand() -> None:
    x, weight, bias = torch.randn(2, 6, 4, 5), torch.randn(6), torch.randn(6)
    expected = F.group_norm(x, 3, weight, bias)
    assert_close(run(ops.group_norm, x, weight, bias, num_groups=3), expected)
    last = run(ops.group_norm, x.movedim(1, -1), weight, bias, num_groups=3, channel_axis=-1)
    assert_close(last.movedim(-1, 1), expected)


def test_group_norm_over_fewer_axes_keeps_the_others_apart() -> None:
    x = torch.randn(2, 4, 3, 5)
    apart = torch.stack([run(ops.group_norm, x[:, :, i], num_groups=2) for i in range(3)], 2)
    assert_close(run(ops.group_norm, x, num_groups=2, axes=[3]), apart)


def test_rope_is_llamas() -> None:
    q, k = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16)
    angles = torch.rand(2, 7, 8) * 6
    cos, sin = angles.cos(), angles.sin()
    whole = [torch.cat([table, table], -1) for table in (cos, sin)]
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *whole)
    for x, e in zip((q, k), expected, strict=True):
        assert_close(run(ops.rope, x, cos, sin), e.transpose(1, 2))


def test_interleaved_rope_turns_complex_numbers() -> None:
    x, angles = torch.randn(1, 5, 2, 8, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    result = run(ops.rope, x, angles.cos(), angles.sin(), interleaved=True)
    assert_close(result, torch.view_as_real(turned).flatten(-2))


def test_rope_leaves_features_beyond_its_tables() -> None:
    x, angles = torch.randn(1, 3, 2, 10), torch.rand(1, 3, 2)
    result = run(ops.rope, x, angles.cos(), angles.sin())
    assert torch.equal(result[..., 4:], x[..., 4:])
    assert_close(result[..., :4], run(ops.rope, x[..., :4], angles.cos(), angles.sin()))


@pytest.mark.parametrize("flip", [False, True])
def test_timestep_embeddings_fall_geometrically(flip: bool) -> None:
    x = torch.tensor([0.0, 1.0, 7.0])
    result = run(ops.get_timestep_embedding, x, embedding_dim=7, flip_sin_to_cos=flip, downscale_freq_shift=0, scale=2)
    for row, step in zip(result, x, strict=True):
        angles = [2 * step.item() * 10000 ** (-i / 3) for i in range(3)]
        sines, cosines = np.sin(angles), np.cos(angles)
        expected = [*cosines, *sines, 0.0] if flip else [*sines, *cosines, 0.0]
        assert_close(row.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_convolutions_pad_each_side_as_told(count: int) -> None:
    op = (ops.conv1d, ops.conv2d, ops.conv3d)[count - 1]
    function = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    x, weight, bias = torch.randn(2, 4, *[6] * count), torch.randn(6, 2, *[3] * count), torch.randn(6)
    same = run(op, x, weight, bias, padding="same", groups=2, dilation=2)
    assert_close(same, function(x, weight, bias, padding="same", groups=2, dilation=2))
    uneven = run(op, x, weight, bias, padding=[(2, 1)] * count, groups=2, stride=2)
    assert_close(uneven, function(F.pad(x, [2, 1] * count), weight, bias, stride=2, groups=2))


def test_channels_last_convolutions_permute() -> None:
    x, weight = torch.randn(2, 5, 6, 3), torch.randn(4, 3, 3, 3)
    result = run(ops.conv2d, x, weight, padding=1, data_layout="NHWC")
    assert_close(result.movedim(-1, 1), F.conv2d(x.movedim(-1, 1), weight, padding=1))
    x, weight = torch.randn(2, 4, 5, 6, 3), torch.randn(4, 3, 3, 3, 3)
    result = run(ops.conv3d, x, weight, data_layout="NDHWC")
    assert_close(result.movedim(-1, 1), F.conv3d(x.movedim(-1, 1), weight))


def test_transposed_convolution_is_torchs() -> None:
    x, weight, bias = torch.randn(2, 4, 5), torch.randn(4, 3, 3), torch.randn(6)
    attrs = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
    assert_close(run(ops.conv1d_transpose, x, weight, bias, **attrs), F.conv_transpose1d(x, weight, bias, **attrs))


def test_interpolation_is_torchs_in_both_layouts() -> None:
    x = torch.randn(1, 3, 5, 6)
    expected = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
    assert_close(run(ops.interpolate, x, scale_factor=2, mode="bilinear"), expected)
    last = run(ops.interpolate, x.movedim(1, -1), scale_factor=2, mode="bilinear", data_layout="NHWC")
    assert_close(last.movedim(-1, 1), expected)
    assert_close(run(ops.interpolate, x, size=(2, 9)), F.interpolate(x, (2, 9)))


@given(bits=st.integers(2, 8), group=st.sampled_from([None, 4, 8]), symmetric=st.booleans(), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
@settings(max_examples=60, deadline=None)
def test_quantisation_errs_within_its_scale(bits: int, group: int | None, symmetric: bool, dtype: str) -> None:
    x = (torch.randn(6, 16) * torch.rand(6, 1) * 10).to(getattr(torch, dtype))
    x[0] = 0
    q, scale, *zero = run(ops.quantize, x, bits=bits, group_size=group, symmetric=symmetric)
    back = run(ops.dequantize, q, scale, *zero, group_size=group, dtype="float64")
    step = scale.double().repeat_interleave(16 if group is None else group, 1)
    allowed = step * (0.5 if symmetric else 1.0) * (1 + 1e-6)
    assert ((back - x.double()).abs() <= allowed).all()
    low, high = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    assert low <= q.min() <= q.max() <= high
    assert (back[0] == 0).all()


def test_packing_puts_the_first_of_two_in_the_low_half() -> None:
    assert run(ops.pack_int4, torch.tensor([[1, 2, -1, -8]], dtype=torch.int8)).tolist() == [[0x21, 0x8F]]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpacking_undoes_packing(signed: bool, axis: int) -> None:
    low, high, dtype = (-8, 8, torch.int8) if signed else (0, 16, torch.uint8)
    x = torch.randint(low, high, (4, 6, 2), dtype=dtype)
    assert torch.equal(run(ops.unpack_int4, run(ops.pack_int4, x, axis=axis), axis=axis, signed=signed), x)


def test_an_external_function_gets_its_arguments_in_order() -> None:
    ops.register_extern("tests.scaled", lambda x, factor, offset: x * factor + offset)
    x = torch.randn(2)
    assert torch.equal(run(ops.extern, x, 3, 0.5, name="tests.scaled", out=TensorType((2,), "float32")), x * 3 + 0.5)


def test_an_external_function_must_be_registered_and_keep_its_promise() -> None:
    ops.register_extern("tests.one", lambda: torch.zeros(1))
    kind = TensorType((1,), "float32")
    with pytest.raises(RunError, match="no external function is called 'tests.none'\n  help: call nnfront.ops.register_extern"):
        run(ops.extern, name="tests.none", out=kind)
    with pytest.raises(RunError, match="the external function 'tests.one' must return 2 results\n  got Tensor"):
        run(ops.extern, name="tests.one", out=[kind, kind])
    with pytest.raises(RunError, match="the external function 'tests.one' is registered already"):
        ops.register_extern("tests.one", print)


def test_print_writes_the_format_or_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    run(ops.print_, torch.tensor(1), 2, format="x = {}, n = {}")
    run(ops.print_, torch.tensor([3]), 4)
    assert capsys.readouterr().out == "x = 1, n = 2\ntensor([3])\n4\n"
