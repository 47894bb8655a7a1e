# SPDX-License-Identifier: Apache-2.0
"""Sums that a product or a norm of a CPU makes by itself, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import nnfront as nn
from nnfront import op
from nnfront.backends.cpu import in_c
from nnfront.backends.lowering import lower
from nnfront.backends.table import resolver
from nnfront.ir import IRModule
from nnfront.lower import Run
from nnfront.passes import outline

resolve = resolver("cpu")

BF16 = torch.bfloat16
EPSILON = 1e-6


class Residual(nn.Module):
    def __init__(self, bias: bool) -> None:
        self.proj = nn.Linear(10, 14, bias=bias)

    def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        return y + self.proj(x)


class Norm(nn.Module):
    def __init__(self, reads_sum: bool) -> None:
        self.norm = nn.RMSNorm(33, -1, EPSILON, bias=False)
        self.reads_sum = reads_sum

    def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        total = x + y
        normed = self.norm(total)
        return op.concat([normed, total], -1) if self.reads_sum else normed


def exported(model: nn.Module, x: list, y: list, dtype: str = "bfloat16") -> IRModule:
    return model.to(dtype).export({"forward": {"x": nn.spec.Tensor(x, dtype), "y": nn.spec.Tensor(y, dtype)}})


def runs(ir: IRModule) -> list[Run]:
    return [i for i in lower(outline(ir)).methods["forward"].body.walk() if isinstance(i, Run)]


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [0, 1, 8, 9])
def test_a_product_with_its_residual_agrees_with_float64(rows, bias, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    (run,) = runs(exported(Residual(bias), ["n", 10], ["n", 14]))
    assert run.kernel == "finished_product"
    x, w, added = (
        torch.randn(rows, 10).to(BF16),
        torch.randn(14, 10).to(BF16),
        torch.randn(14, rows).to(BF16).T,
    )
    b = torch.randn(14).to(BF16) if bias else None
    kept = added.clone()
    got = resolve(run)(x, w, b, None, added)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double()) + added.double()
    sizes = (
        F.linear(x.double().abs(), w.double().abs(), None if b is None else b.double().abs())
        + added.double().abs()
    )
    assert got.dtype == BF16
    assert ((got.double() - exact).abs() <= 2**-8 * (exact.abs() + 2 * sizes)).all()
    assert torch.equal(added, kept)


class Cast(nn.Module):
    def __init__(self, bias: bool) -> None:
        self.proj = nn.Linear(10, 14, bias=bias)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.astype(self.proj(x), "float32")


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [0, 1, 8, 9])
def test_a_product_that_is_cast_is_not_rounded_before_in_c(rows, bias, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    ir = Cast(bias).to("bfloat16").export({"forward": {"x": nn.spec.Tensor(["n", 10], "bfloat16")}})
    (run,) = runs(ir)
    assert run.kernel == "finished_product"
    x, w, b = (
        torch.randn(rows, 10).to(BF16),
        torch.randn(14, 10).to(BF16),
        torch.randn(14).to(BF16) if bias else None,
    )
    got = resolve(run)(x, w, b, None, None)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    sizes = F.linear(x.double().abs(), w.double().abs(), None if b is None else b.double().abs())
    assert got.dtype == torch.float32
    is_in_c = by == "C" and in_c.NATIVE is not None and rows > 0
    assert ((got.double() - exact).abs() <= (2**-22 if is_in_c else 2**-8) * sizes).all()


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize("reads_sum", [True, False], ids=["sum read", "sum not read"])
@pytest.mark.parametrize("rows", [0, 1, 8, 9])
def test_the_norm_of_a_sum_is_the_sum_and_then_the_norm(rows, reads_sum, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    run = runs(exported(Norm(reads_sum), ["n", 33], ["n", 33]))[0]
    assert run.kernel == "rms_norm_of_sum"
    x, y, w = (torch.randn(shape).to(BF16) for shape in ((rows, 33), (33, rows), (33,)))
    got = resolve(run)(x, y.T, w, None)
    total = x + y.T
    exact = torch.rms_norm(total.double(), (33,), w.double(), EPSILON)
    normed = got[0] if reads_sum else got
    assert normed.dtype == BF16
    assert ((normed.double() - exact).abs() <= exact.abs() * 2**-7).all()
    if reads_sum:
        assert torch.equal(got[1], total)


@pytest.mark.parametrize(
    ("dtype", "residual", "reason"),
    [
        ("float32", ["n", 14], "finished_product: weight is float32"),
        ("bfloat16", [14], "finished_product: the residual is broadcast"),
        ("bfloat16", [1, 14], "finished_product: the residual is broadcast"),
    ],
)
def test_other_residuals_are_added_by_torch_and_say_why(dtype, residual, reason):
    product, add = runs(exported(Residual(True), ["n", 10], residual, dtype))
    assert product.op == "linear"
    assert (add.kernel, add.refused) == ("add", (reason,))


class More(Residual):
    def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        return y + 2.0 * self.proj(x)


def test_what_comes_between_a_product_and_its_residual_is_no_part_of_it():
    found = runs(exported(More(True), ["n", 10], ["n", 14]))
    assert [run.op for run in found] == ["linear", "multiply", "add"]
    assert found[-1].refused == (
        "finished_product: more than an activation, a residual and a cast comes after it",
    )


class Activated(Residual):
    def __init__(self, act: Callable[[nn.Tensor], nn.Tensor]) -> None:
        super().__init__(bias=True)
        self.act = act

    def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        return y + self.act(self.proj(x))


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize(
    ("act", "exact"),
    [
        (op.silu, F.silu),
        (op.relu, F.relu),
        (op.gelu, F.gelu),
        (lambda x: op.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    ],
    ids=["silu", "relu", "gelu", "gelu_tanh"],
)
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 65])
def test_an_activation_before_the_residual_is_part_of_the_product(rows, act, exact, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    (run,) = runs(exported(Activated(act), ["n", 10], ["n", 14]))
    assert run.kernel == "finished_product"
    x, w, b, added = (torch.randn(s).to(BF16) for s in ((rows, 10), (14, 10), (14,), (rows, 14)))
    got = resolve(run)(x, w, b, None, added)
    expected = exact(F.linear(x.double(), w.double(), b.double())) + added.double()
    sizes = F.linear(x.double().abs(), w.double().abs(), b.double().abs()) + added.double().abs()
    assert got.dtype == BF16
    assert ((got.double() - expected).abs() <= 2**-8 * (expected.abs() + 3 * sizes)).all()


@pytest.mark.parametrize(
    ("x", "y", "dtype", "reason"),
    [
        (
            ["n", 33],
            [33],
            "bfloat16",
            "rms_norm_of_sum: the sum is not of two tensors in bfloat16 of one shape",
        ),
        (
            ["n", 33],
            ["n", 33],
            "float32",
            "rms_norm_of_sum: the sum is not of two tensors in bfloat16 of one shape",
        ),
    ],
)
def test_norms_of_other_sums_are_two_calls_and_say_why(x, y, dtype, reason):
    add, norm = runs(exported(Norm(False), x, y, dtype))
    assert (add.kernel, norm.kernel) == ("add", "rms_norm_last")
    assert reason in norm.refused
