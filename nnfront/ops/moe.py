# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token goes through the feed-forward layers that a router chose for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Size, product, total
from nnfront.ir import TensorType, op
from nnfront.ops.rules import require, require_float, require_integer, require_same, wide

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of an expert's matrices, for each choice of a token."""
    _, gate_up, down, experts, _ = operands
    chosen = product([2, *experts.shape])
    return total([product([chosen, *matrix.shape[1:]]) for matrix in (gate_up, down)])


@op(stricter="every expert has the same sizes, and all hold x's dtype", flops=_flops, dtype_policy="compute")
def moe_mlp(
    x: TensorType,
    gate_up: TensorType,
    down: TensorType,
    experts: TensorType,
    weights: TensorType,
    *,
    activation: str = "silu",
) -> TensorType:
    """Sum over a token's experts of weight * down(activation(gate(x)) * up(x)), each expert with matrices of its own.

    Shapes: x [tokens, hidden]; gate_up [num_experts, 2 * size, hidden], gate above up; down [num_experts, hidden, size];
    experts [tokens, top_k], integers in [0, num_experts), what is outside adds nothing; weights [tokens, top_k]; the result has x's
    type. Sums over experts are in float32, in the order of the choices. activation: silu, gelu, gelu_tanh or relu.
    Source: the sparse layer of Mixtral (arXiv 2401.04088), section 2.1.
    """
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down), ("weights", weights)):
        require_float(tensor, name)
    require_integer(experts, "experts")
    for name, tensor, axes in (
        ("x", x, 2),
        ("gate_up", gate_up, 3),
        ("down", down, 3),
        ("experts", experts, 2),
        ("weights", weights, 2),
    ):
        require(tensor.ndim == axes, "{} must have {} axes, got {}", name, axes, tensor.ndim)
    require_same(gate_up.shape[0], down.shape[0], "gate_up has {} experts, down has {}")
    require_same(gate_up.shape[2], x.shape[1], "gate_up takes {} features, x has {}")
    require_same(down.shape[1], x.shape[1], "down gives {} features, x has {}")
    require_same(down.shape[2] * 2, gate_up.shape[1], "twice down's input is {}, gate_up gives {}")
    for name, tensor in (("experts", experts), ("weights", weights)):
        require_same(tensor.shape[0], x.shape[0], f"{name} has {{}} tokens, x has {{}}")
    require_same(experts.shape[1], weights.shape[1], "{} experts for a token, {} weights")
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        require(tensor.dtype == x.dtype, "{} is {}, x is {}", name, tensor.dtype, x.dtype)
    return x


@moe_mlp.normalize
def _(
    x: TensorType,
    gate_up: TensorType,
    down: TensorType,
    experts: TensorType,
    weights: TensorType,
    *,
    activation: Any = "silu",
) -> dict[str, Any]:
    require(
        activation in ACTIVATIONS,
        "activation must be one of {}, got {}",
        ", ".join(ACTIVATIONS),
        repr(activation),
    )
    return {"activation": activation}


@moe_mlp.reference
def _(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Every token through every expert, its share 0 where the expert was not chosen: the definition, not the way to run it."""
    y = x.new_zeros(x.shape, dtype=wide(x.dtype))
    for expert in range(gate_up.shape[0]):
        gate, up = (x @ gate_up[expert].T).chunk(2, -1)
        share = (weights.to(y.dtype) * (experts == expert)).sum(-1, keepdim=True)
        y = y + share * ((ACTIVATIONS[activation](gate) * up) @ down[expert].T)
    return y.to(x.dtype)
