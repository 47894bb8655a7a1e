# SPDX-License-Identifier: Apache-2.0
"""A model of linear layers, its weights, and what quantisation leaves of one."""

from __future__ import annotations

import torch

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.passes.quantizing.scheme import format_of

D, F = 64, 96


class Model(nn.Module):
    def __init__(self) -> None:
        self.one, self.two = nn.Linear(D, F, bias=True), nn.Linear(D, F, bias=False)
        self.fused = op.concat([self.one.weight, self.two.weight], 0)
        self.back = nn.Linear(F, D, bias=False)
        self.lm_head = nn.Linear(D, 40, bias=False)

    def both(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.linear(x, self.fused), 2, -1)
        return self.lm_head(self.back(op.silu(gate) * up))

    def plain(self, x: nn.Tensor) -> nn.Tensor:
        return self.lm_head(self.back(self.one(x)))


def stands_for(weight: torch.Tensor, format: str) -> torch.Tensor:
    """What is left of a weight in a format, by the references of the ops."""
    found = format_of(format)
    attrs = {"group_size": found.group_size, "axis": 1, "format": found.name, "fit": found.fit}
    given = ops.quantize.full_attrs(
        ops.quantize.canonical_attrs([nn.ir.TensorType(weight.shape, "float32")], attrs)
    )
    q, scales, *zeros = ops.quantize.run((weight,), given)
    if found.has_factor:
        scales, zeros = scales.float() * zeros[0], []
    back = {
        "group_size": found.group_size,
        "axis": 1,
        "dtype": "float32",
        "format": found.name if found.values else None,
    }
    return ops.dequantize.run((q, scales, *(zeros or [None])), back)


def exported():
    x = spec.Tensor(["n", D], "float32")
    return Model().export({"both": {"x": x}, "plain": {"x": x}})


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn([int(s) for s in p.shape]) for name, p in Model().named_parameters()}
