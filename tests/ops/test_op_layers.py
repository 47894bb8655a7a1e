# SPDX-License-Identifier: Apache-2.0
"""Norms, rotations, convolutions, resizing and quantisation against torch, transformers and formulas written out."""

import numpy as np
import pytest
import torch
from call import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nnfront import ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 64).to(dtype)
    norm = LlamaRMSNorm(64, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(64).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]  # Llama rounds twice
    assert_close(
        run(ops.rms_norm, x, norm.weight.data, axes=-1, epsilon=1e-6),
        norm(x).detach(),
        rtol=tolerance,
        atol=1e-6,
    )


def test_rms_norm_over_several_axes_with_bias() -> None:
    x, weight, bias = torch.randn(3, 4, 5), torch.randn(4, 5), torch.randn(4, 5)
    expected = x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt() * weight + bias
    assert_close(run(ops.rms_norm, x, weight, bias, axes=[1, 2]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((2, 3, 4, 5), (4, 5), (4, 5)))
    assert_close(
        run(ops.layer_norm, x, weight, bias, normalized_shape=(4, 5)), F.layer_norm(x, (4, 5), weight, bias)
    )


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
    turned = (
        torch.view_as_complex(x.unflatten(-1, (4, 2)))
        * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    )
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
    result = run(
        ops.get_timestep_embedding, x, embedding_dim=7, flip_sin_to_cos=flip, downscale_freq_shift=0, scale=2
    )
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
    assert_close(
        run(ops.conv1d_transpose, x, weight, bias, **attrs), F.conv_transpose1d(x, weight, bias, **attrs)
    )


def test_interpolation_is_torchs_in_both_layouts() -> None:
    x = torch.randn(1, 3, 5, 6)
    expected = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
    assert_close(run(ops.interpolate, x, scale_factor=2, mode="bilinear"), expected)
    last = run(ops.interpolate, x.movedim(1, -1), scale_factor=2, mode="bilinear", data_layout="NHWC")
    assert_close(last.movedim(-1, 1), expected)
    assert_close(run(ops.interpolate, x, size=(2, 9)), F.interpolate(x, (2, 9)))


@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 4, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
@settings(max_examples=60, deadline=None)
def test_quantisation_errs_within_its_scale(
    bits: int, group: int | None, symmetric: bool, dtype: str
) -> None:
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


# Distance of a float of 8 bits from what it stands for: relative to the element, and relative to the scale near zero.
FLOAT8 = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}


@given(
    group=st.sampled_from([None, 4, 8]),
    stored=st.sampled_from(sorted(FLOAT8)),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    scale_dtype=st.sampled_from([None, "float32"]),
)
@settings(max_examples=40, deadline=None)
def test_rounding_to_floats_of_8_bits_errs_relative_to_each_element(
    group: int | None, stored: str, dtype: str, scale_dtype: str | None
) -> None:
    x = (torch.randn(6, 16) * torch.exp2(4 * torch.randn(6, 16))).to(getattr(torch, dtype))
    x[0] = 0
    q, scale = run(ops.quantize, x, group_size=group, scale_dtype=scale_dtype, dtype=stored)
    back = run(ops.dequantize, q, scale, group_size=group, dtype="float64")
    relative, near_zero = FLOAT8[stored]
    step = scale.double().repeat_interleave(16 if group is None else group, 1)
    allowed = torch.maximum(relative * x.double().abs(), near_zero * step) * (1 + 1e-6)
    assert q.dtype == getattr(torch, stored)
    assert ((back - x.double()).abs() <= allowed).all()
    assert (back[0] == 0).all()


@pytest.mark.parametrize("stored", sorted(FLOAT8))
def test_what_is_no_number_stays_none_in_8_bits(stored: str) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = float("nan")
    back = run(ops.dequantize, *run(ops.quantize, x, dtype=stored))
    assert back[0].isnan().any()
    assert torch.equal(back[1], x[1])


def test_packing_puts_the_first_of_two_in_the_low_half() -> None:
    assert run(ops.pack_int4, torch.tensor([[1, 2, -1, -8]], dtype=torch.int8)).tolist() == [[0x21, 0x8F]]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpacking_undoes_packing(signed: bool, axis: int) -> None:
    low, high, dtype = (-8, 8, torch.int8) if signed else (0, 16, torch.uint8)
    x = torch.randint(low, high, (4, 6, 2), dtype=dtype)
    assert torch.equal(run(ops.unpack_int4, run(ops.pack_int4, x, axis=axis), axis=axis, signed=signed), x)


def test_a_dilation_of_one_element_says_nothing() -> None:
    x, weight = torch.randn(4, 3, 1, 2).bfloat16(), torch.randn(2, 2, 1, 1).bfloat16()
    layout = {"stride": 2, "padding": 1, "data_layout": "NHWC"}
    assert torch.equal(
        run(ops.conv2d, x, weight, dilation=2, **layout), run(ops.conv2d, x, weight, dilation=1, **layout)
    )


def test_a_transposed_convolution_of_bfloat16_takes_wide_strides() -> None:
    x, weight = torch.randn(2, 3, 5).bfloat16(), torch.randn(3, 2, 2).bfloat16()
    y = run(ops.conv1d_transpose, x, weight, stride=64)
    expected = F.conv_transpose1d(x.float(), weight.float(), stride=64)
    assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution_of_a_half_type_takes_more_padding_than_its_kernel_covers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, 3, 1).to(dtype), torch.randn(6, 1, 1).to(dtype)
    y = run(ops.conv1d, x, weight, stride=3, padding=2, dilation=3, groups=3)
    expected = F.conv1d(x.float(), weight.float(), stride=3, padding=2, groups=3)
    assert torch.equal(y, expected.to(dtype))
