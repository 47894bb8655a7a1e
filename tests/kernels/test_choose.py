# SPDX-License-Identifier: Apache-2.0
"""`choose` is arithmetic: inside the limits, the same for every M of a bucket, and sensible at the extremes."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import nnfront_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_kernels import attention, matmul_fp8, matmul_int4, matmul_int8
from nnfront_kernels.ahead import specialize
from nnfront_kernels.common import ARCHS, Config, num_sms
from nnfront_kernels.grouped_matmul import GroupedShape
from nnfront_kernels.spilled import SPILLED, without_spills
from nnfront_kernels.tiles import MatmulShape, bucket, cdiv, fits, model_seconds, resident, shared_bytes

CASES = [(kernel, arch) for kernel in nnfront_kernels.KERNELS for arch in kernel.configs]


def str_of(value: object) -> str:
    return getattr(value, "name", str(value))


OWN = [(kernel, arch) for kernel, arch in CASES if ARCHS[arch].family == arch]
SIZES = st.integers(min_value=1, max_value=1 << 17).map(lambda n: 128 * n if n < 1024 else n // 128 * 128)


def with_rows(kernel, m: int, n: int, k: int):
    """The kernel's typical shape with other sizes, as far as it has them."""
    sizes = {"m": m, "tokens": m, "n": n, "k": k, "group": kernel.groups[0]}
    names = {field.name for field in fields(kernel.typical)}
    return replace(kernel.typical, **{name: size for name, size in sizes.items() if name in names})


@pytest.mark.parametrize(("kernel", "arch"), OWN, ids=str_of)
@settings(max_examples=10)
@given(m=st.integers(min_value=1, max_value=9000), n=SIZES, k=SIZES)
def test_config_is_within_the_limits_and_the_same_for_the_whole_bucket(kernel, arch, m, n, k):
    shape = with_rows(kernel, m, n, k)
    dtype = kernel.dtypes[-1]
    if kernel.accepts(shape, dtype, arch) is None:
        config = kernel.choose(shape, dtype, arch)
        assert kernel.shared_bytes(config) <= ARCHS[arch].shared_bytes
        assert kernel.choose(with_rows(kernel, bucket(m), n, k), dtype, arch) == config


@pytest.mark.parametrize(("kernel", "arch"), CASES, ids=str_of)
def test_every_config_of_the_table_is_within_the_limits(kernel, arch):
    over = [c for c in kernel.configs[arch] if kernel.shared_bytes(c) > ARCHS[arch].shared_bytes]
    assert over == []


@pytest.mark.parametrize(("kernel", "arch"), [case for case in CASES if case not in OWN], ids=str_of)
def test_a_gpu_without_configs_of_its_own_has_those_of_its_family_as_far_as_they_fit(kernel, arch):
    """No other tiles, no more stages, at least two where there were two, and no fewer than fit."""
    family, most = kernel.configs[ARCHS[arch].family], ARCHS[arch].shared_bytes
    assert kernel.configs[arch]
    like = {replace(config, num_stages=0): config for config in family}
    for config in kernel.configs[arch]:
        whole = like.pop(replace(config, num_stages=0))
        assert min(whole.num_stages, 2) <= config.num_stages <= whole.num_stages
        more = replace(config, num_stages=config.num_stages + 1)
        assert config == whole or kernel.shared_bytes(more) > most
    for left_out in like.values():
        assert kernel.shared_bytes(replace(left_out, num_stages=2)) > most


def test_sizes_of_heads_and_formats_that_a_family_takes_are_taken_by_its_members():
    """For every size of a head and every group `choose` finds a config."""
    for kernel, arch in CASES:
        for group in kernel.groups:
            shape = with_rows(kernel, 64, 4096, 4096)
            shape = replace(shape, group=group) if hasattr(shape, "group") else shape
            assert kernel.accepts(shape, kernel.dtypes[0], arch) is None
            assert (
                kernel.shared_bytes(kernel.choose(shape, kernel.dtypes[0], arch)) <= ARCHS[arch].shared_bytes
            )
        for size in attention.SIZES if kernel.name in ("attention_decode", "attention_prefill") else ():
            config = kernel.choose(replace(kernel.typical, size=size), kernel.dtypes[0], arch)
            assert config.block_k >= size


def test_a_persistent_grid_has_a_block_for_each_sm_of_the_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=114)
    )
    here = SimpleNamespace(is_cuda=True, device=None)
    assert num_sms(here, "sm_90") == 114
    assert num_sms(torch.empty(1), "sm_90") == 132


@pytest.mark.parametrize(
    ("m", "want"), [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (8191, 8192), (99999, 8192)]
)
def test_bucket_is_the_next_power_of_two_up_to_8192(m, want):
    assert bucket(m) == want


@pytest.mark.parametrize(
    ("version", "spill"),
    [(version, spill) for version, spills in SPILLED.items() for spill in spills],
    ids=str,
)
def test_a_tile_that_spills_is_left_out_where_it_does_and_nowhere_else(version, spill):
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == spill.kernel)
    configs = kernel.configs[spill.arch]
    facts = {"group": spill.group or 0, "zero_points": bool(spill.zero_points)}
    kept = without_spills(spill.kernel, configs, spill.arch, **facts, version=version)
    assert [c.block_m for c in configs if c not in kept] == [spill.block_m]
    assert kept  # another one takes over
    assert without_spills(spill.kernel, configs, spill.arch, **facts, version="0.0") == configs
    assert without_spills("another", configs, spill.arch, **facts, version=version) == configs
    other = {**facts, "group": 96}
    left = without_spills(spill.kernel, configs, spill.arch, **other, version=version)
    assert (left == configs) is (spill.group is not None)


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


# Rows, N and K of Llama-3.1-8B: fused projection, attention output, gate and up, down.
LAYERS = [(n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))]
SPLITTING = [("matmul_small_m", 0, 16), ("matmul_int4", 128, 4), ("matmul_int8", 0, 8)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("name", "group", "bits"), SPLITTING)
@pytest.mark.parametrize("m", [1, 16, 32, 64])
def test_no_sm_has_much_more_to_read_than_another(name, group, bits, m, arch):
    """Steps of the SM with the most blocks against an equal share: with more rows partial sums cost more than what is left over."""
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
    for n, k in LAYERS:
        config = kernel.choose(MatmulShape(m, n, k, group=group), kernel.dtypes[0], arch)
        tiles, steps = cdiv(n, config.block_n) * cdiv(m, config.block_m), cdiv(k, config.block_k)
        most = cdiv(tiles * config.split_k, ARCHS[arch].num_sms) * cdiv(steps, config.split_k)
        assert most <= (1.4 if arch == "sm_90" else 2) * tiles * steps / ARCHS[arch].num_sms + 2


def test_the_fewest_tiles_are_shared_so_that_all_are_on_the_gpu_at_once():
    for (name, group, _), m in itertools.product(SPLITTING, (1, 16, 32, 64)):
        kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
        config = kernel.choose(MatmulShape(m, 4096, 4096, group=group), kernel.dtypes[0], "sm_90")
        blocks = cdiv(4096, config.block_n) * config.split_k
        assert 0.9 * 132 <= blocks <= 132 * resident(config, ARCHS["sm_90"], kernel.shared_bytes(config))


def test_as_many_blocks_share_a_tile_as_are_on_the_gpu_at_once():
    choose = nnfront_kernels.matmul_small_m.choose
    # 64 tiles, and 2 blocks on each of 132 SMs: four, and not eight, which would be 1.9 waves.
    assert choose(MatmulShape(64, 4096, 4096), "bfloat16", "sm_90").split_k == 4
    assert choose(MatmulShape(16, 152064, 4096), "bfloat16", "sm_90").split_k == 1


@pytest.mark.parametrize(
    ("config", "shared", "count"),
    [
        (Config(1, 8, 1024, 4, 2, registers=96), 128, 5),  # 65536 / (96 * 128)
        (Config(1, 8, 1024, 4, 2, registers=97), 128, 4),  # a warp has its registers in pieces of 256: 104
        (Config(16, 64, 128, 4, 4, registers=64), 61_440, 3),  # 233472 / (61440 + 1024)
        (Config(128, 128, 64, 8, 4), 196_608, 1),
        (Config(16, 16, 16, 32, 1, registers=16), 0, 2),  # 2048 threads
    ],
)
def test_registers_shared_memory_and_threads_limit_the_blocks_of_an_sm(config, shared, count):
    assert resident(config, ARCHS["sm_90"], shared) == count


def test_a_single_row_of_4096_columns_or_more_is_shared_by_no_blocks():
    for columns in (4096, 28672):
        shape = MatmulShape(1, columns, 4096)
        assert nnfront_kernels.matmul_small_m.choose(shape, "bfloat16", "sm_90").split_k == 1


def test_unaligned_rows_get_the_fallback():
    choose = nnfront_kernels.matmul.choose
    assert (
        choose(MatmulShape(64, 64, 33, aligned=False), "float16", "sm_90") == nnfront_kernels.matmul.UNALIGNED
    )


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("name", "group"), [("matmul_int4", 128), ("matmul_int8", 0), ("matmul_fp8", 0)])
def test_many_rows_of_quantised_weights_get_tiles_of_128_by_128(name, group, arch):
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
    config = kernel.choose(MatmulShape(4096, 8192, 4096, group=group), kernel.dtypes[0], arch)
    assert (config.block_m, config.block_n, config.num_warps, config.split_k) == (128, 128, 8, 1)


@pytest.mark.parametrize(("rows", "columns"), [(64, 132), (128, 132), (129, 66), (512, 33), (4096, 17)])
@pytest.mark.parametrize("kernel", [matmul_int4, matmul_int8, matmul_fp8], ids=lambda kernel: kernel.__name__)
def test_blocks_that_run_together_read_few_tiles_of_a_weight(kernel, rows, columns):
    """Else each tile of rows reads the whole weight from memory. `walk.py` goes down a group of rows, then to the next column."""
    shape = MatmulShape(rows, 1 << 17, 4096, group=max(kernel.KERNEL.groups))
    tensors, options = kernel.example(shape, kernel.DTYPES[-1])
    plan = kernel.plan(*tensors, **options, arch="sm_90")
    num_m, group = plan.grid[1], plan.constants["GROUP_M"]
    assert len({index // min(group, num_m) for index in range(ARCHS["sm_90"].num_sms)}) == columns


@pytest.mark.parametrize(
    ("tokens", "block_m"), [(1, 16), (64, 16), (256, 16), (512, 32), (1024, 64), (2048, 128), (65536, 128)]
)
def test_experts_get_tiles_as_tall_as_their_share_of_the_tokens(tokens, block_m):
    config = nnfront_kernels.grouped_matmul.choose(
        GroupedShape(tokens, 8, 128, 1536, 2048), "bfloat16", "sm_90"
    )
    assert config.block_m == block_m


def test_both_matmuls_of_an_expert_use_the_tile_of_the_routing():
    choose = nnfront_kernels.grouped_matmul.choose
    for rows in (16, 32, 64, 128):
        shape = GroupedShape(300, 8, 128, 2048, 768, gather=False, block_m=rows)
        assert choose(shape, "bfloat16", "sm_90").block_m == rows


@pytest.mark.parametrize("kernel", nnfront_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_no_kernel_is_compiled_anew_for_another_number_of_rows(kernel):
    """M, or what follows from it, must not change the signature, the constants or the hints that Triton compiles for."""

    config = kernel.configs["sm_90"][-1]

    def compiled_for(rows: int):
        shape = kernel.shape_for(with_rows(kernel, rows, 4096, 4096), config)
        tensors, options = kernel.example(shape, kernel.dtypes[-1])
        return specialize(kernel.plan(*tensors, **options, arch="sm_90", config=config))

    assert compiled_for(1) == compiled_for(48) == compiled_for(49)
