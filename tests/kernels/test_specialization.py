# SPDX-License-Identifier: Apache-2.0
"""What kernels are specialised by when they are compiled ahead: as Triton's own launches do it, and no hint that a config counts on is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nnfront_kernels
import pytest
import torch
import triton
from nnfront_kernels.ahead import specialize
from nnfront_kernels.attention_decode import DecodeShape
from nnfront_kernels.attention_prefill import PrefillShape
from nnfront_kernels.common import ARCHS, WARP, Config, Plan
from nnfront_kernels.copy_rows import CopyShape
from nnfront_kernels.gated_activation import GatedShape
from nnfront_kernels.grouped_matmul import GroupedShape
from nnfront_kernels.inspect import plan_for
from nnfront_kernels.matmul import matmul_kernel
from nnfront_kernels.moe_combine import CombineShape
from nnfront_kernels.moe_routing import RoutingShape
from nnfront_kernels.quantize_fp8 import QuantizeShape
from nnfront_kernels.rms_norm import NormShape
from nnfront_kernels.rope import RopeShape
from nnfront_kernels.rope_angles import AnglesShape
from nnfront_kernels.rope_append import AppendShape
from nnfront_kernels.sampling import SampleShape
from nnfront_kernels.softmax import SoftmaxShape
from nnfront_kernels.tiles import MatmulShape
from triton.backends.compiler import GPUTarget


def specialized_by_us_and_by_triton(name: str, shape: Any, arch: str) -> tuple[object, object]:
    """The signature and the hints that `inspect` derives for a plan, and those of Triton's own launch path."""
    kernel = next(kernel for kernel in nnfront_kernels.KERNELS if kernel.name == name)
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
    plan = plan_for(kernel, shape, dtype, arch)
    seen: dict[str, object] = {}

    def note(**facts: object) -> bool:
        seen.update(facts["compile"])
        return True  # do not compile

    limits = ARCHS[arch]
    target = GPUTarget("cuda", limits.target, WARP)
    # This process compiles for named targets only, so the stand-in may stay.
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=int
        )
    )
    triton.knobs.runtime.jit_cache_hook = note
    try:
        plan.kernel.warmup(**plan.arguments, **plan.constants, grid=(1,), enable_fp_fusion=True)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    signature, constants, hints = specialize(plan)
    names = [parameter.name for parameter in plan.kernel.params]
    theirs = {names[at[0]]: value for at, value in seen["constants"].items()}
    hints_seen = {at: value for at, value in seen["configs"][0].items() if value}
    return (signature, constants, hints), (seen["signature"], theirs, hints_seen)


SPECIALIZED = [
    ("matmul", MatmulShape(4096, 4096, 4096)),
    ("matmul", MatmulShape(1, 17, 33)),
    ("matmul", MatmulShape(16, 1, 1)),
    ("matmul_tma", MatmulShape(4096, 4096, 4096)),
    ("matmul_tma", MatmulShape(1, 24, 40)),
    ("matmul_small_m", MatmulShape(1, 4096, 4096)),
    ("matmul_small_m", MatmulShape(17, 33, 31)),
    ("matmul_int4", MatmulShape(1, 4096, 4096, group=128, zero_points=True)),
    ("matmul_int8", MatmulShape(3, 4097, 48)),
    ("matmul_fp8", MatmulShape(3, 4097, 48)),
    ("quantize_fp8", QuantizeShape(3, 129)),
    ("grouped_matmul", GroupedShape(9, 2, 5, 64, 33)),
    ("moe_routing", RoutingShape(9, 2, 5)),
    ("moe_combine", CombineShape(9, 2, 33)),
    ("rms_norm", NormShape(3, 17)),
    ("rms_norm", NormShape(1, 64, residual=True)),
    ("layer_norm", NormShape(1, 64, residual=True)),
    ("softmax", SoftmaxShape(3, 17)),
    ("sampling", SampleShape(3, 1000, penalty=True)),
    ("sampling", SampleShape(1, 1, filtered=False)),
    ("gated_activation", GatedShape(3, 17)),
    ("attention_decode", DecodeShape(1, 3, 1, 80, 33)),
    ("attention_decode", DecodeShape(2, 8, 2, 64, 4096, page=16, window=100)),
    ("attention_decode", DecodeShape(2, 8, 2, 80, 4096, page=16, fp8=True)),
    ("attention_prefill", PrefillShape(1, 33, 3, 1, 80)),
    ("attention_prefill", PrefillShape(2, 5, 8, 2, 64, before=7, page=16, window=100)),
    ("copy_rows", CopyShape(3, 80)),
    ("copy_rows", CopyShape(1, 1, writes=True)),
    ("rope", RopeShape(1, 1, 3, 1, 80, 40)),
    ("rope_angles", AnglesShape(3, 2, 40)),
    ("rope_append", AppendShape(1, 1, 3, 1, 80, 0, value_size=40)),
    ("rope_append", AppendShape(3, 2, 8, 2, 64, 16, interleaved=True, page=16)),
]


@pytest.mark.parametrize(("name", "shape"), SPECIALIZED, ids=str)
def test_ahead_of_time_specialization_is_tritons_own(compiled, name, shape):
    ours, theirs = compiled(specialized_by_us_and_by_triton, name, shape, "sm_90")
    assert ours == theirs


def test_a_config_that_counts_on_a_lost_hint_is_refused():
    w = torch.empty(64, 33, dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match="counts on divisibility by 16, lost by"):
        Plan(
            matmul_kernel,
            (1,),
            {"w_ptr": w, "stride_wn": w.stride(0)},
            {},
            Config(128, 256, 64, 8, 4),
            w,
            divisible=("w_ptr", "stride_wn"),
        )
