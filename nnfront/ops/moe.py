# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token goes through the feed-forward layers that a router chose for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Size, product, total
from nnfront.ir import TensorType, op
from nnfront.ops.rules import Flag, Number, require, require_float, require_integer, require_same, wide

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of an expert's matrices, for each choice of a token."""
    _, gate_up, down, experts, *_ = operands
    chosen = product([2, *experts.shape])
    return total([product([chosen, *matrix.shape[1:]]) for matrix in (gate_up, down)])


@op(stricter="every expert has the same sizes, and all hold x's dtype", flops=_flops, dtype_policy="compute")
def moe_mlp(
    x: TensorType,
    gate_up: TensorType,
    down: TensorType,
    experts: TensorType,
    weights: TensorType,
    gate_up_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    *,
    activation: str = "silu",
    gated: Flag = True,
    interleaved: Flag = False,
    alpha: Number = 1.0,
    limit: Number | None = None,
    up_offset: Number = 0.0,
) -> TensorType:
    """Sum over a token's experts of weight * down(activation(gate(x)) * up(x)), each expert with matrices of its own.

    Shapes: x [tokens, hidden]; gate_up [num_experts, 2 * size, hidden], gate above up; down [num_experts, hidden, size];
    experts [tokens, top_k], integers in [0, num_experts), what is outside adds nothing; weights [tokens, top_k];
    gate_up_bias [num_experts, 2 * size] and down_bias [num_experts, hidden]; the result has x's type. Sums over experts are in float32.

    activation: silu, gelu, gelu_tanh, relu or relu2 (the square of relu); alpha: silu is then gate * sigmoid(alpha * gate).
    interleaved: rows of gate_up, and its bias, are gate, up, gate, up, and so on. limit: gate is at most that, up between -limit and limit.
    up_offset: added to up. gated=False: down(activation(up(x))), gate_up [num_experts, size, hidden] being up alone.
    Source: the sparse layer of Mixtral (arXiv 2401.04088), section 2.1.
    """
    known = ", ".join(ACTIVATIONS)
    require(activation in ACTIVATIONS, "activation must be one of {}, got {!r}", known, activation)
    require(alpha == 1 or activation == "silu", "alpha is for silu, the activation is {}", activation)
    require(limit is None or limit > 0, "limit must be positive, got {}", limit)
    only_gated = {"interleaved": interleaved, "limit": limit, "up_offset": up_offset}
    given = [name for name, value in only_gated.items() if value]
    require(gated or not given, "without a gate there is no {}", " and no ".join(given))
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
    if gated:
        require_same(down.shape[2] * 2, gate_up.shape[1], "twice down's input is {}, gate_up gives {}")
    else:
        require_same(down.shape[2], gate_up.shape[1], "down takes {} features, gate_up gives {}")
    for name, tensor in (("experts", experts), ("weights", weights)):
        require_same(tensor.shape[0], x.shape[0], f"{name} has {{}} tokens, x has {{}}")
    require_same(experts.shape[1], weights.shape[1], "{} experts for a token, {} weights")
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        require(tensor.dtype == x.dtype, "{} is {}, x is {}", name, tensor.dtype, x.dtype)
    for name, bias, matrix in (("gate_up", gate_up_bias, gate_up), ("down", down_bias, down)):
        if bias is not None:
            require(bias.dtype == x.dtype, "{}_bias is {}, x is {}", name, bias.dtype, x.dtype)
            require(bias.ndim == 2, "{}_bias must have 2 axes, got {}", name, bias.ndim)
            require_same(bias.shape[0], matrix.shape[0], f"{name}_bias has {{}} experts, {name} has {{}}")
            require_same(bias.shape[1], matrix.shape[1], f"{name}_bias has {{}} elements, {name} gives {{}}")
    return x


@moe_mlp.reference
def _(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> torch.Tensor:
    """Every token through every expert, its share 0 where the expert was not chosen: the definition, not the way to run it."""
    of_wide = wide(x.dtype)

    def product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = rows @ matrix[expert].to(of_wide).T
        return y if bias is None else y + bias[expert].to(of_wide)

    rows = x.to(of_wide)
    y = torch.zeros_like(rows)
    for expert in range(gate_up.shape[0]):
        inner = product(rows, gate_up, gate_up_bias)
        if gated:
            gate, up = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, -1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = _activated(gate, activation, alpha) * (up + up_offset)
        else:
            inner = _activated(inner, activation, alpha)
        share = (weights.to(of_wide) * (experts == expert)).sum(-1, keepdim=True)
        y = y + share * product(inner, down, down_bias)
    return y.to(x.dtype)


def _activated(x: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    return ACTIVATIONS[activation](x) if alpha == 1 else x * (alpha * x).sigmoid()
