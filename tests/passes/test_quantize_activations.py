# SPDX-License-Identifier: Apache-2.0
"""Activations in 8 bits: which products take them, what they compute, and what is said where none does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nnfront_models import qwen3_moe
from quantize_cases import exported, weights

import nnfront as nn
from nnfront import ops, spec
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.registry import backend_of
from nnfront.cli import main
from nnfront.errors import PassError
from nnfront.passes import QuantScheme, lift_transform_params, quantize_activations, quantize_weights
from nnfront.quant_format import BLOCK_FORMATS, FORMATS

SHIPPED = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("format", ["int8", "int8:32", "int4", "uint4:16", "int4:channel"])
def test_each_product_multiplies_what_is_rounded_and_nothing_else_changes(format: str) -> None:
    plain = quantize_weights(exported(), format)
    ir = quantize_activations(plain)
    calls = [b.value.op for f in ir.methods for b in f.bindings if isinstance(b.value, nn.ir.Call)]
    assert ops.linear not in calls
    assert calls.count(ops.linear_int8) == 6
    session, before = (
        nn.compile(lift_transform_params(module, shared_transform=True)).load(weights())
        for module in (ir, plain)
    )
    assert set(session.weights) == set(before.weights)
    for name, tensor in session.weights.items():
        assert torch.equal(tensor.view(torch.uint8), before.weights[name].view(torch.uint8))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    # The first product of `plain` alone, then each of the others with what the one before it gives, rounded.
    given = {
        name: tensor
        for name, tensor in nn.compile(
            lift_transform_params(quantize_weights(exported(), format), shared_transform=True)
        )
        .load(weights())
        .weights.items()
    }

    def dense(name: str) -> torch.Tensor:
        stored = next(FORMATS[f] for f in ("uint4", "int4", "int8") if f"{name}.{f}" in given)
        q = given[f"{name}.{stored.name}"]
        if stored.packing is not None:
            q = torch.stack([q % 16, q // 16], -1).flatten(1).float()
            q = q if stored.name == "uint4" else (q + 8) % 16 - 8
        scales = given[f"{name}.scales"]
        each = q.shape[1] // scales.shape[1]
        zeros = given.get(f"{name}.zero_points", torch.zeros(1)).float()
        zeros = zeros.repeat_interleave(each, 1) if zeros.ndim == 2 else zeros
        return (q.float() - zeros) * scales.repeat_interleave(each, 1)

    one = rounded(x) @ dense("one.weight").T + weights()["one.bias"]
    y = rounded(rounded(one) @ dense("back.weight").T) @ dense("lm_head.weight").T
    torch.testing.assert_close(session["plain"](x), y, rtol=1e-3, atol=1e-2 * float(y.abs().max()))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_weights_in_blocks_are_multiplied_as_they_are_stored(format: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(384, 5, bias=True)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.up(x)

    exported = Product().export({"forward": {"x": spec.Tensor(["n", 384], "float32")}})
    plain = quantize_weights(exported, format)
    ir = quantize_activations(plain)
    assert str(quantize_activations(ir)) == str(ir)
    assert str(quantize_activations.report(plain)) == "activations: int8 in 1 of 1 products"
    (call,) = [b.value for b in ir["forward"].bindings if getattr(b.value, "op", None) is ops.linear_int8]
    assert call.attrs == {"format": format}
    assert call.args[2:4] == (None, None)
    x, weight, bias = torch.randn(7, 384), torch.randn(5, 384), torch.randn(5)
    session = nn.compile(lift_transform_params(ir, shared_transform=True)).load(
        {"up.weight": weight, "up.bias": bias}
    )
    blocks = ops.quantize_blocks.run((weight,), {"format": format})
    assert torch.equal(session.weights[f"up.weight.{format}"], blocks)
    dense = ops.dequantize_blocks.run((blocks,), {"format": format, "dtype": "float32"})
    torch.testing.assert_close(session["forward"](x), rounded(x) @ dense.T + bias, rtol=1e-4, atol=1e-3)


def test_twice_is_once_and_a_module_without_products_of_integers_is_refused() -> None:
    once = quantize_activations(quantize_weights(exported(), "int8"))
    assert str(quantize_activations(once)) == str(once)
    floats = quantize_weights(exported(), "fp8")
    assert str(quantize_activations(floats)) == str(floats)
    with pytest.raises(PassError) as raised:
        quantize_activations.report(floats).require_any()
    assert str(raised.value) == (
        "no product takes activations in int8\n  weights in fp8\n"
        "  help: quantise weights to int8, int4, uint4, q4_k, q5_k or q6_k on a target with a kernel for that, or leave activations as they are"
    )
    with pytest.raises(PassError, match="there is none with a quantised weight"):
        quantize_activations.report(exported()).require_any()


def test_targets_without_a_kernel_refuse_and_say_which_they_are() -> None:
    ir = quantize_weights(exported(), "int8")
    with pytest.raises(PassError, match="cuda has no kernel for them"):
        quantize_activations.report(ir, backend_of("cuda:sm_90").refuses_int8).require_any()
    with pytest.raises(PassError, match="activations are float32, the kernel takes bfloat16"):
        quantize_activations.report(ir, backend_of("cpu").refuses_int8).require_any()


def test_experts_and_floats_stay_and_the_report_counts_them() -> None:
    ir = qwen3_moe.build(qwen3_moe.TINY).export(qwen3_moe.export_spec(qwen3_moe.TINY))
    scheme = QuantScheme("int8", rules=(("*.o_proj", "fp8"),))
    said = str(quantize_activations.report(quantize_weights(ir, scheme)))
    assert said.startswith("activations: int8 in ")
    assert "as they are: experts" in said
    assert "as they are: weights in fp8" in said


def test_a_scheme_says_it_and_refuses_other_words() -> None:
    with pytest.raises(PassError, match="activations are rounded to int8, got 'int4'"):
        QuantScheme("int8", activations="int4")
    with pytest.raises(PassError, match="the format of a scheme is 'keep'"):
        QuantScheme("keep")
    report = quantize_weights.report(exported(), QuantScheme("keep", activations="int8"))
    assert not report.quantized


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("format", ["int4", "q4_k", "int8:32"])
def test_the_head_of_few_bits_is_in_eight(format: str, activations: str | None) -> None:
    scheme = QuantScheme(format, activations=activations)
    assert scheme.head_format is not None
    assert scheme.head_format.bits >= 8
    assert scheme.head_format.name == "int8"
    assert QuantScheme(format, head="keep", activations=activations).head_format is None


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("format", ["int8", "q4_k"])
def test_a_folder_is_read_so_and_says_it(format: str) -> None:
    scheme = QuantScheme(format, activations="int8")
    llm, plain = (nn.LLM.load(SHIPPED, quant=quant) for quant in (scheme, format))
    assert str(llm.quantized).endswith("; activations: int8 in 15 of 15 products")
    ids = torch.tensor([plain.tokenizer.encode("def main(path):\n    return path\n")])
    logits, expected = (each.logits(ids).float().log_softmax(-1) for each in (llm, plain))
    divergence = (expected.exp() * (expected - logits)).sum(-1).mean()
    assert 0 < divergence < 0.01
    for method in ("prefill", "decode"):
        line = next(
            line
            for line in str(llm.session.explain()).splitlines()
            if f"{method} " in line and "int8_activations" in line
        )
        assert "activations are rounded to 8 bits" in line
    assert "quantized_product" not in str(llm.session.explain())


def test_the_command_line_takes_it_with_and_without_quant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(SHIPPED), "-p", "def", "--max-new-tokens", "2", "--activations", "int8"]) == 1
    assert "no product takes activations in int8" in capsys.readouterr().err
