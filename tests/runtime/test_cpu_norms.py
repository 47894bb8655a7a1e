# SPDX-License-Identifier: Apache-2.0
"""Norms of a CPU with every kind of weight, in C and in torch, against float64; and that what decodes with them is one call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import in_c, tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.lowering import lower
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure
from nnfront.passes import outline

resolve = resolver("cpu")
BF16, EPSILON = torch.bfloat16, 1e-5
ATTRS = {
    "rms_norm": {"axes": (1,), "epsilon": EPSILON},
    "layer_norm": {"normalized_shape": (1,), "eps": EPSILON},
}
native_only = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")


def exact(kind: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    centered, factor = parts(kind, x)
    y = centered * factor if weight is None else centered * factor * weight.double()
    return y if bias is None else y + bias.double()


def parts(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    return x, (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()


def assert_near(kind: str, y: torch.Tensor, x: torch.Tensor, *vectors: torch.Tensor | None) -> None:
    """The result is rounded; what a mean takes away and a bias adds is off by what float32 has of it."""
    expected, (_, factor) = exact(kind, x, *vectors), parts(kind, x)
    size = expected.abs() + x.double().abs() * factor + 1
    assert y.dtype == x.dtype
    assert ((y.double() - expected).abs() <= expected.abs() * 2**-8 + 4e-6 * size).all()


@pytest.mark.parametrize("by", [pytest.param("C", marks=native_only), "torch"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_norms_of_rows_and_of_sums_agree_with_float64(by: str, data: st.DataObject):
    kind = data.draw(st.sampled_from(list(ATTRS)))
    rows, size = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 2, 15, 16, 17, 64, 100, 257]))
    dtype = data.draw(st.sampled_from([BF16, torch.float32]))
    weight, bias = (torch.randn(size).to(dtype) if data.draw(st.booleans()) else None for _ in range(2))
    x, residual = (data.draw(st.sampled_from([0.1, 1.0, 30.0])) * torch.randn(2, rows, size)).to(BF16)
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch":
            patch.setattr(in_c, "NATIVE", None)
        y = resolve(Run(f"{kind}_last", kind, (), Structure(0), ATTRS[kind]))(x, weight, bias)
        both = Run(
            f"{kind}_of_sum", "norm_residual", (), Structure(fields=(Structure(0), Structure(1))), ATTRS[kind]
        )
        of_sum, total = resolve(both)(x, residual, weight, bias)
    assert torch.equal(total, x + residual)
    assert_near(kind, y, x, weight, bias)
    assert_near(kind, of_sum, total, weight, bias)


@native_only
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ATTRS)
def test_what_is_no_number_is_not_hidden(kind, value):
    x = torch.ones(2, 40).to(BF16)
    x[0, 33] = value
    y = resolve(Run(f"{kind}_last", kind, (), Structure(0), ATTRS[kind]))(x, None, None)
    assert not y[0].isfinite().all()
    assert y[1].isfinite().all()


class Block(nn.Module):
    """Norms as authors write them, between products."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.weight, self.bias = nn.Parameter((32,), "bfloat16"), nn.Parameter((32,), "bfloat16")
        self.scale = 1.0 + op.astype(self.weight, "float32")
        self.up, self.down = (nn.Linear(32, 32, bias=False, dtype="bfloat16") for _ in range(2))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        h = x + self.up(self.norm(x))
        return h + self.down(self.norm(h))

    def norm(self, x: nn.Tensor) -> nn.Tensor:
        if self.kind == "layer_norm":
            return op.layer_norm(x, (32,), self.weight, self.bias, EPSILON)
        return op.rms_norm(x, self.scale, -1, EPSILON)


@native_only
@pytest.mark.parametrize("kind", ATTRS)
def test_norms_with_bias_or_one_plus_weight_are_part_of_one_call(kind, monkeypatch):
    ir = Block(kind).export({"forward": {"x": spec.Tensor(["batch", "seq", 32], "bfloat16")}})
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    weights = {"weight": 0.1 * torch.randn(32), "bias": torch.randn(32)}
    weights |= {name: torch.randn(32, 32) / 6 for name in ("up.weight", "down.weight")}
    weights = {name: value.to(BF16) for name, value in weights.items()}
    executable = nn.compile(ir)
    session = executable.load(weights)
    steps = session["forward"]._route.code.steps
    assert [type(step) for step in steps] == [tape.TapeStep]
    x = torch.randn(2, 1, 32).to(BF16)
    y = session["forward"](x)
    with monkeypatch.context() as patch:
        patch.setattr(tape, "NATIVE", None)
        assert torch.equal(executable.load(weights)["forward"](x), y)
    weight = weights["weight"].double() + (kind == "rms_norm")
    bias = weights["bias"] if kind == "layer_norm" else None
    h = x.double()
    for name in ("up.weight", "down.weight"):
        h = h + F.linear(exact(kind, h, weight, bias), weights[name].double())
    torch.testing.assert_close(y.double(), h, rtol=2**-5, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "weight", "kernel"),
    [
        ("rms_norm", "float32", "rms_norm_of_sum"),
        ("layer_norm", "bfloat16", "layer_norm_of_sum"),
        ("layer_norm", "float32", "layer_norm_of_sum"),
        ("layer_norm", "float16", None),
    ],
)
def test_norms_after_a_sum_get_the_kernel_of_their_kind(kind, weight, kernel):
    class Sum(nn.Module):
        def forward(self, x: nn.Tensor, y: nn.Tensor, w: nn.Tensor, b: nn.Tensor) -> nn.Tensor:
            total = x + y
            if kind == "layer_norm":
                return op.layer_norm(total, (33,), w, b, EPSILON)
            return op.rms_norm(total, w, -1, EPSILON)

    rows, vector = spec.Tensor(["n", 33], "bfloat16"), spec.Tensor([33], weight)
    ir = Sum().export({"forward": {"x": rows, "y": rows, "w": vector, "b": vector}})
    runs = [i for i in lower(outline(ir)).methods["forward"].body.walk() if isinstance(i, Run)]
    if kernel:
        assert [run.kernel for run in runs] == [kernel]
    else:
        assert "layer_norm_last: weight, bias and rows differ in dtype" in runs[-1].refused
