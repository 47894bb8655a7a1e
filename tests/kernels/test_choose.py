# SPDX-License-Identifier: Apache-2.0
"""`choose` is arithmetic: inside the limits, the same for every M of a bucket, and sensible at the extremes."""

from __future__ import annotations

from dataclasses import replace

import nnfront_kernels
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_kernels.common import ARCHS, Config
from nnfront_kernels.tiles import MatmulShape, bucket, fits, model_seconds, shared_bytes

CASES = [(kernel, arch) for kernel in nnfront_kernels.KERNELS for arch in kernel.configs]
IDS = [f"{kernel.name}-{arch}" for kernel, arch in CASES]
SIZES = st.integers(min_value=1, max_value=1 << 17).map(lambda n: 128 * n if n < 1024 else n // 128 * 128)


@pytest.mark.parametrize(("kernel", "arch"), CASES, ids=IDS)
@settings(max_examples=30, deadline=None)
@given(m=st.integers(min_value=1, max_value=9000), n=SIZES, k=SIZES)
def test_config_is_within_the_limits_and_the_same_for_the_whole_bucket(kernel, arch, m, n, k):
    shape = MatmulShape(m, n, k, group=kernel.groups[0])
    if kernel.accepts(shape, "bfloat16", arch) is None:
        config = kernel.choose(shape, "bfloat16", arch)
        assert kernel.shared_bytes(config) <= ARCHS[arch].shared_bytes
        assert kernel.choose(replace(shape, m=bucket(m)), "bfloat16", arch) == config


@pytest.mark.parametrize(("kernel", "arch"), CASES, ids=IDS)
def test_every_config_of_the_table_is_within_the_limits(kernel, arch):
    over = [c for c in kernel.configs[arch] if kernel.shared_bytes(c) > ARCHS[arch].shared_bytes]
    assert over == []


@pytest.mark.parametrize(
    ("m", "want"), [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (8191, 8192), (99999, 8192)]
)
def test_bucket_is_the_next_power_of_two_up_to_8192(m, want):
    assert bucket(m) == want


def test_shared_memory_counts_every_stage_of_both_operands():
    # 4 stages x 64 x (128 + 256) elements of 2 bytes
    assert shared_bytes(Config(128, 256, 64, 8, 4), 16, 16) == 4 * 64 * (128 + 256) * 2


def test_a_tile_too_large_for_the_gpu_does_not_fit():
    tile = Config(128, 256, 64, 8, 4)
    assert fits(tile, ARCHS["sm_90"], 16, 16)
    assert not fits(tile, ARCHS["sm_80"], 16, 16)
    assert not fits(Config(256, 256, 32, 8, 2), ARCHS["sm_90"], 16, 16)  # 256 accumulators a thread


def test_a_last_wave_of_one_block_costs_a_whole_wave():
    tile, gpu = Config(128, 128, 64, 8, 4), ARCHS["sm_90"]
    full = MatmulShape(128 * 4, 128 * 66, 8192)  # 264 tiles: two on each of 132 SMs
    over = replace(full, n=128 * 67)
    # 1.5 % more tiles
    assert model_seconds(tile, over, gpu, 16, 16) > 1.4 * model_seconds(tile, full, gpu, 16, 16)


def test_large_products_get_large_tiles_and_small_ones_get_many():
    choose = nnfront_kernels.matmul.choose
    large = choose(MatmulShape(8192, 8192, 8192), "bfloat16", "sm_90")
    small = choose(MatmulShape(64, 1024, 4096), "bfloat16", "sm_90")
    assert large.block_m * large.block_n == 128 * 256
    assert small.block_m * small.block_n <= 64 * 64


@pytest.mark.parametrize(("m", "block_m"), [(1, 1), (2, 16), (16, 16), (17, 32), (64, 64)])
def test_few_rows_get_the_smallest_tile_that_holds_them(m, block_m):
    config = nnfront_kernels.matmul_small_m.choose(MatmulShape(m, 4096, 4096), "bfloat16", "sm_90")
    assert config.block_m == block_m


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_k_is_split_until_every_sm_has_work(arch):
    config = nnfront_kernels.matmul_small_m.choose(MatmulShape(16, 4096, 14336), "bfloat16", arch)
    blocks = 4096 // config.block_n * config.split_k
    assert 2 * ARCHS[arch].num_sms <= blocks < 4 * ARCHS[arch].num_sms
    large = nnfront_kernels.matmul_small_m.choose(MatmulShape(16, 152064, 4096), "bfloat16", arch)
    assert large.split_k == 1


def test_unaligned_rows_get_the_fallback():
    choose = nnfront_kernels.matmul.choose
    assert (
        choose(MatmulShape(64, 64, 33, aligned=False), "float16", "sm_90") == nnfront_kernels.matmul.UNALIGNED
    )
