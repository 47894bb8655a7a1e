# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers through the whole path: exported, lifted, compiled, specialised, saved, and run eagerly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import nnfront as nn
from nnfront import op, spec

B, H, P, N = "batch", 4, 6, 5


class Conv(nn.Module):
    """Taps as checkpoints have them, with an axis for the channels of a group."""

    def __init__(self) -> None:
        self.weight = nn.Parameter([H * P, 1, 4])
        self.bias = nn.Parameter([H * P])
        self.taps = op.reshape(self.weight, (H * P, 4))

    def forward(self, x: Any, state: Any) -> Any:
        return op.causal_conv1d(x, self.taps, self.bias, state, activation="silu")


class StateSpace(nn.Module):
    def __init__(self) -> None:
        self.A_log, self.D = nn.Parameter([H]), nn.Parameter([H])
        self.rates = -op.exp(op.astype(self.A_log, "float32"))

    def forward(self, x: Any, dt: Any, b: Any, c: Any, state: Any) -> Any:
        return op.ssm_scan(x, dt, self.rates, b, c, self.D, state)


class Selective(nn.Module):
    def __init__(self) -> None:
        self.A_log, self.D = nn.Parameter([H, N]), nn.Parameter([H])
        self.rates = -op.exp(op.astype(self.A_log, "float32"))

    def forward(self, x: Any, dt: Any, b: Any, c: Any, state: Any) -> Any:
        return op.selective_scan(x, dt, self.rates, b, c, self.D, state)


class Delta(nn.Module):
    def __init__(self) -> None:
        self.key = nn.Linear(N, N, bias=False)

    def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return op.gated_delta_rule(
            q, self.key(k), v, -op.softplus(g), op.sigmoid(beta), state, qk_l2norm=True
        )


def tensors(**shapes: list[Any]) -> dict[str, Any]:
    return {name: spec.Tensor(shape, "float32") for name, shape in shapes.items()}


LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "causal_conv1d": (Conv, tensors(x=[B, "seq", H * P], state=[B, H * P, 3])),
    "ssm_scan": (
        StateSpace,
        tensors(
            x=[B, "seq", H, P], dt=[B, "seq", H], b=[B, "seq", 2, N], c=[B, "seq", 2, N], state=[B, H, P, N]
        ),
    ),
    "selective_scan": (
        Selective,
        tensors(x=[B, "seq", H], dt=[B, "seq", H], b=[B, "seq", N], c=[B, "seq", N], state=[B, H, N]),
    ),
    "gated_delta_rule": (
        Delta,
        tensors(
            q=[B, "seq", 2, N],
            k=[B, "seq", 2, N],
            v=[B, "seq", H, P],
            g=[B, "seq", H],
            beta=[B, "seq", H],
            state=[B, H, N, P],
        ),
    ),
}


def arguments(given_spec: dict[str, Any], seq: int) -> dict[str, torch.Tensor]:
    sizes = {"batch": 2, "seq": seq}
    return {
        name: torch.rand([sizes.get(str(size), size) for size in tensor.shape])
        for name, tensor in given_spec.items()
    }


@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_gives_the_same_on_every_path(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, given_spec = LAYERS[name]
    module = layer()
    weights = {n: torch.rand(p.shape) for n, p in module.named_parameters()}
    ir = module.export({"forward": given_spec})
    assert str(nn.ir.parse(str(ir))) == str(ir)
    lifted = nn.passes.lift_transform_params(nn.passes.special_cases(ir, "forward", [{"seq": 1}]))
    session = nn.compile(lifted).load(weights)
    session.save(tmp_path / "saved")
    nn.compile(ir, target="cuda:sm_90")
    module.load_state_dict(weights)
    for seq in (1, 2, 70):
        given_arguments = arguments(given_spec, seq)
        expected = module(**given_arguments)
        for path in (nn.compile(ir).load(weights), session, nn.load(tmp_path / "saved")):
            for got, other in zip(path["forward"](*given_arguments.values()), expected, strict=True):
                assert_close(got, other)


@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_in_bfloat16_keeps_its_state_as_it_is(name: str) -> None:
    layer, given_spec = LAYERS[name]
    ir = nn.passes.apply_dtype_policy(layer().export({"forward": given_spec}), "bfloat16")
    (call,) = [b.value for b in ir["forward"].bindings if getattr(b.value, "op", None) is nn.ir.OPS[name]]
    assert call.args[0].type.dtype == "bfloat16"
    assert call.args[-1].type.dtype == "float32"
    assert [t.dtype for t in ir["forward"].result_type.fields] == ["float32", "float32"]
