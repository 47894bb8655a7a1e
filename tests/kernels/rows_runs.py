# SPDX-License-Identifier: Apache-2.0
"""Functions that are computed row by row, compiled for CUDA and for the CPU, for `test_device_rows.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from nnfront_models import llama, qwen3_moe

import nnfront as nn
from nnfront import op, spec

SIZE = 24
HEADS = 3


def _halves(x: Any) -> Any:
    return op.split(x, 2, -1)


def _gated(x: Any, curve: Callable[[Any], Any]) -> Any:
    gate, up = _halves(x)
    return curve(gate) * up


def _sum_again(self: Any, x: Any, y: Any, w: Any) -> Any:
    total = x + y
    return op.rms_norm(total, w, -1, 1e-3), total


def _heads(self: Any, x: Any, w: Any) -> Any:
    q, k = _halves(x)
    shape = [*x.shape[:-1], HEADS, SIZE // HEADS]
    return op.rms_norm(op.reshape(q, shape), w, -1), op.rms_norm(op.reshape(k, shape), w, -1)


X, HALF = ["batch", "seq", SIZE], ["batch", "seq", SIZE // 2]
W = [SIZE]
CASES: dict[str, tuple[Callable[..., Any], dict[str, list[Any]], str]] = {
    "rms norm": (lambda _, x, w: op.rms_norm(x, w, -1, 1e-3), {"x": X, "w": W}, "triton_rms_norm"),
    "rms norm of one axis": (lambda _, x, w: op.rms_norm(x, w, 0), {"x": W, "w": W}, "triton_rms_norm"),
    "norm of heads": (_heads, {"x": ["batch", "seq", 2 * SIZE], "w": [SIZE // HEADS]}, "triton_rms_norm"),
    "norm of a transpose": (
        lambda _, x, w: op.rms_norm(op.permute_dims(x, (0, 2, 1)), w, -1),
        {"x": ["batch", SIZE, "seq"], "w": W},
        "triton_rms_norm",
    ),
    "norm of a sum": (
        lambda _, x, y, w: op.rms_norm(x + y, w, -1),
        {"x": X, "y": X, "w": W},
        "triton_norm_residual",
    ),
    "norm of a sum that is read again": (_sum_again, {"x": X, "y": X, "w": W}, "triton_norm_residual"),
    "norm of a sum of parts": (
        lambda _, x, y, w: op.rms_norm(_halves(x)[1] + y, w, -1),
        {"x": X, "y": HALF, "w": [SIZE // 2]},
        "triton_norm_residual",
    ),
    "layer norm": (
        lambda _, x, w, b: op.layer_norm(x, SIZE, w, b, 1e-3),
        {"x": X, "w": W, "b": W},
        "triton_layer_norm",
    ),
    "rms norm alone": (lambda _, x: op.rms_norm(x, None, -1), {"x": X}, "triton_rms_norm"),
    "rms norm of a sum, alone": (
        lambda _, x, y: op.rms_norm(x + y, None, -1),
        {"x": X, "y": X},
        "triton_norm_residual",
    ),
    "layer norm alone": (lambda _, x: op.layer_norm(x, SIZE), {"x": X}, "triton_layer_norm"),
    "layer norm of a sum": (
        lambda _, x, y, w, b: (s := x + y) * op.layer_norm(s, SIZE, w, b, 1e-3),
        {"x": X, "y": X, "w": W, "b": W},
        "triton_norm_residual",
    ),
    "softmax": (lambda _, x: op.softmax(x, -1), {"x": X}, "triton_softmax"),
    "softmax over a dim": (lambda _, x: op.softmax(x, -1), {"x": ["batch", "seq"]}, "triton_softmax"),
    "softmax of a half": (lambda _, x: op.softmax(_halves(x)[0], -1), {"x": X}, "triton_softmax"),
    "silu of a half": (lambda _, x: _gated(x, op.silu), {"x": X}, "triton_gated_activation"),
    "gelu of a half": (lambda _, x: _gated(x, op.gelu), {"x": X}, "triton_gated_activation"),
    "tanh gelu, the other way around": (
        lambda _, x, y: y * op.gelu(x, "tanh"),
        {"x": X, "y": X},
        "triton_gated_activation",
    ),
    "swiglu": (lambda _, x, y: op.swiglu(x, y), {"x": X, "y": X}, "triton_gated_activation"),
    "geglu": (lambda _, x, y: op.geglu(x, y, "tanh"), {"x": X, "y": X}, "triton_gated_activation"),
    "silu times what it is of": (lambda _, x: op.silu(x) * x, {"x": X}, "triton_gated_activation"),
    "product added to its own rows": (
        lambda _, x, v: x + op.linear(x, v),
        {"x": X, "v": [SIZE, SIZE]},
        "triton_product",
    ),
    "gate of a product": (
        lambda _, x, v, y: op.silu(op.linear(x, v)) * y,
        {"x": X, "v": [SIZE, SIZE], "y": X},
        "triton_gated_activation",
    ),
}
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, list[Any]], str]] = {
    "axis": (lambda _, x, w: op.rms_norm(x, w, 1), {"x": ["n", 4, 5], "w": [4]}, "it is not over the last axis alone, of a known size"),
    "size": (lambda _, x, w: op.rms_norm(x, w, -1), {"x": ["n", "m"], "w": ["m"]}, "it is not over the last axis alone, of a known size"),
    "bias": (lambda _, x, w: op.rms_norm(x, w, -1, 1e-3, w), {"x": X, "w": W}, "triton_rms_norm: it has a bias"),
    "several axes": (lambda _, x: op.layer_norm(x, (4, 5)), {"x": ["n", 4, 5]}, "triton_layer_norm: it is not over the last axis alone"),
    "number": (lambda _, x, w: op.rms_norm(x + 1.0, w, -1), {"x": X, "w": W}, "triton_norm_residual: it is no sum of two tensors"),
    "broadcast": (lambda _, x, w: op.rms_norm(x + w, w, -1), {"x": X, "w": W}, "not triton_norm_residual: an operand of the sum is broadcast or converted"),
    "sum, bias": (lambda _, x, y, w, b: op.rms_norm(x + y, w, -1, 1e-3, b), {"x": X, "y": X, "w": W, "b": W}, "triton_norm_residual: the norm has a bias"),
    "softmax axis": (lambda _, x: op.softmax(x, 1), {"x": X}, "triton_softmax: it is not over the last axis"),
    "relu": (lambda _, x, y: op.relu(x) * y, {"x": X, "y": X}, "triton_gated_activation: there is no relu in the kernel"),
}  # fmt: skip
FLOAT64: dict[str, str] = {
    "rms norm": "triton_rms_norm: the weight is float64",
    "layer norm alone": "triton_layer_norm: dtype must be one of",
    "layer norm": "triton_layer_norm: the weight is float64",
    "softmax": "triton_softmax: dtype must be one of",
    "swiglu": "triton_gated_activation: dtype must be one of",
}


def compiled(case: tuple[Any, dict[str, list[Any]], str], dtype: str, target: str = "cuda") -> nn.Executable:
    forward, inputs, _ = case
    model = type("Rows", (nn.Module,), {"main": forward})()
    types = {name: spec.Tensor(shape, dtype) for name, shape in inputs.items()}
    return nn.compile(model.export({"main": types}), target=target)


def explained(table: str, name: str, dtype: str) -> str:
    return compiled({"refused": REFUSED, "taken": CASES}[table][name], dtype).explain()


def agree(name: str, dtype: str, batch: int) -> set[str]:
    """Kernels that run a case; AssertionError unless it gives what the CPU gives, each time, also for parts of wider tensors."""
    torch.manual_seed(0)
    case = CASES[name]
    executable = compiled(case, dtype)
    a, b = (e.load({})["main"] for e in (executable, compiled(case, dtype, "cpu")))
    given = {}
    for key, shape in case[1].items():
        sizes = [{"batch": batch, "seq": 7}.get(size, size) for size in shape]
        wide = torch.randn([*sizes[:-1], sizes[-1] + 8]).to(getattr(torch, dtype)) * 3
        given[key] = wide[..., : sizes[-1]] if len(sizes) > 1 else wide[: sizes[-1]].clone()
    # A half rounds to 5e-4; a kernel rounds once where the CPU rounds after every op.
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype == "float16" else {"rtol": 1e-5, "atol": 1e-5}
    got, expected, again = a(**given), b(**given), a(**given)
    torch.testing.assert_close(got, expected, **tolerance)
    torch.testing.assert_close(got, again, rtol=0, atol=0)
    return {i.kernel for i in executable.program.methods["main"].body.instructions}


def model_kernels(file: str) -> dict[str, list[tuple[str, str, str]]]:
    """For each method of a model file's tiny model: op, kernel and last name of the module, of every instruction that computes rows."""
    module: Any = {"llama": llama, "qwen3_moe": qwen3_moe}[file]
    config = dataclasses.replace(module.TINY, dtype="float16")
    executable = nn.compile(module.build(config).export(module.export_spec(config)), target="cuda")
    ops = ("rms_norm", "softmax")
    return {
        name: [
            (i.op, i.kernel, i.module.split(".")[-1])
            for i in m.body.instructions
            if i.op in ops or i.op.startswith("norm_")
        ]
        for name, m in executable.program.methods.items()
    }


class Feed(nn.Module):
    """Gate and up with weights of their own."""

    def __init__(self) -> None:
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False, dtype="float16") for _ in range(2))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.silu(self.gate_proj(x)) * self.up_proj(x)


def feed(quant: str | None) -> set[str]:
    """Kernels that run it; AssertionError unless it gives what the CPU gives."""
    torch.manual_seed(0)
    ir = Feed().export({"forward": {"x": spec.Tensor(["n", 64], "float16")}})
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    weights = {f"{name}_proj.weight": torch.randn(96, 64).half() / 8 for name in ("gate", "up")}
    device, x = nn.compile(ir, target="cuda"), torch.randn(5, 64).half()
    got, expected = (e.load(weights)["forward"](x) for e in (device, nn.compile(ir)))
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)
    return {i.kernel for i in device.program.methods["forward"].body.instructions}


class Residual(nn.Module):
    """A product in 16 bits added to what is kept in 32, as Mamba-2 keeps its residual."""

    def __init__(self) -> None:
        self.proj = nn.Linear(64, 96, bias=False, dtype="float16")

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return residual + self.proj(x)


def wide_residual(quant: str | None) -> tuple[set[str], str, float]:
    """Kernels that run it, the dtype of the sum, and how far it is at most from the sum in float64, relative to the residual."""
    torch.manual_seed(0)
    types = {"x": spec.Tensor(["n", 64], "float16"), "residual": spec.Tensor(["n", 96], "float32")}
    ir = Residual().export({"forward": types})
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    weight, x, residual = (
        torch.randn(96, 64).half() / 64,
        torch.randn(5, 64).half(),
        1000 + torch.randn(5, 96),
    )
    device = nn.compile(nn.passes.lift_transform_params(ir), target="cuda")
    found = device.load({"proj.weight": weight})["forward"](x, residual)
    expected = residual.double() + x.double() @ weight.double().T
    off = float(((found.double() - expected).abs() / expected).max())
    return {i.kernel for i in device.program.methods["forward"].body.instructions}, str(found.dtype), off


class Experts(nn.Module):
    """Four experts whose products have biases, gate above up if they have gates."""

    def __init__(self, **options: Any) -> None:
        width = 48 * (1 + options.get("gated", True))
        sizes = {
            "gate_up": (4, width, 32),
            "down": (4, 32, 48),
            "gate_up_bias": (4, width),
            "down_bias": (4, 32),
        }
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(size, "float16"))
        self.options = options

    def forward(self, x: nn.Tensor, chosen: nn.Tensor, shares: nn.Tensor) -> nn.Tensor:
        biases = self.gate_up_bias, self.down_bias
        return op.moe_mlp(x, self.gate_up, self.down, chosen, shares, *biases, **self.options)


EXPERTS: dict[str, dict[str, Any]] = {
    "gated": {"activation": "gelu"},
    "alternating, with limits": {"interleaved": True, "alpha": 1.702, "limit": 0.5, "up_offset": 1.0},
    "with limits": {"alpha": 1.702, "limit": 0.5, "up_offset": 1.0},
    "without a gate": {"gated": False, "activation": "relu2"},
}


def experts(name: str) -> set[str]:
    """Kernels that run experts; AssertionError unless they give what the CPU gives."""
    torch.manual_seed(0)
    types = {"x": spec.Tensor(["n", 32], "float16"), "chosen": spec.Tensor(["n", 2], "int64")}
    model = Experts(**EXPERTS[name])
    ir = model.export({"forward": {**types, "shares": spec.Tensor(["n", 2], "float16")}})
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    weights = {
        name: torch.randn([int(s) for s in p.shape]).half() / 8 for name, p in model.named_parameters()
    }
    given = torch.randn(5, 32).half(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2).half()
    device = nn.compile(ir, target="cuda")
    got, expected = (e.load(weights)["forward"](*given) for e in (device, nn.compile(ir)))
    torch.testing.assert_close(got, expected, rtol=8e-3, atol=8e-3)
    return {i.kernel for i in device.program.methods["forward"].body.instructions}
