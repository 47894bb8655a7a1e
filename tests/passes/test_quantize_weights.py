# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: which products are taken, what is kept in memory, and that the error is that of rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from nnfront_models import llama, qwen3_moe
from pass_checks import module

import nnfront as nn
from nnfront import dtypes, op, spec
from nnfront.errors import PassError
from nnfront.passes import lift_transform_params, quantize_weights
from nnfront.quant_format import FORMATS, QuantFormat

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
        == "fp8 has a scale for each output channel, got group_size=32\n  help: leave group_size out, or use one of int4, int8, uint4, uint8"
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


def test_an_unknown_format_is_answered_with_those_that_there_are():
    with pytest.raises(PassError) as caught:
        quantize_weights(exported(), "nf7")
    assert str(caught.value) == (
        "there is no format 'nf7' to quantise weights to\n"
        "  help: use one of 'int4', 'int8', 'fp8', 'uint4', 'uint8', 'fp8_e5m2', 'mxfp4'"
    )


@pytest.mark.parametrize(("name", "levels"), [("uint4", 15), ("uint8", 255)])
def test_zero_points_let_each_group_reach_from_its_least_to_its_greatest(name, levels):
    given = {key: w + 1 for key, w in weights().items()}
    session = nn.compile(
        lift_transform_params(quantize_weights(exported(), name, 16), shared_transform=True)
    ).load(given)
    held = session.weights
    zeros = held["back.weight.zero_points"]
    assert (zeros.dtype, zeros.shape) == (torch.uint8, (D, F // 16))

    def rounded(w: torch.Tensor) -> torch.Tensor:
        groups = w.unflatten(1, (-1, 16))
        low = groups.amin(-1, keepdim=True).clamp(max=0)
        scale = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / levels
        zero = (-low / scale).round()
        return ((((groups / scale).round() + zero).clamp(0, levels) - zero) * scale).flatten(1)

    x, linear = torch.randn(3, D), torch.nn.functional.linear
    expected = linear(
        linear(linear(x, rounded(given["one.weight"]), given["one.bias"]), rounded(given["back.weight"])),
        given["lm_head.weight"],
    )
    torch.testing.assert_close(
        session["plain"](x), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


def test_a_format_that_no_kernel_takes_is_multiplied_dequantised_and_both_sides_are_named():
    x = spec.Tensor(["n", D], "float32")
    ir = lift_transform_params(
        quantize_weights(Model().export({"plain": {"x": x}}), "uint8"), shared_transform=True
    )
    runs = [run for run in nn.compile(ir).program.methods["plain"].body.walk() if run.op == "linear"]
    assert "int8_product: the format is uint8, it takes int8" in runs[0].refused
    assert (
        "int4_product: the format is uint8, it takes int4 or uint4 in any groups along the input axis"
        in runs[0].refused
    )
    assert "dequantize" in nn.compile(ir).explain()
    assert "the format is uint8, it takes int8" in nn.compile(ir).explain()


NF4 = (-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)


def test_a_format_whose_elements_are_looked_up_is_one_more_entry_of_the_table(monkeypatch):
    looked_up = QuantFormat("nf4", 4, "uint8", group_size=32, packing=1, values=NF4)
    monkeypatch.setitem(FORMATS, "nf4", looked_up)
    given = weights()
    executable = nn.compile(lift_transform_params(quantize_weights(exported(), "nf4"), shared_transform=True))
    session = executable.load(given)
    assert session.weights["back.weight.nf4"].shape == (D, F // 2)

    def rounded(w: torch.Tensor) -> torch.Tensor:
        groups = w.unflatten(1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True)
        table = torch.tensor(NF4)
        return (table[((groups / scale).unsqueeze(-1) - table).abs().argmin(-1)] * scale).flatten(1)

    x, linear = torch.randn(3, D), torch.nn.functional.linear
    expected = linear(
        linear(linear(x, rounded(given["one.weight"]), given["one.bias"]), rounded(given["back.weight"])),
        given["lm_head.weight"],
    )
    torch.testing.assert_close(
        session["plain"](x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )
    assert "int8_product: the format is nf4, it takes int8" in executable.explain()


class TestReport:
    def held(self, ir: nn.ir.IRModule, scheme: str) -> dict[str, int]:
        """Bytes of what a session holds, by name."""
        lifted = lift_transform_params(quantize_weights(ir, scheme), shared_transform=True)
        return {
            p.name: math.prod(map(int, p.type.shape)) * dtypes.size_bytes(p.type.dtype)
            for function in lifted.methods
            for p in function.weights
        }

    @pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
    @pytest.mark.parametrize("file", [llama, qwen3_moe], ids=["llama", "qwen3_moe"])
    def test_it_says_what_is_quantised_and_all_bytes_as_a_session_holds_them(self, file, scheme: str):
        ir = file.build(file.TINY).export(file.export_spec(file.TINY))
        report = quantize_weights.report(ir, scheme)
        held = self.held(ir, scheme)
        taken = {name.removesuffix(f".{scheme}") for name in held if name.endswith(f".{scheme}")}
        assert {w.name for w in report.quantized} == taken
        assert sum(w.bytes_after for w in report.weights) == sum(held.values())
        before = lift_transform_params(ir, shared_transform=True)
        assert {w.name for w in report.weights} == {p.name for f in before.methods for p in f.weights}

    def test_experts_heads_routers_and_embeddings_are_named_with_their_reasons(self):
        ir = qwen3_moe.build(qwen3_moe.TINY).export(qwen3_moe.export_spec(qwen3_moe.TINY))
        report = quantize_weights.report(ir, "int4")
        reasons = {w.name: w.reason for w in report.weights}
        assert reasons["lm_head.weight"] == "lm_head (by its name)"
        assert reasons["model.layers.1.mlp.gate.weight"] == "gate (by its name)"
        assert (
            reasons["model.layers.1.mlp.down_weight"] == "experts (whose product takes no quantised weights)"
        )
        assert reasons["model.embed_tokens.weight"] == "embeddings"
        assert reasons["model.layers.0.self_attn.qkv_weight"] == ""
        assert str(report) == (
            "quantised to int4: 6 weights, 172 kB to 26.9 kB; as they are: 66.3 kB of embeddings, 1.54 kB of vectors,"
            " 1.02 kB of gate (by its name), 98.3 kB of experts (whose product takes no quantised weights),"
            " 66.3 kB of lm_head (by its name); all weights: 406 kB to 260 kB"
        )

    def test_a_tied_head_has_both_reasons(self):
        config = replace(llama.TINY, tie_word_embeddings=True)
        report = quantize_weights.report(llama.build(config).export(llama.export_spec(config)), "int8")
        (tied,) = (w for w in report.weights if w.name == "model.embed_tokens.weight")
        assert tied.reason == "embeddings and lm_head (by its name)"
        assert tied.bytes_after == tied.bytes_before

    def test_depths_that_do_not_divide_and_other_readers_are_said(self):
        class Odd(nn.Module):
            def __init__(self) -> None:
                self.odd = nn.Linear(30, 4, bias=False)
                self.table = nn.Parameter([30, 4])

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return self.odd(x) + op.sum(self.table * x[0, 0])

        report = quantize_weights.report(Odd().export({"forward": {"x": spec.Tensor(["n", 30])}}), "int4")
        assert {w.name: w.reason for w in report.weights} == {
            "odd.weight": "weights whose 30 inputs do not divide by 32",
            "table": "weights that multiply reads",
        }
        assert str(report).startswith("quantised to int4: 0 weights, 0 bytes to 0 bytes; as they are: ")

    def test_it_says_what_the_pass_does_where_layers_share_a_function(self):
        ir = llama.build(llama.TINY).export(llama.export_spec(llama.TINY))
        skip = ["lm_head", "model.layers.0.*", "*.o_proj"]
        report = quantize_weights.report(ir, "int8", skip=skip)
        lifted = lift_transform_params(quantize_weights(ir, "int8", skip=skip), shared_transform=True)
        names = {p.name for f in lifted.methods for p in f.weights}
        assert {w.name for w in report.quantized} == {
            name.removesuffix(".int8") for name in names if name.endswith(".int8")
        }
        assert not [w for w in report.quantized if "o_proj" in w.name]

    def test_what_a_model_quantises_itself_is_counted_by_what_it_stores(self):
        class Own(nn.Module):
            def __init__(self) -> None:
                self.weight = nn.Parameter([4, 64])
                self.q, self.scale = op.quantize(self.weight, bits=8)

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return op.linear(x, op.dequantize(self.q, self.scale))

        ir = Own().export({"forward": {"x": spec.Tensor(["n", 64])}})
        (weight,) = quantize_weights.report(ir, "int4").weights
        assert (weight.bytes_before, weight.bytes_after) == (4 * 64 * 4, 4 * 64 + 4 * 4)
