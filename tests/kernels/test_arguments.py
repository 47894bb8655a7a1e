# SPDX-License-Identifier: Apache-2.0
"""What a kernel refuses, and in which words. Nothing here runs a kernel."""

from __future__ import annotations

import pytest
import torch
from nnfront_kernels import KernelError, matmul, matmul_tma
from nnfront_kernels.common import Cost
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
    ({"activation": "relu6"}, "activation must be one of none, silu, gelu, gelu_tanh, got 'relu6'"),
    ({"gated": True}, "a gated weight interleaves two matrices, got an odd number of rows: 5"),
    ({"out_dtype": torch.int8}, "out_dtype must be float16, bfloat16 or float32, got torch.int8"),
    ({"out": tensor(3, 6)}, r"out must have shape \[3, 5\], got \[3, 6\]"),
    ({"arch": "sm_70"}, "matmul: arch must be one of sm_80, sm_90, sm_100, gfx942, got 'sm_70'"),
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
    ({"arch": "gfx942"}, "matmul_tma: arch must be one of sm_90, sm_100, got 'gfx942'"),
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


def test_cost_counts_each_tensor_once():
    cost = matmul.cost(MatmulShape(3, 10, 7, gated=True), "bfloat16", residual=True)
    # two per multiply and add; x, w, residual and y of two bytes each
    assert cost == Cost(flops=2 * 3 * 10 * 7, bytes=2 * (3 * 7 + 10 * 7 + 2 * 3 * 5))
