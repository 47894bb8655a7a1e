# SPDX-License-Identifier: Apache-2.0
"""A cache that stores codes of 8 bits: what it keeps of a token, and what it takes in memory."""

import pytest
import torch
from cache_model import exact_in_codes, new_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.errors import RunError
from nnfront.lower import kv_layer
from nnfront.state.quantize import decode, encode
from nnfront.state.ring import make_layer

FLOAT8 = "float8_e4m3fn"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(-12, 3),
)
def test_a_value_keeps_four_bits_and_a_small_one_a_step_of_the_largest(seed, dtype, exponent):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 3, 2, 16, generator=generator).mul_(2.0**exponent).to(dtype) for _ in range(2))
    parts = encode((k, v), True)
    for index, x in enumerate((k, v)):
        exact = x.double()
        # Half a step of 3 bits after the point, or of the smallest number 2^-9; then a rounding to the dtype.
        bound = torch.maximum(exact.abs() * 2**-4, exact.abs().amax(-1, keepdim=True) / 448 * 2**-10)
        error = (decode(parts, index, "float64") - exact).abs()
        assert (error <= bound * (1 + 1e-6)).all()


def test_rows_of_zeros_stay_zeros_and_the_largest_value_stays_itself():
    k = torch.zeros(1, 2, 1, 4)
    k[0, 1, 0] = torch.tensor([3e38, -3e38, 0.0, 1e30])
    parts = encode((k, k), True)
    kept = decode(parts, 0, "float32")
    assert not kept[0, 0].any()
    assert kept[0, 1, 0].tolist() == pytest.approx([3e38, -3e38, 0.0, 0.0], rel=1e-6)


@pytest.mark.parametrize("page_size", [None, 4])
def test_codes_take_a_byte_and_a_scale_for_each_head(page_size):
    plain, coded = (
        new_cache(3, 32, (None, None), 2, 128, "bfloat16", page_size=page_size, stored_as=stored_as)
        for stored_as in (None, FLOAT8)
    )
    assert plain.nbytes == 2 * 2 * 3 * 32 * 2 * 128 * 2
    assert coded.nbytes == plain.nbytes // 2 + 2 * 2 * 3 * 32 * 2 * 4


@pytest.mark.parametrize("page_size", [None, 4])
def test_kernels_find_codes_and_the_scale_of_each_token_and_head(page_size):
    cache = new_cache(2, 8, (None,), 2, 16, page_size=page_size, stored_as=FLOAT8)
    k, v = exact_in_codes(2, 5, 2, 16), exact_in_codes(2, 5, 2, 16)
    cache[0].append(k, v)
    stored = cache[0].reserve(1)
    for codes, scales, tokens in (
        (stored.keys, stored.scales[0], k),
        (stored.values, stored.scales[1], v),
    ):
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.shape[:3] == scales.shape
        wide = codes.float() * scales[..., None]
        for row in range(2):
            for position in range(5):
                page, slot = (
                    (row, position)
                    if page_size is None
                    else (int(stored.pages[row, position // 4]), position % 4)
                )
                assert torch.equal(wide[page, :, slot], tokens[row, position])


def test_another_way_to_store_is_refused():
    with pytest.raises(RunError, match="stored_as is 'int3', expected 'float8_e4m3fn' or nothing"):
        new_cache(1, 8, stored_as="int3")


def test_a_layer_of_a_device_has_its_positions_there():
    layer = make_layer(kv_layer(1, 2, "float32", 1, 4), device=torch.device("meta"))
    assert layer.positions(2).device.type == "meta"
