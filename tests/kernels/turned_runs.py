# SPDX-License-Identifier: Apache-2.0
"""Products with weights [in, out] through the Triton kernels, for `test_kernels_in_models.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import torch

import nnfront as nn
from nnfront import op, spec

D, F = 64, 96


class Turned(nn.Module):
    def __init__(self) -> None:
        self.up = nn.Parameter((D, F), dtype="float16")
        self.gate_up = nn.Parameter((F, 2 * F), dtype="float16")
        self.down = nn.Parameter((F, D), dtype="float16")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.matmul(op.silu(op.matmul(x, self.up)), self.gate_up), 2, -1)
        return op.matmul(op.silu(gate) * up, self.down) + x

    def product(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        return op.linear(x, y)


def run(quant: str | None) -> tuple[float, float, list[str]]:
    """How far CUDA's result is from the CPU's, relative to the norm; how far that of a strided weight from an argument is; the kernels."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x_spec = spec.Tensor(["n", D], "float16")
    ir = Turned().export(
        {"forward": {"x": x_spec}, "product": {"x": x_spec, "y": spec.Tensor([F, D], "float16")}}
    )
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    weights = {
        name: (torch.randn([int(size) for size in p.shape]) * 0.1).half()
        for name, p in Turned().named_parameters()
    }
    executable = nn.compile(ir, target="cuda")
    session, cpu = executable.load(weights), nn.compile(ir).load(weights)
    x, strided = torch.randn(5, D).half(), torch.randn(D, F).half().T

    def distance(name: str, *arguments: torch.Tensor) -> float:
        got, expected = (s[name](*arguments).double() for s in (session, cpu))
        return float((got - expected).norm() / expected.norm())

    kernels = {i.kernel for i in executable.program.methods["forward"].body.instructions}
    return distance("forward", x), distance("product", x, strided), sorted(kernels)
