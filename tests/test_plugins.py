# SPDX-License-Identifier: Apache-2.0
"""Kernels that users register, from a file of their own: chosen through the same table, or refused with a reason that is shown."""

from __future__ import annotations

import re
import runpy

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.kernel import Context
from nnfront.errors import LowerError
from nnfront.lower import Run

FILE = '''
import torch
import nnfront as nn
from nnfront.ir import TensorType

calls = []

@nn.ir.op(name="test_double_relu")
def double_relu(x: TensorType, by: float = 2.0) -> TensorType:
    """relu(x) * by."""
    return x

@double_relu.reference
def _(x, by):
    return x.relu() * by

def make(run):
    by = run.attrs.get("by", 2.0)
    def launch(x):
        calls.append(tuple(x.shape))
        return torch.clamp(x, min=0) * by
    return launch

def accepts(run, context):
    dtype = context.tensor(run.inputs[0]).dtype
    return "" if dtype == "float32" else f"it is for float32, x is {dtype}"

nn.register_kernel("test_double_relu", "my_double_relu", make, why="clamped", accepts=accepts)
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The user's file, run."""
    path = tmp_path_factory.mktemp("user") / "kernels.py"
    path.write_text(FILE)
    yield runpy.run_path(str(path))
    nn.unregister_kernel("my_double_relu")
    del nn.ir.OPS["test_double_relu"]


class Model(nn.Module):
    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.test_double_relu(x, by=3.0)


def compiled(dtype: str) -> nn.Executable:
    return nn.compile(Model().export({"forward": {"x": spec.Tensor(["n", 4], dtype)}}))


def test_an_op_of_the_user_runs_by_the_kernel_of_the_user(own):
    executable = compiled("float32")
    own["calls"].clear()
    x = torch.randn(5, 4)
    torch.testing.assert_close(executable.load({})["forward"](x), x.relu() * 3)
    assert own["calls"] == [(5, 4)]
    assert re.search(r"test_double_relu +my_double_relu .*clamped", executable.explain())


def test_where_it_refuses_the_reference_runs_and_explain_says_why(own):
    executable = compiled("float64")
    own["calls"].clear()
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(executable.load({})["forward"](x), x.relu() * 3)
    assert own["calls"] == []
    assert "reference; not my_double_relu: it is for float32, x is float64" in executable.explain()


def test_the_op_survives_the_text_form_and_runs_eagerly(own):
    ir = Model().export({"forward": {"x": spec.Tensor(["n", 4], "float32")}})
    assert nn.ir.first_difference(nn.ir.parse(str(ir)), ir) is None
    x = torch.randn(2, 4)
    torch.testing.assert_close(Model()(x), x.relu() * 3)


def test_a_kernel_for_a_region_takes_it_whole_until_it_is_taken_back():
    class Ended(nn.Module):
        def __init__(self) -> None:
            self.proj = nn.Linear(4, 6, bias=True)

        def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
            return op.silu(self.proj(x)) + y

    seen = []

    def make(run: Run):
        def launch(x, weight, bias, scale, residual):
            seen.append((run.attrs["activation"], scale))
            return torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)) + residual

        return launch

    def accepts(run: Run, context: Context) -> str:
        return "" if run.attrs.get("activation") == "silu" else "only silu"

    ir = Ended().export(
        {"forward": {"x": spec.Tensor(["n", 4], "float32"), "y": spec.Tensor(["n", 6], "float32")}}
    )
    weights = {"proj.weight": torch.randn(6, 4), "proj.bias": torch.randn(6)}
    x, y = torch.randn(3, 4), torch.randn(3, 6)
    plain = nn.compile(ir).load(weights)["forward"](x, y)
    nn.register_kernel("product", "my_product", make, accepts=accepts)
    try:
        executable = nn.compile(ir)
        (run,) = executable.program.methods["forward"].body.instructions
        assert (run.op, run.kernel, run.why) == ("product", "my_product", "registered")
        torch.testing.assert_close(executable.load(weights)["forward"](x, y), plain)
        assert seen == [("silu", None)]
    finally:
        nn.unregister_kernel("my_product")
    assert "my_product" not in nn.compile(ir).explain()


def test_the_kernel_registered_last_is_asked_first():
    def constant(value: float):
        return lambda run: lambda x: torch.full_like(x, value)

    class Exp(nn.Module):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.exp(x)

    ir = Exp().export({"forward": {"x": spec.Tensor([2], "float32")}})
    nn.register_kernel("exp", "ones", constant(1.0))
    nn.register_kernel("exp", "twos", constant(2.0))
    try:
        assert nn.compile(ir).load({})["forward"](torch.zeros(2)).tolist() == [2, 2]
        nn.unregister_kernel("twos")
        assert nn.compile(ir).load({})["forward"](torch.zeros(2)).tolist() == [1, 1]
    finally:
        nn.unregister_kernel("ones")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "linear_bfloat16"},
            "there is a kernel 'linear_bfloat16' already\n  help: choose another name",
        ),
        (
            {"name": "x", "target": "tpu"},
            "there is no target 'tpu' to register a kernel for\n  help: targets are 'cpu'",
        ),
    ],
)
def test_what_cannot_be_registered(arguments, message):
    with pytest.raises(LowerError) as caught:
        nn.register_kernel("exp", make=lambda run: torch.exp, **arguments)
    assert str(caught.value).startswith(message)


def test_a_name_that_was_not_registered_cannot_be_taken_back():
    with pytest.raises(LowerError, match=r"^no kernel 'linear_bfloat16' was registered for 'cpu'$"):
        nn.unregister_kernel("linear_bfloat16")


def test_an_external_function_keeps_its_body_and_runs_by_the_kernel_of_its_name():
    text = """
        external def mine(x: input float32[4]) -> float32[4] {
            y: float32[4] = exp(x)
            return y
        }
        def main(x: input float32[4]) -> float32[4] {
            y: float32[4] = @mine(x)
            return y
        }
    """
    x = torch.randn(4)
    torch.testing.assert_close(nn.compile(nn.ir.parse(text)).load({})["main"](x), x.exp())
    nn.register_kernel("mine", "my_external", lambda run: lambda x: x.exp() + 0.0)
    try:
        executable = nn.compile(nn.ir.parse(text))
        assert [i.kernel for i in executable.program.methods["main"].body.instructions] == ["my_external"]
        torch.testing.assert_close(executable.load({})["main"](x), x.exp())
    finally:
        nn.unregister_kernel("my_external")
