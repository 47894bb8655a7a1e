# SPDX-License-Identifier: Apache-2.0
"""Kernels are chosen before weights are laid out for them: a weight that no kernel takes in another order keeps its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from nnfront_models import qwen3_moe

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cuda import graph_safety
from nnfront.compiler import Executable
from nnfront.ir import TensorType
from nnfront.lower import MethodProgram, Run
from nnfront.passes import QuantScheme

PRODUCTS = {
    "linear",
    "matmul",
    "product",
    "gated_product",
    "interleaved_product",
    "moe_mlp",
    "interleaved_experts",
}
SM_90 = "cuda:sm_90"


class Gated(nn.Module):
    """activation(gate) * up of one weight, and down."""

    def __init__(self, activation: str) -> None:
        self.gate, self.up = (
            nn.Linear(64, 128, bias=False, dtype="float16"),
            nn.Linear(64, 128, bias=False, dtype="float16"),
        )
        self.down = nn.Linear(128, 64, bias=False, dtype="float16")
        self.gate_up = op.concat([self.gate.weight, self.up.weight], 0)
        self.activation = activation

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.linear(x, self.gate_up), 2, -1)
        return self.down(getattr(op, self.activation)(gate) * up)


class Experts(nn.Module):
    """Sixteen experts of which each token chooses some."""

    def __init__(self, dtype: str, bias: bool = False, **options: Any) -> None:
        width = 256 if options.get("gated", True) else 128
        self.gate_up, self.down = nn.Parameter((16, width, 64), dtype), nn.Parameter((16, 64, 128), dtype)
        self.bias, self.options = nn.Parameter((16, 64), dtype) if bias else None, options

    def forward(self, x: nn.Tensor, experts: nn.Tensor, shares: nn.Tensor) -> nn.Tensor:
        return op.moe_mlp(x, self.gate_up, self.down, experts, shares, None, self.bias, **self.options)


def compiled(model: nn.Module, inputs: dict[str, spec.Tensor], target: str = SM_90) -> Executable:
    ir = model.export({"forward": inputs})
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target)


def gated(activation: str) -> Executable:
    return compiled(Gated(activation), {"x": spec.Tensor(["n", 64], "float16")})


def experts(dtype: str, top_k: int, target: str = SM_90, **options: Any) -> Executable:
    choice = {"experts": spec.Tensor(["n", top_k], "int64"), "shares": spec.Tensor(["n", top_k], dtype)}
    return compiled(Experts(dtype, **options), {"x": spec.Tensor(["n", 64], dtype), **choice}, target)


def elements(method: MethodProgram, slot: int) -> int:
    type = method.slots[slot].type
    count = 1
    for size in type.shape if isinstance(type, TensorType) else (0,):
        count *= size if isinstance(size, int) else 0
    return count


def whole_reads(method: MethodProgram) -> list[str]:
    """Instructions that read as many elements as a weight has and are no products."""
    least = min(elements(method, slot) for slot, held in enumerate(method.slots) if held.kind == "weight")
    return [
        run.kernel
        for run in method.body.walk()
        if isinstance(run, Run)
        and run.op not in PRODUCTS
        and any(elements(method, slot) >= least for slot in run.inputs)
    ]


@pytest.mark.parametrize(
    "executable",
    [gated("relu"), gated("silu"), experts("float32", 2), experts("bfloat16", 17), experts("bfloat16", 16)],
    ids=[
        "ReGLU",
        "SwiGLU",
        "experts in float32",
        "more experts for a token than there are places",
        "sixteen experts for a token",
    ],
)
def test_no_call_reads_a_whole_weight_but_in_a_product(executable: Executable) -> None:
    assert whole_reads(executable.program.methods["forward"]) == []


def test_weights_are_packed_where_a_kernel_takes_them_so() -> None:
    assert "triton_gated" in gated("silu").explain(n=4)
    assert "triton_experts" in experts("bfloat16", 8).explain(n=4)


def test_explain_says_why_a_kernel_did_not_take_a_weight() -> None:
    assert "not triton_gated: there is no relu in the kernel" in gated("relu").explain(n=4)


def test_experts_that_no_kernel_takes_are_sorted_and_not_all_computed() -> None:
    assert "moe_mlp_sorted" in experts("float32", 2).explain(n=4)


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "bias": True},
        {"gated": False, "activation": "relu2"},
        {"activation": "relu", "bias": True},
    ],
    ids=str,
)
def test_experts_are_on_the_kernel_whatever_is_between_their_products(options: dict[str, Any]) -> None:
    made = experts("bfloat16", 8, **options)
    assert "triton_experts" in made.explain(n=4)
    assert graph_safety.why_not(made.program.methods["forward"]) == ""


def quantized_experts(scheme: str | QuantScheme) -> Executable:
    config = dataclasses.replace(qwen3_moe.TINY, dtype="bfloat16", head_dim=64)
    ir = nn.passes.quantize_weights(qwen3_moe.build(config).export(qwen3_moe.export_spec(config)), scheme)
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), SM_90)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_calls_with_quantised_experts_are_not_captured_and_it_is_said_why(format: str) -> None:
    """Which experts have rows is asked on the host: a captured call would go to those of the call that it was captured from."""
    made = quantized_experts(format)
    where = "quantized_experts_sorted at model.layers.1.mlp.experts"
    for name, method in made.program.methods.items():
        assert f"{name}: not captured, {where} reads a result back to the host" in made.explain()
        assert graph_safety.why_not(method) != ""


def test_calls_with_experts_that_are_kept_as_they_are_are_captured_whatever_else_is_quantised() -> None:
    made = quantized_experts(QuantScheme("int4", rules=(("*.experts", "keep"),)))
    kernels = {run.kernel for m in made.program.methods.values() for run in m.body.walk()}
    assert {"triton_experts", "triton_int4"} <= kernels
    assert "decode: captured, calls of up to 256 rows" in made.explain()


def test_a_kernel_says_what_it_does_not_know_about_experts() -> None:
    told = experts("bfloat16", 17).explain(n=4)
    assert "moe_mlp_sorted" in told
    assert "triton_experts: top_k must be 1 to 16, got 17" in told


def test_experts_whose_rows_alternate_as_they_are_stored_are_not_stored_again() -> None:
    made = experts("bfloat16", 8, interleaved=True)
    assert "triton_experts" in made.explain(n=4)
    (method,) = made.program.methods.values()
    assert {weight.name for weight in method.weights} == {"gate_up", "down"}


def test_the_sorted_experts_of_a_gpu_agree_with_the_definition() -> None:
    """By the function that a GPU would run, on tensors of the CPU."""
    from nnfront.backends.table import resolver
    from nnfront.lower import reference

    (run,) = (r for r in experts("float32", 2).program.methods["forward"].body.walk() if isinstance(r, Run))
    x, gate_up, down = torch.randn(5, 64), torch.randn(16, 256, 64), torch.randn(16, 64, 128)
    chosen, shares = torch.randint(0, 16, (5, 2)), torch.rand(5, 2)
    wanted = reference(Run("moe_mlp", "moe_mlp", run.inputs, run.result, run.attrs))(
        x, gate_up, down, chosen, shares, None, None
    )
    found = resolver("cuda")(run)(x, gate_up, down, chosen, shares)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
