# SPDX-License-Identifier: Apache-2.0
"""Products and a model with float8 weights, for `test_kernels_in_models.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from nnfront_kernels.quantized import quantize_fp8
from nnfront_models import llama

import nnfront as nn
from nnfront import op, spec


def _rounding(run: Any) -> Callable[..., torch.Tensor]:
    """What CUDA's kernel computes, in float64: rows of x rounded to float8, with a scale for each."""

    def rounding(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: None,
        bias: torch.Tensor | None,
        scale: None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        codes, row_scales = quantize_fp8(rows, 1, rows.shape[1])
        y = (codes.double() * row_scales.double()) @ (weight.double() * scales.double()).T
        y = y.view(*x.shape[:-1], len(weight)) + (0 if bias is None else bias.double())
        if "gated" in run.op:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return (y if residual is None else y + residual.double()).to(x.dtype)

    return rounding


def model(dtype: str) -> dict[str, float]:
    """Distances between logits, relative to their norm: a tiny Llama on CUDA's kernels, on the CPU's, in float64, and not quantised."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = dataclasses.replace(llama.TINY, dtype=dtype)
    built = llama.build(config)
    plain = built.export(llama.export_spec(config))
    kind = getattr(torch, dtype)
    weights = {
        name: (torch.randn([int(size) for size in p.shape]) * 0.1).to(kind)
        for name, p in built.named_parameters()
    }
    ids = torch.randint(0, config.vocab_size, (2, 12))

    def logits(ir: Any, target: str = "cpu") -> torch.Tensor:
        lifted = nn.passes.lift_transform_params(ir, shared_transform=True)
        return nn.compile(lifted, target=target).load(weights)["logits"](ids).double()

    quantized = nn.passes.quantize_weights(plain, nn.passes.QuantScheme("fp8", head="keep"))
    got, cpu, exact = logits(quantized, "cuda"), logits(quantized), logits(plain)
    names = {"quantized_product": "rounding_product", "quantized_gated_product": "rounding_gated"}
    for region, name in names.items():
        nn.register_kernel(region, name, _rounding)
    alike = logits(quantized)
    for name in names.values():
        nn.unregister_kernel(name)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    return {
        "rounded alike": distance(got, alike),
        "activations rounded": distance(got, cpu),
        "weights rounded": distance(cpu, exact),
        "both rounded": distance(got, exact),
    }


class Ends(nn.Module):
    """Products with what can come after them."""

    def __init__(self) -> None:
        self.up = nn.Linear(48, 80, bias=True)
        self.down = nn.Linear(48, 16, bias=False)
        self.gate_up = nn.Linear(48, 64, bias=True)

    def plain(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(x)

    def finished(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return op.astype(op.gelu(self.up(x)) + residual, "float32")

    def gated(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.gate_up(x), 2, -1)
        return op.silu(gate) * up


def ends(rows: int) -> list[str]:
    """Compare each method with float64 and a bound for what rounding rows of x may change; the kernels that ran."""
    torch.manual_seed(rows)
    x_spec = {"x": spec.Tensor(["n", 48], "float16")}
    model = Ends()
    model.to("float16")
    ir = model.export(
        {
            "plain": x_spec,
            "finished": {**x_spec, "residual": spec.Tensor(["n", 80], "float16")},
            "gated": x_spec,
        }
    )
    ir = nn.passes.lift_transform_params(nn.passes.quantize_weights(ir, "fp8"), shared_transform=True)
    weights = {
        name: torch.randn([int(size) for size in p.shape]).half() for name, p in model.named_parameters()
    }
    executable = nn.compile(ir, target="cuda")
    session = executable.load(weights)
    x, residual = torch.randn(rows, 48).half(), torch.randn(rows, 80).half()
    scales = x.double().abs().amax(1, keepdim=True) / 448
    change = torch.maximum(x.double().abs() * 2.0**-4, scales * 2.0**-10)

    def product(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        q, s = op.quantize(weights[f"{name}.weight"], axis=1, scale_dtype="float32", dtype="float8_e4m3fn")
        dense = q.double() * s.double()
        bias = weights.get(f"{name}.bias", torch.zeros(1)).double()
        return x.double() @ dense.T + bias, change @ dense.abs().T

    def check(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
        assert got.shape == want.shape
        assert ((got.double() - want).abs() <= bound * (1 + 2.0**-10) + want.abs() * 2.0**-10 + 1e-3).all()

    z, bound = product("down")
    check(session["plain"](x), z, bound)
    z, bound = product("up")
    steepest = 1.13  # of gelu and of silu
    check(session["finished"](x, residual), torch.nn.functional.gelu(z) + residual.double(), steepest * bound)
    z, bound = product("gate_up")
    (gate, up), (off, up_off) = z.chunk(2, -1), bound.chunk(2, -1)
    activated = torch.nn.functional.silu(gate)
    spread = steepest * off * (up.abs() + up_off) + activated.abs() * up_off
    check(session["gated"](x), activated * up, spread)
    return sorted({i.kernel for m in executable.program.methods.values() for i in m.body.instructions})
