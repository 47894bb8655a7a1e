# SPDX-License-Identifier: Apache-2.0
"""Each layer computes what torch's does, and the same eager and exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import SpecError

Weights = dict[str, torch.Tensor]
# name -> (layer, shape of x, what torch computes from x and the weights)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any, Weights], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), (2, 3, 6), lambda x, w: F.linear(x, w["weight"], w["bias"])),
    "linear without bias": (
        lambda: nn.Linear(6, 5, bias=False),
        (3, 6),
        lambda x, w: F.linear(x, w["weight"]),
    ),
    "linear with out_dtype": (
        lambda: nn.Linear(6, 5, out_dtype="float64"),
        (3, 6),
        lambda x, w: F.linear(x.double(), w["weight"].double(), w["bias"]),
    ),
    "layer norm": (
        lambda: nn.LayerNorm(6),
        (2, 6),
        lambda x, w: F.layer_norm(x, (6,), w["weight"], w["bias"]),
    ),
    "layer norm of two axes": (
        lambda: nn.LayerNorm((3, 6), eps=1e-3, bias=False),
        (2, 3, 6),
        lambda x, w: F.layer_norm(x, (3, 6), w["weight"], eps=1e-3),
    ),
    "plain layer norm": (
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        (2, 6),
        lambda x, w: F.layer_norm(x, (6,)),
    ),
    "rms norm": (
        lambda: nn.RMSNorm(6, -1, bias=False),
        (2, 6),
        lambda x, w: F.rms_norm(x, (6,), w["weight"], 1e-5),
    ),
    "rms norm with bias": (
        lambda: nn.RMSNorm(6, [-1], 1e-3),
        (2, 6),
        lambda x, w: F.rms_norm(x, (6,), w["weight"], 1e-3) + w["bias"],
    ),
    "group norm": (
        lambda: nn.GroupNorm(2, 6),
        (2, 6, 5),
        lambda x, w: F.group_norm(x, 2, w["weight"], w["bias"]),
    ),
    "plain group norm": (
        lambda: nn.GroupNorm(3, 6, affine=False),
        (2, 6, 4, 5),
        lambda x, w: F.group_norm(x, 3),
    ),
    "conv1d": (
        lambda: nn.Conv1D(4, 6, 3, stride=2, padding=1, groups=2),
        (2, 4, 9),
        lambda x, w: F.conv1d(x, w["weight"], w["bias"], 2, 1, 1, 2),
    ),
    "conv2d": (
        lambda: nn.Conv2D(4, 6, (3, 2), 2, 1, 2, 2, bias=False),
        (2, 4, 9, 8),
        lambda x, w: F.conv2d(x, w["weight"], None, 2, 1, 2, 2),
    ),
    "conv2d of channels last": (
        lambda: nn.Conv2D(4, 6, 3, data_layout="NHWC"),
        (2, 9, 8, 4),
        lambda x, w: F.conv2d(x.permute(0, 3, 1, 2), w["weight"], w["bias"]).permute(0, 2, 3, 1),
    ),
    "conv3d in groups": (
        lambda: nn.Conv3D(4, 6, [1, 2, 3], [1, 2, 1], [0, 1, 1], groups=2),
        (1, 4, 3, 5, 6),
        lambda x, w: F.conv3d(x, w["weight"], w["bias"], (1, 2, 1), (0, 1, 1), groups=2),
    ),
    "conv1d transposed": (
        lambda: nn.ConvTranspose1D(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 7),
        lambda x, w: F.conv_transpose1d(x, w["weight"], w["bias"], 2, 1, 1, 2),
    ),
    "relu": (nn.ReLU, (3, 4), lambda x, w: F.relu(x)),
    "silu": (nn.SiLU, (3, 4), lambda x, w: F.silu(x)),
    "gelu": (nn.GELU, (3, 4), lambda x, w: F.gelu(x)),
    "gelu by tanh": (lambda: nn.GELU("tanh"), (3, 4), lambda x, w: F.gelu(x, approximate="tanh")),
    "sigmoid": (nn.Sigmoid, (3, 4), lambda x, w: torch.sigmoid(x)),
    "tanh": (nn.Tanh, (3, 4), lambda x, w: torch.tanh(x)),
    "softmax": (lambda: nn.Softmax(0), (3, 4), lambda x, w: torch.softmax(x, 0)),
    "identity": (nn.Identity, (3, 4), lambda x, w: x),
    "dropout": (lambda: nn.Dropout(0.9), (3, 4), lambda x, w: x),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)),
        (3, 6),
        lambda x, w: F.linear(F.relu(F.linear(x, w["0.weight"], w["0.bias"])), w["2.weight"]),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_torch_does_eager_and_exported(name: str) -> None:
    make, shape, expected = LAYERS[name]
    layer = make()
    weights = {
        n: torch.randn(tuple(p.shape), dtype=getattr(torch, p.dtype)) for n, p in layer.named_parameters()
    }
    layer.load_state_dict(weights)
    x = torch.randn(shape)
    wanted = expected(x, weights)
    ir = layer.export({"forward": {"x": spec.Tensor(["batch", *shape[1:]], "float32")}})
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nn.compile(ir).load(weights)["forward"](x), wanted, rtol=1e-5, atol=1e-5)


def test_an_embedding_takes_rows_for_integers_of_any_shape() -> None:
    layer = nn.Embedding("vocab", 4)
    table = torch.randn(9, 4)
    layer.load_state_dict({"weight": table})
    ids = torch.tensor([[0, 8, 3], [1, 1, 7]])
    ir = layer.export({"forward": {"x": spec.Tensor(["a", "b"], "int64")}})
    torch.testing.assert_close(layer(ids), table[ids])
    torch.testing.assert_close(nn.compile(ir).load({"weight": table})["forward"](ids), table[ids])


def rope_config(parameters: dict[str, Any], head_size: int) -> Any:
    return transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("length", [10, 200, 300])
def test_rotary_tables_equal_those_of_transformers(parameters: dict[str, Any], length: int) -> None:
    config = rope_config(parameters, 16)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    positions = torch.arange(length)[None]
    angles = positions[..., None].float() * inv_freq
    rotary = nn.RotaryEmbedding(16, config.rope_parameters, max_positions=256)
    cos, sin = rotary(positions)
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=2e-5)


def test_an_unknown_or_incomplete_rope_is_refused() -> None:
    with pytest.raises(SpecError, match=r"(?s)unknown rope_type 'spiral'.*default, linear, dynamic"):
        nn.RotaryEmbedding(16, {"rope_type": "spiral"})
    with pytest.raises(SpecError, match="rope_type 'llama3' needs 'low_freq_factor', 'high_freq_factor'"):
        nn.RotaryEmbedding(16, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64})


class Counter(nn.Effect):
    def init(self) -> list[nn.Tensor]:
        return [op.zeros((), "int64")]


class Counting(nn.Module):
    """Adds to x how often it was called before."""

    def __init__(self) -> None:
        self.layers = [Step(), Step()]

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Step(nn.Module):
    def __init__(self) -> None:
        self.calls = Counter()

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        (count,) = self.calls.state
        self.calls.state = [count + 1]
        return x + count


def test_the_state_of_effects_is_an_argument_and_a_result() -> None:
    ir = Counting().export({"forward": {"x": spec.Tensor(["n"], "float32")}})
    assert [p.name for p in ir["forward"].inputs] == ["x", "layers.0.calls.0", "layers.1.calls.0"]
    session = nn.compile(ir).load({})
    state = session["_initialize_effect"]()
    x = torch.zeros(2)
    for times in range(3):
        y, *state = session["forward"](x, *state)
        torch.testing.assert_close(y, x + 2 * times)


def test_without_effect_mode_each_call_starts_anew() -> None:
    raw = {"forward": {"x": spec.Tensor(["n"], "float32"), "$": {"effect_mode": "none"}}}
    run = nn.compile(Counting().export(raw)).load({})["forward"]
    torch.testing.assert_close(run(torch.zeros(2)), torch.zeros(2))
    torch.testing.assert_close(run(torch.zeros(2)), torch.zeros(2))


class Handle(nn.Object):
    """An object whose class has an `__init__` of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def read(self, x: nn.Tensor) -> nn.Tensor:
        result: nn.Tensor = op.extern(
            "test.read", [self, x, x.shape[0], 2.5], nn.Tensor.placeholder(x.shape, x.dtype)
        )
        return result


def test_objects_pass_through_to_external_functions() -> None:
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, handle: Handle) -> tuple[nn.Tensor, Handle]:
            return handle.read(x) * 2.0, handle

    seen = []

    def read(handle: Any, x: torch.Tensor, n: int, scale: float) -> torch.Tensor:
        seen.append((handle, n))
        return x * scale

    nn.register_extern("test.read", read)
    ir = Model().export({"forward": {"x": spec.Tensor(["n"], "float32"), "handle": spec.Object(Handle)}})
    assert nn.ir.parse(str(ir)) == ir
    handle = Handle(3)
    x = torch.randn(4)
    y, same = nn.compile(ir).load({})["forward"](x, handle)
    torch.testing.assert_close(y, x * 5)
    assert same is handle
    assert seen == [(handle, 4)]


def test_print_works_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(nn.Module):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            op.print_(x, format="x is {}")
            return x + 1.0

    x = torch.tensor([1.5])
    Printing()(x)
    assert "1.5" in capsys.readouterr().out
    for mode in ("plain", "packed", "none"):
        raw = {"forward": {"x": spec.Tensor(["n"], "float32"), "$": {"effect_mode": mode}}}
        ir = nn.passes.lift_transform_params(Printing().export(raw))
        nn.compile(ir).load({})["forward"](x)
        assert "1.5" in capsys.readouterr().out, mode
