# SPDX-License-Identifier: Apache-2.0
"""A layer that occurs many times is traced once, and two layers share a body only if they agree in what the trace read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront import op, spec

SPEC = {"forward": {"x": spec.Tensor(["batch", 4], "float32")}}


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(nn.Module):
    """Reads one attribute and, if it has one, a weight."""

    def __init__(self, value: Any, weight: bool = True) -> None:
        self.value = value
        self.weight = nn.Parameter((4,)) if weight else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = use(self.value, x)
        return y * self.weight if self.weight is not None else y


def use(value: Any, x: nn.Tensor) -> nn.Tensor:
    """Compute something that depends on every part of `value`."""
    if isinstance(value, (list, tuple)):
        for part in value:
            x = use(part, x)
        return x
    if isinstance(value, dict):
        return use(list(value.values()), x)
    if isinstance(value, torch.Tensor):
        return x + value
    if isinstance(value, str):
        return op.silu(x) if value == "silu" else op.relu(x)
    if isinstance(value, Settings):
        return x * value.factor
    return x * float(value) + (0.0 if isinstance(value, float) else 1.0)


@dataclass
class Settings:
    factor: float


def bodies(module: nn.Module) -> list[str]:
    ir = module.export(SPEC)
    return [f.name for f in ir.functions if f.kind == "private"]


def num_calls(module: nn.Module) -> int:
    ir = module.export(SPEC)
    return sum(hasattr(b.value, "function") for b in ir["forward"].bindings)


@pytest.mark.parametrize(
    "value",
    [
        2.0,
        3,
        True,
        "silu",
        (1, 2.0),
        [1.5, (2, 3)],
        {"a": 1.0},
        Settings(2.0),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
    ],
    ids=repr,
)
def test_layers_that_agree_share_one_body(value: Any) -> None:
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for _ in range(3)]
    module = Stack([Scale(v) for v in copies])
    assert bodies(module) == ["Scale"]
    assert num_calls(module) == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (2.0, 2.5),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("silu", "relu"),
        ((1, 2), (1, 3)),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Settings(1.0), Settings(2.0)),
        (torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 2, 3, 5])),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1.0, 2, 3, 4])),
    ],
    ids=repr,
)
def test_layers_that_differ_in_what_was_read_do_not_share(a: Any, b: Any) -> None:
    assert len(bodies(Stack([Scale(a), Scale(b)]))) == 2


def test_an_attribute_that_is_not_read_does_not_matter() -> None:
    class Numbered(Scale):
        def __init__(self, index: int) -> None:
            super().__init__(2.0)
            self.layer_index = index

    assert bodies(Stack([Numbered(i) for i in range(3)])) == ["Numbered"]


def test_reading_an_attribute_that_is_absent_counts() -> None:
    class Optional(nn.Module):
        def __init__(self, bias: bool) -> None:
            if bias:
                self.bias = nn.Parameter((4,))

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x + self.bias if hasattr(self, "bias") else x * 2.0

    assert len(bodies(Stack([Optional(False), Optional(True), Optional(False)]))) == 2


def test_a_tied_weight_is_not_confused_with_two() -> None:
    class Two(nn.Module):
        def __init__(self, tied: bool) -> None:
            self.a = nn.Parameter((4,))
            self.b = self.a if tied else nn.Parameter((4,))

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x * self.a + self.b

    assert len(bodies(Stack([Two(True), Two(False), Two(True)]))) == 2


@pytest.mark.parametrize("hidden", [itertools.count(), iter([1.0, 2.0, 3.0])], ids=["count", "iterator"])
def test_state_that_cannot_be_compared_is_not_shared(hidden: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            self.counter = hidden

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x * float(next(self.counter, 5.0))

    assert bodies(Stack([Counting(), Counting()])) == []


def test_reading_the_whole_state_prevents_sharing() -> None:
    class Introspective(nn.Module):
        def __init__(self, value: float) -> None:
            self.value = value

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x * vars(self)["value"]

    assert bodies(Stack([Introspective(1.0), Introspective(2.0)])) == []


def test_a_captured_tensor_of_the_caller_prevents_sharing() -> None:
    outer: dict[str, nn.Tensor] = {}

    class Captures(nn.Module):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x + outer["x"]

    class Root(Stack):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            outer["x"] = x * 2.0
            return super().forward(x)

    module = Root([Captures(), Captures()])
    assert bodies(module) == []
    x = torch.randn(2, 4)
    torch.testing.assert_close(run(module, x), x + 2 * x + 2 * x)


def test_nested_layers_share_inside_shared_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            self.experts = [Scale(2.0), Scale(2.0), Scale(3.0)]

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for expert in self.experts:
                x = expert(x)
            return x

    assert sorted(bodies(Stack([Block(), Block()]))) == ["Block", "Scale", "Scale_1"]


def test_layers_whose_inner_layers_differ_do_not_share() -> None:
    class Block(nn.Module):
        def __init__(self, last: float) -> None:
            self.experts = [Scale(2.0), Scale(2.0), Scale(last)]

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for expert in self.experts:
                x = expert(x)
            return x

    module = Stack([Block(2.0), Block(7.0), Block(2.0)])
    assert len([name for name in bodies(module) if name.startswith("Block")]) == 2
    check_equals_unshared(module)


def test_derived_tensors_are_emitted_at_the_call_and_passed_in() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.ab = op.concat([self.a.weight, self.b.weight], 0)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            p, q = op.split(op.linear(x, self.ab), 2, -1)
            return p * q

    module = Stack([Fused(), Fused()])
    ir = module.export(SPEC)
    assert [p.name for p in ir["Fused"].params] == ["x", "ab"]
    assert {"layers.0.ab", "layers.1.ab"} <= {b.var.name for b in ir["forward"].bindings}
    check_equals_unshared(module)


def test_layers_with_different_argument_types_do_not_share() -> None:
    class Widen(nn.Module):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.concat([x, x], 0)

    assert len(bodies(Stack([Widen(), Widen()]))) == 2


def test_a_dim_that_no_argument_defines_is_passed_along() -> None:
    class AddSize(nn.Module):
        def forward(self, x: nn.Tensor, n: Any) -> nn.Tensor:
            return x + op.sum(op.arange(n), keepdims=False)

    class Root(nn.Module):
        def __init__(self) -> None:
            self.layers = [AddSize(), AddSize()]

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for layer in self.layers:
                x = layer(x[:, :2], x.shape[0]) if x.shape[1] != 2 else layer(x, x.shape[0])
            return x

    module = Root()
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(module, x), x[:, :2] + 6)


def test_models_whose_layers_all_differ_are_traced_in_place_beyond_a_few() -> None:
    module = Stack([Scale(float(i)) for i in range(40)])
    assert len(bodies(module)) == 8
    check_equals_unshared(module)


def run(module: nn.Module, x: torch.Tensor) -> Any:
    weights = {name: torch.randn(tuple(p.shape)) for name, p in module.named_parameters()}
    return nn.compile(module.export(SPEC)).load(weights)["forward"](x)


def check_equals_unshared(module: nn.Module) -> None:
    weights = {name: torch.randn(tuple(p.shape)) for name, p in module.named_parameters()}
    x = torch.randn(3, 4)
    results = [
        nn.compile(module.export(SPEC, share_layers=share)).load(weights)["forward"](x)
        for share in (True, False)
    ]
    module.load_state_dict(weights)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], module(x), rtol=1e-6, atol=1e-6)
