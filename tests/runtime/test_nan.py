# SPDX-License-Identifier: Apache-2.0
"""The check for NaN, where it is asked for: it stops at the op that makes one, and says where that is."""

from __future__ import annotations

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import RunError


class Root(nn.Module):
    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.sqrt(x)


class Model(nn.Module):
    def __init__(self) -> None:
        self.layers = [Root(), Root()]

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for layer in self.layers:
            x = layer(x) - 2.0
        return x


def method():
    ir = Model().export({"forward": {"x": spec.Tensor(["n"], "float32")}})
    return nn.compile(ir).load({})["forward"]


def test_the_first_op_that_makes_a_nan_is_named(monkeypatch):
    monkeypatch.setenv("NNFRONT_CHECK_NAN", "1")
    run = method()
    assert run(torch.tensor([100.0])).tolist() == pytest.approx([8**0.5 - 2])
    with pytest.raises(RunError) as caught:
        run(torch.tensor([100.0, 1.0]))
    text = str(caught.value)
    assert text.startswith("sqrt made a NaN\n  its operands have none\n  at layers.1 in method 'forward' (")
    assert "test_nan.py:16)" in text


def test_a_nan_that_is_given_is_nobodys_fault(monkeypatch):
    monkeypatch.setenv("NNFRONT_CHECK_NAN", "1")
    assert method()(torch.tensor([torch.nan])).isnan().all()


def test_without_the_check_a_nan_goes_through(monkeypatch):
    monkeypatch.delenv("NNFRONT_CHECK_NAN", raising=False)
    assert method()(torch.tensor([1.0])).isnan().all()
