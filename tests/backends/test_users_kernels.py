# SPDX-License-Identifier: Apache-2.0
"""What is said of kernels that users register is what is said of ours: the memory that they hold besides results is planned, on each back end. And what no kernel takes is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.registry import backend_of
from nnfront.backends.table import memory_policy
from nnfront.lower import Run
from nnfront.memory.plan import plan_memory

MODULE = "def main[n](x: input float32[n, 64]) -> float32[n, 64] { y: float32[n, 64] = relu(x) return y }"


def with_copies(run: Run) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that holds x twice in float64 before its result is there."""

    def relu(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        both = wide.clamp(min=0)
        return both.to(x.dtype)

    return relu


@pytest.fixture(params=["cpu", "cuda:sm_90"])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param.partition(":")[0]
    nn.register_kernel("relu", "test_relu_with_copies", with_copies, target=name)
    yield request.param
    nn.unregister_kernel("test_relu_with_copies", target=name)


def test_what_a_users_kernel_allocates_besides_its_result_is_in_the_plan(target: str) -> None:
    program = nn.compile(nn.ir.parse(MODULE), target).program
    plan = plan_memory(program.methods["main"], {"n": 10}, memory_policy(target))
    (held,) = (buffer for buffer in plan.buffers if buffer.kind == "workspace")
    assert (held.name, held.bytes) == ("in test_relu_with_copies", 2 * 10 * 64 * 8)


def test_a_weight_in_a_format_that_no_kernel_takes_is_said_to_be_dequantised_and_both_sides_are_named() -> (
    None
):
    linear = nn.Linear(64, 32, bias=False, dtype="bfloat16")
    ir = linear.export({"forward": {"x": nn.spec.Tensor(["n", 64], "bfloat16")}})
    ir = nn.passes.quantize_weights(ir, nn.passes.QuantScheme("int8:16"))
    exe = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), "cuda:sm_90")
    text = exe.explain("forward", n=4)
    assert "  dequantize  " in text
    assert "not triton_fp8: the format is int8 in groups of 16, it takes fp8" in text


def test_a_plan_for_a_gpu_counts_nothing_of_what_kernels_in_c_hold() -> None:
    """Of one token C rotates in registers; torch's calls take what is rotated in float32."""
    text = """
    def main(x: input bfloat16[1, 1, 4, 64], cos: input float32[1, 1, 32], sin: input float32[1, 1, 32]) -> bfloat16[1, 1, 4, 64] {
        y: bfloat16[1, 1, 4, 64] = rope(x, cos, sin)
        return y
    }
    """
    held = {}
    for target in ("cpu", "cuda:sm_90"):
        method = nn.compile(nn.ir.parse(text), target).program.methods["main"]
        buffers = plan_memory(method, {}, memory_policy(target)).buffers
        held[target] = sum(b.bytes for b in buffers if b.name == "in rope_rotated")
    assert held["cuda:sm_90"] == 2 * 4 * 64 * 4
    assert held["cpu"] == (held["cuda:sm_90"] if NATIVE is None else 0)
    assert all(kernel.write is None for kernel in backend_of("cuda").kernels)
