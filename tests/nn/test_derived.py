# SPDX-License-Identifier: Apache-2.0
"""Derived tensors: formulas over parameters, emitted afresh in every method, equal in eager, exported and lifted form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import InferError, TraceError

D = 8
SPEC = {"forward": {"x": spec.Tensor(["batch", D], "float32")}}


def weights_of(module: nn.Module, **sizes: int) -> dict[str, torch.Tensor]:
    """Random values for all parameters; dims in their shapes take `sizes`."""
    shapes = {
        n: [sizes[str(s)] if not isinstance(s, int) else s for s in p.shape]
        for n, p in module.named_parameters()
    }
    dtypes = {n: getattr(torch, p.dtype) for n, p in module.named_parameters()}
    return {n: torch.randn(shape).to(dtypes[n]) for n, shape in shapes.items()}


def check(
    module: nn.Module, expected: Callable[..., torch.Tensor], *, tolerance: float = 1e-5, **sizes: int
) -> Any:
    """Eager, exported and lifted results agree with `expected(x, weights)`."""
    weights = weights_of(module, **sizes)
    x = torch.randn(3, D)
    wanted = expected(x, weights)
    module.load_state_dict(weights)
    ir = module.export(SPEC)
    lifted = nn.passes.lift_transform_params(ir)
    for result in (
        module(x),
        nn.compile(ir).load(weights)["forward"](x),
        nn.compile(lifted).load(weights)["forward"](x),
    ):
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
    return lifted


class One(nn.Module):
    """x @ formula, for one formula over two weights."""

    def __init__(self, formula: Callable[[nn.Tensor, nn.Tensor], nn.Tensor]) -> None:
        self.a = nn.Parameter((D, D))
        self.b = nn.Parameter((D, D))
        self.w = formula(self.a, self.b)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.w)


FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "concat": lambda a, b: op.concat([a, b], 1) if isinstance(a, nn.Tensor) else torch.cat([a, b], 1),
    "transpose": lambda a, b: op.permute_dims(a) if isinstance(a, nn.Tensor) else a.T,
    "slice": lambda a, b: a[:, 2:6],
    "lora": lambda a, b: a + 0.5 * (a[:, :2] @ b[:2, :]),
    "derived of derived": lambda a, b: ((a * 2.0) + b) * (a * 2.0),
    "negated power": lambda a, b: -(a**2) / 3,
    "constant": lambda a, b: a * torch.arange(float(D)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_the_same_eager_exported_and_lifted(name: str) -> None:
    formula = FORMULAS[name]
    lifted = check(One(formula), lambda x, w: x @ formula(w["a"], w["b"]))
    assert [p.name for p in lifted["forward"].weights] == ["w"]


def test_only_stored_parameters_are_in_the_state() -> None:
    module = One(FORMULAS["sum"])
    assert list(module.state_dict()) == ["a", "b"]
    assert [name for name, _ in module.named_parameters()] == ["a", "b"]
    assert [name for name, _ in module.named_derived()] == ["w"]


def test_a_formula_used_by_two_methods_is_emitted_in_each() -> None:
    class Two(One):
        def twice(self, x: nn.Tensor) -> nn.Tensor:
            return op.matmul(x, self.w) * 2.0

    ir = Two(FORMULAS["sum"]).export({**SPEC, "twice": SPEC["forward"]})
    for name in ("forward", "twice"):
        assert [b.var.name for b in ir[name].bindings].count("w") == 1


def test_an_unused_formula_costs_nothing() -> None:
    class Unused(One):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.matmul(x, self.a)

    ir = Unused(FORMULAS["sum"]).export(SPEC)
    assert [p.name for p in ir["forward"].weights] == ["a"]
    assert len(ir["forward"].bindings) == 1


def test_a_formula_follows_a_later_change_of_dtype() -> None:
    module = One(FORMULAS["sum"])
    assert module.w.dtype == "float32"
    module.to("bfloat16")
    assert module.w.dtype == "bfloat16"
    ir = module.export({"forward": {"x": spec.Tensor(["batch", D], "bfloat16")}})
    assert ir["forward"].result_type.dtype == "bfloat16"


def test_formulas_in_lists_and_dicts_are_found_by_path() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            self.parts = [nn.Linear(D, D, bias=False) for _ in range(3)]
            self.doubled = [p.weight * 2.0 for p in self.parts]
            self.named = {"last": self.parts[2].weight + 1.0}

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for w in self.doubled:
                x = x @ w
            return x @ self.named["last"]

    module = Many()
    assert [n for n, _ in module.named_derived()] == ["doubled.0", "doubled.1", "doubled.2", "named.last"]
    check(
        module,
        lambda x, w: (
            x
            @ (2 * w["parts.0.weight"])
            @ (2 * w["parts.1.weight"])
            @ (2 * w["parts.2.weight"])
            @ (w["parts.2.weight"] + 1)
        ),
        tolerance=1e-3,
    )


def test_slices_of_a_fused_checkpoint_tensor_and_stacks_of_experts() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            self.qkv = nn.Parameter((3 * D, D))
            self.experts = [nn.Linear(D, D, bias=False) for _ in range(2)]
            self.q = self.qkv[:D]
            self.k, _ = op.split(self.qkv[D:], 2, 0)
            self.stacked = op.stack([e.weight for e in self.experts], 0)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            y = op.linear(x, self.q) + op.linear(x, self.k)
            return y + op.sum(op.matmul(x, self.stacked), axis=0)

    check(
        Fused(),
        lambda x, w: (
            x @ w["qkv"][:D].T
            + x @ w["qkv"][D : 2 * D].T
            + x @ w["experts.0.weight"]
            + x @ w["experts.1.weight"]
        ),
        tolerance=1e-4,
    )


def test_a_tied_parameter_is_one_parameter_in_a_formula() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(D, D)
            self.head = nn.Linear(D, D, bias=False)
            self.head.weight = self.embed.weight
            self.w = self.embed.weight + self.head.weight

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.head(x) @ self.w

    module = Tied()
    assert module.aliases() == {"head.weight": "embed.weight"}
    check(module, lambda x, w: x @ w["embed.weight"].T @ (2 * w["embed.weight"]), tolerance=1e-4)


def test_dims_of_weights_flow_through_formulas() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Linear(D, "vocab", bias=True)
            self.b = nn.Linear(D, "vocab", bias=False)
            self.ab = op.concat([self.a.weight, self.b.weight], 0)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            y = op.linear(x, self.ab)
            return op.split(y, 2, -1)[0] + self.a.bias

    module = Dynamic()
    assert [str(s) for s in module.ab.shape] == ["2*vocab", str(D)]
    check(module, lambda x, w: x @ w["a.weight"].T + w["a.bias"], vocab=5)


def test_casts_before_and_after_a_formula() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Parameter((D, D), "bfloat16")
            self.w = op.astype(self.a * 2.0, "float32") + op.astype(self.a, "float32")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x @ self.w

    check(Cast(), lambda x, w: x @ ((w["a"] * 2).float() + w["a"].float()), tolerance=1e-4)


def test_a_formula_over_a_foreign_parameter_is_refused_by_name() -> None:
    stranger = nn.Parameter((D, D))

    class Bad(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Parameter((D, D))
            self.w = self.a + stranger

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x @ self.w

    with pytest.raises(
        TraceError,
        match=r"<Parameter float32\[8, 8\]> is not part of the module that is exported\n"
        r"  it is an operand of add in the derived tensor 'w', written at .*test_derived\.py:\d+\n"
        r"  at .*\n  help: assign it to an attribute of the module, or of one below it",
    ):
        Bad().export(SPEC)


def test_a_formula_that_does_not_fit_says_where_it_was_written() -> None:
    with pytest.raises(InferError, match=r"(?s)matmul: inner sizes differ.*test_derived\.py:\d+"):
        One(lambda a, b: op.matmul(a, b[:3]))


def test_the_class_of_a_derived_tensor_is_visible() -> None:
    module = One(FORMULAS["sum"])
    assert repr(module.w) == f"<Tensor float32[{D}, {D}] derived>"
    assert "w: float32[8, 8] derived" in repr(module)
    with pytest.raises(TraceError, match=r"<Tensor float32\[8, 8\] derived> has no value"):
        module.w.torch()
