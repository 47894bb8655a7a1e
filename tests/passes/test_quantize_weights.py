# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: which products are taken, what is kept in memory, and that the error is that of rounding."""

from __future__ import annotations

import math

import pytest
import torch
from few_of import few_of
from nnfront_models import qwen3_moe
from pass_checks import module
from quantize_cases import D, F, Model, exported, stands_for, weights

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError, PassError
from nnfront.lower import Run
from nnfront.passes import QuantScheme, lift_transform_params, quantize_weights
from nnfront.quant_format import FORMATS, QuantFormat


def test_results_are_off_by_no_more_than_rounding_to_so_many_levels():
    given = weights()
    ir = quantize_weights(exported(), QuantScheme("int8", head="keep"))
    session = nn.compile(lift_transform_params(ir, shared_transform=True)).load(given)

    def rounded(w: torch.Tensor) -> torch.Tensor:
        scale = w.abs().amax(-1, keepdim=True) / 127
        return (w / scale).round() * scale

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
    ir = quantize_weights(model.export({"plain": {"x": x}}), QuantScheme("fp8", head="keep"))
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
        quantize_weights(exported(), "fp8:32")
    assert str(caught.value) == (
        "fp8 has a scale for each output, got 'fp8:32'\n  help: write fp8, fp8:tensor, fp8:block, or use one of int4, int8, uint4, uint8"
    )


def test_fused_weights_are_stored_once_in_few_bits_and_the_head_as_it_is_if_the_scheme_says_so():
    scheme = QuantScheme("int4", head="keep")
    executable = nn.compile(
        lift_transform_params(quantize_weights(exported(), scheme), shared_transform=True)
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
        "def main[n](x: input float32[n, 4], w: weight float32[6, 1]) -> float32[n, 4] { y: float32[n, 4] = multiply(x, x) return y }",
    ],
    ids=["an input", "sizes that are not known", "no product"],
)
def test_what_is_left_as_it_is(text):
    ir = module(text)
    assert quantize_weights(ir, "int4") is ir


def test_modules_can_be_left_out():
    ir = exported()
    assert quantize_weights(ir, QuantScheme("int8", rules=(("*", "keep"),))) is ir
    some = quantize_weights(ir, QuantScheme("int8", "keep", (("back", "keep"),)))
    kept = lift_transform_params(some, shared_transform=True)["plain"].weights
    assert {"back.weight", "lm_head.weight"} < {p.name for p in kept}


def test_a_scheme_that_keeps_weights_says_so_of_each():
    report = quantize_weights.report(exported(), QuantScheme("keep", activations="int8"))
    assert {w.reason for w in report.weights if w.role} == {"kept by the scheme"}
    assert " of product (kept by the scheme)" in str(report)


def test_an_unknown_format_is_answered_with_those_that_there_are():
    with pytest.raises(PassError) as caught:
        quantize_weights(exported(), "nf7")
    assert str(caught.value) == (
        "there is no format 'nf7' to quantise weights to\n"
        "  help: use one of 'int4', 'int8', 'fp8', 'uint4', 'uint8', 'fp8_e5m2', 'mxfp4', 'nvfp4', 'nl4', "
        "'q4_k', 'q5_k', 'q6_k'"
    )


def test_zero_points_let_each_output_reach_from_its_least_to_its_greatest():
    given = {key: w + 1 for key, w in weights().items()}
    ir = quantize_weights(exported(), QuantScheme("uint8", "keep"))
    session = nn.compile(lift_transform_params(ir, shared_transform=True)).load(given)
    zeros = session.weights["back.weight.zero_points"]
    assert (zeros.dtype, zeros.shape) == (torch.uint8, (D, 1))

    def rounded(w: torch.Tensor) -> torch.Tensor:
        low = w.amin(-1, keepdim=True).clamp(max=0)
        scale = (w.amax(-1, keepdim=True).clamp(min=0) - low) / 255
        zero = (-low / scale).round()
        return (((w / scale).round() + zero).clamp(0, 255) - zero) * scale

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
    executable = nn.compile(
        lift_transform_params(quantize_weights(exported(), QuantScheme("nf4", "keep")), shared_transform=True)
    )
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


class Embedded(nn.Module):
    """An embedding and a head, of one weight or of two."""

    def __init__(self, tied: bool, by_matmul: bool = False) -> None:
        self.embed, self.layer = nn.Embedding(40, D), nn.Linear(D, D, bias=False)
        self.out = nn.Linear(D, 40, bias=False)
        self.by_matmul = by_matmul
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        x = self.layer(self.embed(tokens))
        return op.matmul(x, op.permute_dims(self.out.weight)) if self.by_matmul else self.out(x)


@pytest.mark.parametrize("by_matmul", few_of([False, True]))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "head", ["int8", "int8:16", "int4", "uint4", "fp8", "mxfp4", "nvfp4", "nl4", "uint8"]
)
def test_a_head_and_an_embedding_are_stored_once_where_they_are_tied_and_compute_what_they_stand_for(
    head, tied, by_matmul
):
    model = Embedded(tied, by_matmul)
    ir = model.export({"forward": {"tokens": spec.Tensor(["n"], "int64")}})
    scheme = QuantScheme("int4", head)
    report = quantize_weights.report(ir, scheme)
    roles = {w.name: (w.role, w.stored) for w in report.quantized}
    expected = (
        {"embed.weight": "embedding and head"}
        if tied
        else {"embed.weight": "embedding", "out.weight": "head"}
    )
    assert roles == {"layer.weight": ("product", "int4"), **{k: (v, head) for k, v in expected.items()}}
    given = {name: torch.randn(tuple(map(int, p.shape))) for name, p in model.named_parameters()}
    session = nn.compile(lift_transform_params(quantize_weights(ir, scheme), shared_transform=True)).load(
        given
    )
    assert sum(w.bytes_after for w in report.weights) == sum(t.nbytes for t in session.weights.values())

    tokens = torch.tensor([3, 0, 39, 3])
    rows = stands_for(given["embed.weight"], head)[tokens]
    out = stands_for(given["embed.weight" if tied else "out.weight"], head)
    expected_y = rows @ stands_for(given["layer.weight"], "int4").T @ out.T
    torch.testing.assert_close(session["forward"](tokens), expected_y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", few_of(["int4", "int8", "uint4:16", "int8:16", "fp8", "mxfp4", "nl4"], 3))
def test_experts_are_stored_in_few_bits_and_run_as_they_are_stored(scheme):
    model = qwen3_moe.build(qwen3_moe.TINY)
    ir = model.export(qwen3_moe.export_spec(qwen3_moe.TINY))
    ir_q = quantize_weights(ir, QuantScheme(scheme, "keep"))
    executable = nn.compile(lift_transform_params(ir_q, shared_transform=True))
    runs = [run for run in executable.program.methods["decode"].body.walk() if isinstance(run, Run)]
    assert "quantized_experts_sorted" in {run.kernel for run in runs}
    assert not {"dequantize", "unpack_int4"} & {run.op for run in runs}
    torch.manual_seed(0)
    given = {n: torch.randn(tuple(map(int, p.shape))) * 0.2 for n, p in model.named_parameters()}
    kept = {w.name for w in quantize_weights.report(ir, QuantScheme(scheme, "keep")).weights if not w.format}
    rounded = {n: w if n in kept else stands_for(w, scheme) for n, w in given.items()}
    plain = nn.compile(lift_transform_params(ir, shared_transform=True)).load(rounded)
    tokens = torch.randint(0, 259, (2, 9))
    found = executable.load(given)["logits"](tokens)
    torch.testing.assert_close(found, plain["logits"](tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", few_of([math.nan, math.inf, -math.inf]))
@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "uint8", "fp8", "mxfp4", "nvfp4"])
def test_weights_that_are_not_finite_are_refused_and_their_module_is_named(scheme, value):
    given = weights()
    given["back.weight"][3, 40] = value
    ir = quantize_weights(exported(), scheme)
    with pytest.raises(LoadError) as caught:
        nn.compile(lift_transform_params(ir, shared_transform=True)).load(given)
    assert str(caught.value) == (
        "a weight that is to be quantised holds NaN or infinities\n"
        "  at back\n"
        "  help: load the model without quantising this weight, or correct the checkpoint"
    )


def test_a_weight_of_zeros_is_one_of_zeros():
    given = weights()
    given["back.weight"].zero_()
    for scheme in FORMATS:
        session = nn.compile(
            lift_transform_params(quantize_weights(exported(), scheme), shared_transform=True)
        ).load(given)
        assert torch.equal(session["plain"](torch.randn(2, D)), torch.zeros(2, 40))
