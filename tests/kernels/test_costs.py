# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu says that a launch costs: what a sum on paper gives, for each kind of kernel."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from nnfront_kernels import KERNELS
from nnfront_kernels.attention_decode import DecodeShape
from nnfront_kernels.attention_latent import LatentShape
from nnfront_kernels.attention_prefill import PrefillShape
from nnfront_kernels.causal_conv1d import ConvShape
from nnfront_kernels.copy_rows import CopyShape
from nnfront_kernels.gated_activation import GatedShape
from nnfront_kernels.gated_delta_rule import DeltaShape
from nnfront_kernels.rms_norm import NormShape
from nnfront_kernels.rope import RopeShape
from nnfront_kernels.rope_append import AppendShape
from nnfront_kernels.sampling import SampleShape
from nnfront_kernels.softmax import SoftmaxShape
from nnfront_kernels.ssm_scan import ScanShape
from nnfront_kernels.tiles import MatmulShape
from nnfront_kernels.unpack_weight import UnpackShape

RECORDS = {kernel.name: kernel for kernel in KERNELS}


@pytest.fixture
def found(monkeypatch):
    """What a launch on operands of a shape costs: (operations, bytes)."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench" / "gpu")
    count = importlib.import_module("cost").cost

    def found(name: str, shape: Any, dtype: str, **more: Any) -> tuple[int, int]:
        kernel = RECORDS[name]
        arguments, options = kernel.example(shape, dtype)
        options |= more
        cost = count(kernel, shape, arguments, options, [kernel.plan(*arguments, **options, arch="sm_90")])
        return cost.flops, cost.bytes

    return found


QUANTISED = MatmulShape(2, 32, 128, group=64)
CASES = [
    # half a byte for each weight, two or three for each of 64 groups; x and y of two bytes an element
    ("matmul_int4", QUANTISED, "float16", 2 * 2 * 32 * 128, 2048 + 2 * 64 + 2 * (2 * 128 + 2 * 32)),
    ("matmul_int8", QUANTISED, "float16", 2 * 2 * 32 * 128, 4096 + 2 * 64 + 2 * (2 * 128 + 2 * 32)),
    ("unpack_weight", UnpackShape(1024, 512, 128, zero_points=True), "bfloat16", 2 * 1024 * 512, 1024 * 512 * 2 + 1024 * 256 + 1024 * 4 * 3),
    ("softmax", SoftmaxShape(3, 10), "float32", 150, 4 * 2 * 30),
    ("gated_activation", GatedShape(3, 10), "float16", 180, 2 * 3 * 30),
    ("rms_norm", NormShape(3, 10), "float32", 120, 4 * (2 * 30 + 10)),
    ("rms_norm", NormShape(3, 10, residual=True), "float16", 150, 2 * (4 * 30 + 10)),
    ("layer_norm", NormShape(3, 10), "float32", 210, 4 * (2 * 30 + 20)),
    ("layer_norm", NormShape(3, 10, residual=True), "float16", 240, 2 * (4 * 30 + 20)),
    # logits, and marks of a byte; seed, step and token
    ("sampling", SampleShape(3, 100), "bfloat16", 3000, 600 + 72),
    ("sampling", SampleShape(3, 100, penalty=True), "float32", 3000, 1500 + 72),
    # 4 heads of 64 in and out, 32 cosines and sines
    ("rope", RopeShape(1, 1, 3, 1, 64, 32), "float16", 6 * 4 * 32, 2 * 2 * 4 * 64 + 8 * 32),
    # 4 heads of 64 and one of 32 in and out, 32 cosines and sines, a length
    ("rope_append", AppendShape(1, 1, 3, 1, 64, 32, value_size=32), "float16", 6 * 4 * 32, 2 * 2 * (4 * 64 + 32) + 8 * 32 + 4),
    # without a rotation only a key and a value
    ("rope_append", AppendShape(1, 1, 3, 1, 64, 0), "float16", 0, 2 * 2 * 2 * 64 + 4),
    # two products of 64 for 4 heads and 10 keys; 2 heads of keys and values, q and y
    ("attention_decode", DecodeShape(1, 4, 2, 64, 100, window=10), "float16", 2 * 4 * 10 * 128, 2 * (2 * 10 * 128 + 4 * 128) + 4),
    # 10 latents of 80 for 4 heads, products of 80 and 64; q of 80 and y of 64
    ("attention_latent", LatentShape(1, 4, 64, 16, 100, window=10), "float16", 2 * 4 * 10 * 144, 2 * (10 * 80 + 4 * 144) + 4),
    # 1 + 2 + 2 pairs of 2 heads, two products of 64; where the sequence begins and ends
    ("attention_prefill", PrefillShape(1, 3, 2, 1, 64, window=2), "float16", 2 * 2 * 5 * 128, 2 * (3 * 2 + 3) * 128 + 8),
    # 2 heads of 16 with 8 states: x and y, b and c, dt; the state twice; a and d
    ("ssm_scan", ScanShape(1, 1, 2, 1, 16, 8), "float16", 6 * 256, 2 * (64 + 16) + 8 + 8 * 256 + 16),
    # 1 group of 8, 2 heads of 16: v and y, q and k, g and beta; the state twice
    ("gated_delta_rule", DeltaShape(1, 1, 1, 2, 8, 16), "float16", 7 * 256, 2 * (64 + 16) + 16 + 8 * 256),
    # three rows in and out, and their numbers
    ("copy_rows", CopyShape(3, 8, writes=True), "float16", 0, 2 * 2 * 3 * 8 + 8 * 3),
    ("causal_conv1d", ConvShape(1, 2, 8), "float16", 2 * 16 * 4, 2 * (32 + 2 * 24 + 40)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "dtype", "flops", "nbytes"), CASES)
def test_a_launch_costs_its_operations_and_each_tensor_once(found, name, shape, dtype, flops, nbytes):
    assert found(name, shape, dtype) == (flops, nbytes)


def test_a_residual_is_moved_too(found):
    residual = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    # two per multiply and add; x, w, residual and y of two bytes each
    cost = found("matmul", MatmulShape(3, 10, 7, gated=True), "bfloat16", residual=residual)
    assert cost == (2 * 3 * 10 * 7, 2 * (3 * 7 + 10 * 7 + 2 * 3 * 5))


def test_prompts_behind_others_see_what_was_there(found):
    assert (
        found("attention_prefill", PrefillShape(1, 2, 1, 1, 64, before=5), "float16")[0] == 2 * (6 + 7) * 128
    )
