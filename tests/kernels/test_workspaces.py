# SPDX-License-Identifier: Apache-2.0
"""What the memory plan says of CUDA's kernels, against what they allocate and what their own functions ask for."""

from __future__ import annotations

import pytest
from nnfront_kernels import attention_decode, attention_parts, matmul_small_m, split_k
from nnfront_kernels.tiles import MatmulShape
from workspace_runs import compare, made_in_a_step, peaks

from nnfront.backends.cuda.backend import CUDA
from nnfront.backends.lowering import lower
from nnfront.backends.table import memory_policy
from nnfront.ir import parse
from nnfront.lower import Run, kv_layer
from nnfront.memory.layout import Layer, contiguous


def bytes_of(sizes: split_k.Sizes | None) -> int:
    return 0 if sizes is None else 4 * sum(sizes)


def held(text: str, kernel: str, arch: str, *operands) -> int:
    program = lower(parse(text), f"cuda:{arch}")
    run = next(i for i in program.methods["main"].body.walk() if isinstance(i, Run) and i.kernel == kernel)
    return memory_policy(f"cuda:{arch}").workspaces[kernel].held(run, *operands)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("rows", [1, 16, 65])
def test_a_product_of_few_rows_holds_the_parts_that_blocks_share(arch, rows):
    n, k = 512, 4096
    said = held(
        f"def main[b](x: input float16[b, {k}], w: weight float16[{n}, {k}]) -> float16[b, {n}] {{ y: float16[b, {n}] = linear(x, w) return y }}",
        "triton_product",
        arch,
        contiguous((rows, k), "float16"),
        contiguous((n, k), "float16"),
        None,
        None,
        None,
    )
    config = matmul_small_m.choose(MatmulShape(rows, n, k), "float16", arch)
    assert said == (bytes_of(split_k.needed(config, rows, n)) if rows <= 64 else 0)
    assert rows > 64 or config.split_k > 1


LAYER = "layer(kv_heads=2, head_size=64, dtype=float16, batch=b, max_seq=m)"
DECODE = f"""
def main[b, m](q: input float16[b, 1, 8, 64], k: input float16[b, 1, 2, 64], cache: state {LAYER}) -> (float16[b, 1, 8, 64], {LAYER}) {{
    y: (float16[b, 1, 8, 64], {LAYER}) = attention(q, k, k, cache)
    return y
}}
"""


@pytest.mark.parametrize("longest", [100, 8192])
def test_attention_to_a_cache_holds_the_parts_of_its_longest_sequence(longest):
    q, k = contiguous((2, 1, 8, 64), "float16"), contiguous((2, 1, 2, 64), "float16")
    layer = Layer(kv_layer(2, 64, "float16", 2, longest), 2, longest)
    said = held(DECODE, "triton_attention", "sm_90", q, k, k, None, None, layer, None)
    config = attention_decode.choose(attention_decode.DecodeShape(2, 8, 2, 64, longest), "float16", "sm_90")
    parts = bytes_of(attention_parts.needed(config, 2 * 2 * -(-4 // config.block_m), 64))
    lengths = 2 * 4  # with the new token
    assert said == parts + lengths
    assert (parts > 0) == (longest > 100)


def test_every_kernel_of_the_table_says_what_it_holds():
    names = {kernel.name for kernel in CUDA.kernels}
    assert names <= memory_policy("cuda:sm_90").workspaces.keys()


@pytest.mark.parametrize(("variant", "quant"), [("plain", "int4"), ("experts", None)])
def test_kernels_allocate_what_the_table_says(interpreted, variant, quant):
    found = interpreted(compare, variant, quant, 3)
    assert len(found) >= 3
    for kernel, pairs in found.items():
        for said, taken in pairs:
            # Lengths are remembered for the next layers; 64 bytes is what torch's allocator rounds to.
            assert abs(said - taken) <= 8 * 64, (kernel, pairs)
    assert any(said > 1000 for pairs in found.values() for said, _ in pairs)


# Bytes that torch's attention takes for itself on a CPU, which no plan for a GPU counts.
OF_ATTENTION = 1024


@pytest.mark.parametrize(("variant", "quant"), [("plain", "int4"), ("experts", None)])
def test_a_call_takes_what_its_plan_says_and_a_recording_that_gave_nothing_back_would_take_twice_that(
    interpreted, variant, quant
):
    for planned, taken, kept in interpreted(peaks, variant, quant).values():
        assert planned <= taken <= 1.12 * planned + OF_ATTENTION
        assert kept > 2 * planned


def test_a_decode_step_fills_no_workspace(interpreted):
    alone, shared = (interpreted(made_in_a_step, "int4", is_shared) for is_shared in (False, True))
    fills = alone.count("aten.zeros.default")
    assert fills >= 3
    assert "aten.zeros.default" not in shared
    assert alone.count("aten.empty.memory_format") - shared.count("aten.empty.memory_format") == fills
