# SPDX-License-Identifier: Apache-2.0
"""What a kernel refuses, and in which words. Nothing here runs a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nnfront_kernels import KernelError, matmul, matmul_int4, matmul_int8, matmul_small_m, matmul_tma, split_k
from nnfront_kernels.epilogue import interleave
from nnfront_kernels.tiles import MatmulShape


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"w": tensor(5, 9)}, r"w must have shape \[any, 8\], got \[5, 9\]"),
    ({"w": tensor(5, 8, dtype=torch.bfloat16)}, "w must be torch.float16, got torch.bfloat16"),
    ({"x": tensor(8, 3).T}, r"x must have adjacent elements along its last axis, got strides \[1, 3\]\n  help: x.contiguous"),
    ({"bias": tensor(4)}, r"bias must be a dense \[5\], got \[4\]"),
    ({"residual": tensor(3, 4)}, r"residual must have shape \[3, 5\], got \[3, 4\]"),
    ({"activation": "relu6"}, "activation must be one of none, silu, gelu, gelu_tanh, relu, relu2, got 'relu6'"),
    ({"gated": True}, "a gated weight interleaves two matrices, got an odd number of rows: 5"),
    ({"out_dtype": torch.int8}, "out_dtype must be float16, bfloat16 or float32, got torch.int8"),
    ({"out": tensor(3, 6)}, r"out must have shape \[3, 5\], got \[3, 6\]"),
    ({"arch": "sm_70"}, "matmul: arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, got 'sm_70'"),
    ({"x": tensor(3, 8, dtype=torch.int8), "w": tensor(5, 8, dtype=torch.int8)}, "matmul: dtype must be one of .* got 'int8'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_matmul_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(3, 8), "w": tensor(5, 8), "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        matmul.plan(arguments.pop("x"), arguments.pop("w"), **arguments)


WRONG_FOR_TMA = [
    ({"x": tensor(3, 12), "w": tensor(5, 12)}, "every row of x must start at a multiple of 16 bytes, got address 0 mod 16 and rows 24 bytes apart"),
    ({"out": tensor(3, 9)[:, :5]}, "every row of out must start at .* rows 18 bytes apart"),
    ({"arch": "sm_80"}, "matmul_tma: arch must be one of sm_90, sm_100, sm_103, got 'sm_80'"),
    ({"x": tensor(3, 0), "w": tensor(5, 0)}, "matmul_tma: K must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_FOR_TMA, ids=[message[:30] for _, message in WRONG_FOR_TMA]
)
def test_matmul_tma_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(3, 8), "w": tensor(5, 8), "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        matmul_tma.plan(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_an_empty_batch_launches_nothing():
    y = matmul_tma.launch(tensor(0, 8), tensor(16, 8), arch="sm_90")
    assert y.shape == (0, 16)


@pytest.mark.parametrize(("residual", "stages"), [(None, 3), (torch.float16, 3), (torch.float32, 2)])
def test_a_wide_residual_costs_a_pipeline_stage(residual, stages):
    options = {"config": matmul_tma.CONFIGS["sm_90"][0], "arch": "sm_90"}
    if residual is not None:
        options |= {"residual": tensor(128, 256, dtype=residual), "out_dtype": residual}
    assert matmul_tma.plan(tensor(128, 64), tensor(256, 64), **options).config.num_stages == stages


def test_a_tensor_on_the_cpu_needs_an_arch():
    with pytest.raises(KernelError, match="kernels run on a GPU, got a tensor on 'cpu'\n  help: pass arch="):
        matmul.launch(torch.zeros(1, 8), torch.zeros(1, 8))


def test_quantised_weights_are_refused_by_the_dense_kernel():
    refusal = matmul.accepts(MatmulShape(1, 64, 64, group=32), "float16", "sm_90")
    assert refusal == "weights are dense, got quantisation groups of 32"


def test_interleaved_rows_alternate():
    gate, up = torch.arange(6.0).view(3, 2), -torch.arange(6.0).view(3, 2)
    mixed = interleave(gate, up)
    assert torch.equal(mixed[0::2], gate)
    assert torch.equal(mixed[1::2], up)


def test_the_small_kernel_refuses_many_rows():
    refusal = matmul_small_m.accepts(MatmulShape(65, 64, 64), "float16", "sm_90")
    assert refusal == "M must be at most 64, got 65"


def test_a_workspace_that_is_too_small_is_refused():
    config = replace(matmul_small_m.CONFIGS["sm_90"][1], split_k=2)
    small = split_k.Workspace(tensor(8, dtype=torch.float32), tensor(1, dtype=torch.int32))
    message = "workspace must hold 2048 partial sums and 1 counts, got 8 and 1"
    with pytest.raises(KernelError, match=message):
        matmul_small_m.plan(tensor(1, 64), tensor(16, 64), config=config, workspace=small, arch="sm_90")


def int4(k: int = 256, group: int = 64) -> dict[str, torch.Tensor]:
    return {
        "x": tensor(3, k),
        "w": tensor(16, k // 2, dtype=torch.uint8),
        "scales": tensor(k // group, 16),
    }


WRONG_FOR_INT4 = [
    ({"w": tensor(16, 256, dtype=torch.uint8)}, r"w must have shape \[16, 128\], got \[16, 256\]"),
    ({"w": tensor(16, 128, dtype=torch.int8)}, "w must be torch.uint8, got torch.int8"),
    ({"scales": tensor(3, 16)}, r"scales must have shape \[K / group, N\] for K = 256, got \[3, 16\]"),
    ({"scales": tensor(4, 15)}, r"scales must have shape \[4, 16\], got \[4, 15\]"),
    ({"zeros": tensor(4, 16)}, "zeros must be torch.uint8, got torch.float16"),
    ({"scales": tensor(1, 16)}, "matmul_int4: the group must be one of 32, 64, 128, got 256"),
    ({"x": tensor(3, 260)[:, :256]}, "matmul_int4: rows of x must start at multiples of 16 elements"),
    ({"x": tensor(3, 256, dtype=torch.float32)}, "matmul_int4: dtype must be one of float16, bfloat16, got 'float32'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_FOR_INT4, ids=[message[:30] for _, message in WRONG_FOR_INT4]
)
def test_matmul_int4_says_what_does_not_fit(changes, message):
    with pytest.raises(KernelError, match=message):
        matmul_int4.plan(**{**int4(), **changes}, arch="sm_90")


WRONG_FOR_INT8 = [
    ({"scales": tensor(16, 16)}, "matmul_int8: the group must be one of 32, 64, 128, or K for one scale per row, got 16"),
    ({"x": tensor(3, 264)[:, :256]}, "matmul_int8: rows of x and w must start at multiples of 16 elements"),
    ({"x": tensor(3, 24), "w": tensor(16, 24, dtype=torch.int8), "scales": tensor(1, 16)}, "matmul_int8: K must be a multiple of 16, got 24"),
    ({"w": tensor(16, 256, dtype=torch.uint8)}, "w must be torch.int8, got torch.uint8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_FOR_INT8, ids=[message[:30] for _, message in WRONG_FOR_INT8]
)
def test_matmul_int8_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(3, 256), "w": tensor(16, 256, dtype=torch.int8), "scales": tensor(4, 16)}
    with pytest.raises(KernelError, match=message):
        matmul_int8.plan(**{**arguments, **changes}, arch="sm_90")
