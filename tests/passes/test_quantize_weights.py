# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: which products are taken, what is kept in memory, and that the error is that of rounding."""

from __future__ import annotations

import pytest
import torch
from pass_checks import module

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import PassError
from nnfront.passes import lift_transform_params, quantize_weights

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


def exported():
    x = spec.Tensor(["n", D], "float32")
    return Model().export({"both": {"x": x}, "plain": {"x": x}})


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn([int(s) for s in p.shape]) for name, p in Model().named_parameters()}


@pytest.mark.parametrize(("scheme", "levels"), [("int4", 7), ("int8", 127)])
@pytest.mark.parametrize("group", [None, 16])
def test_results_are_off_by_no_more_than_rounding_to_so_many_levels(scheme, levels, group):
    given = weights()
    ir = quantize_weights(exported(), scheme, group)
    session = nn.compile(lift_transform_params(ir, shared_transform=True)).load(given)
    size = group or (32 if scheme == "int4" else None)

    def rounded(w: torch.Tensor) -> torch.Tensor:
        groups = w.unflatten(1, (-1, size or w.shape[1]))
        scale = groups.abs().amax(-1, keepdim=True) / levels
        return ((groups / scale).round() * scale).flatten(1)

    x = torch.randn(3, D)
    linear = torch.nn.functional.linear
    expected = linear(
        linear(linear(x, rounded(given["one.weight"]), given["one.bias"]), rounded(given["back.weight"])),
        given["lm_head.weight"],
    )
    torch.testing.assert_close(
        session["plain"](x), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_weights_have_one_float32_scale_for_each_row_and_are_off_by_a_sixteenth(dtype):
    model = Model()
    model.to(dtype)
    x = spec.Tensor(["n", D], dtype)
    ir = quantize_weights(model.export({"plain": {"x": x}}), "fp8")
    given = {name: w.to(getattr(torch, dtype)) for name, w in weights().items()}
    session = nn.compile(lift_transform_params(ir, shared_transform=True)).load(given)
    held = session.weights
    for name in ("one", "back"):
        q, scales = held[f"{name}.weight.fp8"], held[f"{name}.weight.scales"]
        dense = given[f"{name}.weight"].double()
        assert (q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scales.shape == (len(dense), 1)
        error = (q.double() * scales.double() - dense).abs()
        assert (error <= torch.maximum(dense.abs() * 2.0**-4, scales.double() * 2.0**-10) * 1.0001).all()
    linear = torch.nn.functional.linear
    stored = {
        name: held[f"{name}.weight.fp8"].double() * held[f"{name}.weight.scales"].double()
        for name in ("one", "back")
    }
    x = torch.randn(3, D).to(getattr(torch, dtype))
    expected = linear(
        linear(linear(x.double(), stored["one"], given["one.bias"].double()), stored["back"]),
        given["lm_head.weight"].double(),
    )
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(
        session["plain"](x).double(), expected, rtol=0, atol=8 * eps * float(expected.abs().max())
    )


def test_float8_has_no_groups():
    with pytest.raises(PassError) as caught:
        quantize_weights(exported(), "fp8", 32)
    assert (
        str(caught.value)
        == "fp8 has a scale for each output channel, got group_size=32\n  help: leave group_size out, or use int8 or int4"
    )


def test_fused_weights_are_stored_once_in_few_bits_and_the_head_as_it_is():
    executable = nn.compile(
        lift_transform_params(quantize_weights(exported(), "int4"), shared_transform=True)
    )
    held = executable.load(weights()).weights
    kept = {name: str(t.dtype).removeprefix("torch.") for name, t in held.items()}
    assert sorted(kept.values()) == ["float32"] * 5 + ["uint8"] * 3
    assert [n for n, t in held.items() if t.shape == (40, D)] == ["lm_head.weight"]
    bits = sum(t.nbytes for t in held.values() if t.dtype == torch.uint8) * 8
    assert bits == 4 * (2 * F * D + F * D + F * D)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_twice_is_once(scheme):
    once = quantize_weights(exported(), scheme)
    assert quantize_weights(once, "int8") is once


@pytest.mark.parametrize(
    "text",
    [
        "def main[n](x: input float32[n, 4], w: input float32[6, 4]) -> float32[n, 6] { y: float32[n, 6] = linear(x, w) return y }",
        "def main[n](x: input float32[n, 4], w: weight float32[n, 4]) -> float32[n, n] { y: float32[n, n] = linear(x, w) return y }",
        "def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] { y: float32[n, 6] = linear(x, w) return y }",
    ],
    ids=["an input", "sizes that are not known", "an axis that groups do not divide"],
)
def test_what_is_left_as_it_is(text):
    ir = module(text)
    assert quantize_weights(ir, "int4") is ir


def test_modules_can_be_left_out():
    ir = exported()
    assert quantize_weights(ir, "int8", skip=["*", ""]) is ir
    some = quantize_weights(ir, "int8", skip=["back", "lm_head"])
    kept = lift_transform_params(some, shared_transform=True)["plain"].weights
    assert {"back.weight", "lm_head.weight"} < {p.name for p in kept}


def test_a_scheme_that_does_not_exist_is_named():
    with pytest.raises(PassError) as caught:
        quantize_weights(exported(), "int3")
    assert (
        str(caught.value)
        == "there is no scheme 'int3' to quantise weights with\n  help: use one of 'int4', 'int8', 'fp8'"
    )
