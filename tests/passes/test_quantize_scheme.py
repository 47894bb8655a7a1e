# SPDX-License-Identifier: Apache-2.0
"""What a scheme makes of each weight: rules, routers, and the report that says it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from few_of import few_of
from nnfront_models import llama, qwen3_moe
from quantize_cases import D, F, stands_for

import nnfront as nn
from nnfront import dtypes, op, spec
from nnfront.errors import PassError
from nnfront.passes import QuantScheme, lift_transform_params, quantize_weights


class TestReport:
    def held(self, ir: nn.ir.IRModule, scheme: str | QuantScheme) -> dict[str, int]:
        """Bytes of what a session holds, by name."""
        lifted = lift_transform_params(quantize_weights(ir, scheme), shared_transform=True)
        return {
            p.name: math.prod(map(int, p.type.shape)) * dtypes.size_bytes(p.type.dtype)
            for function in lifted.methods
            for p in function.weights
        }

    @pytest.mark.parametrize(
        "scheme",
        few_of(["int4", "int8:16", "uint4:64", "fp8", "mxfp4", "nvfp4", QuantScheme("int4", "keep")], 3),
        ids=str,
    )
    @pytest.mark.parametrize("file", [llama, qwen3_moe], ids=["llama", "qwen3_moe"])
    def test_it_says_what_is_quantised_and_all_bytes_as_a_session_holds_them(self, file, scheme: str):
        ir = file.build(file.TINY).export(file.export_spec(file.TINY))
        report = quantize_weights.report(ir, scheme)
        held = self.held(ir, scheme)
        taken = {name.removesuffix(".scales") for name in held if name.endswith(".scales")}
        assert {w.name for w in report.quantized} == taken
        assert sum(w.bytes_after for w in report.weights) == sum(held.values())
        before = lift_transform_params(ir, shared_transform=True)
        assert {w.name for w in report.weights} == {p.name for f in before.methods for p in f.weights}

    def test_all_is_said_in_a_line_and_of_each_weight_what_it_is(self):
        ir = qwen3_moe.build(qwen3_moe.TINY).export(qwen3_moe.export_spec(qwen3_moe.TINY))
        report = quantize_weights.report(ir, "int4")
        assert str(report) == (
            "quantised: 2 weights to int8, 133 kB to 35.2 kB; 8 weights to int4, 270 kB to 42.2 kB;"
            " as they are: 1.54 kB of vectors, 1.02 kB of router (chooses experts); all weights: 406 kB to 80 kB"
        )
        found = {w.name: (w.role, w.stored, w.reason) for w in report.weights}
        assert found["lm_head.weight"] == ("head", "int8", "")
        assert found["model.embed_tokens.weight"] == ("embedding", "int8", "")
        assert found["model.layers.1.mlp.gate.weight"] == ("router", "keep", "chooses experts")
        assert found["model.layers.1.mlp.experts.down_weight"] == ("experts", "int4", "")
        assert found["model.layers.0.self_attn.o_proj.weight"] == ("product", "int4", "")
        lines = report.text().splitlines()
        assert (lines[0], len(lines)) == (str(report), 2 + len(report.weights))
        assert lines[1].split() == ["weight", "read", "as", "stored", "in", "bytes", "then", "why"]
        assert lines[-2].split() == ["model.norm.weight", "as", "it", "is", "256", "256", "vectors"]

    def test_sizes_that_groups_do_not_divide_and_other_readers_are_said(self):
        class Odd(nn.Module):
            def __init__(self) -> None:
                self.small, self.even, self.odd = (nn.Linear(n, 64, bias=False) for n in (48, 30, 15))
                self.table, self.both = nn.Parameter([48, 4]), nn.Linear(48, 48, bias=False)

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                read = op.sum(self.table * x[0, 0]) + op.sum(self.both.weight * x[0, 0])
                return self.small(x) + self.even(x[:, :30]) + self.odd(self.both(x)[:, :15]) + read

        ir = Odd().export({"forward": {"x": spec.Tensor(["n", 48])}})
        report = quantize_weights.report(ir, "int4")
        assert {w.name: (w.stored, w.reason) for w in report.weights} == {
            "small.weight": ("int4:16", "48 inputs do not divide into int4"),
            "even.weight": ("int4:channel", "30 inputs do not divide into int4"),
            "odd.weight": ("int8", "15 inputs do not divide into int4"),
            "table": ("keep", "read by multiply"),
            "both.weight": ("keep", "read by multiply as well"),
        }
        found = {w.name: w.stored for w in quantize_weights.report(ir, "mxfp4").weights}
        assert found["small.weight"] == found["even.weight"] == found["odd.weight"] == "int8"
        for scheme in ("int4", "mxfp4", "uint4:128"):
            lifted = lift_transform_params(quantize_weights(ir, scheme), shared_transform=True)
            session = nn.compile(lifted).load(
                {n: torch.zeros(tuple(p.shape)) + 1 for n, p in Odd().named_parameters()}
            )
            torch.testing.assert_close(
                session["forward"](torch.ones(2, 48)),
                torch.full((2, 64), 48 + 30 + 48 * 15 + 48 * 4 + 48 * 48.0),
            )

    def test_what_a_model_quantises_itself_stays(self):
        class Own(nn.Module):
            def __init__(self) -> None:
                self.weight = nn.Parameter([4, 64])
                self.q, self.scale = op.quantize(self.weight, bits=8)
                self.plain = nn.Linear(4, 64, bias=False)
                self.f8 = nn.Parameter([64, 64], dtype="float8_e4m3fn")

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                y = self.plain(op.linear(x, op.dequantize(self.q, self.scale)))
                return op.linear(y, op.permute_dims(op.astype(self.f8, "float32")))

        ir = Own().export({"forward": {"x": spec.Tensor(["n", 64])}})
        once = quantize_weights(ir, "int8")
        assert quantize_weights(once, "int4") is once
        found = {w.name: w for w in quantize_weights.report(ir, "int8").weights}
        assert found["plain.weight"].stored == "int8"
        assert {w.reason for w in found.values()} == {"", "quantised already"}


class TestRouters:
    def roles(self, model: nn.Module, scheme: str | QuantScheme = "int4") -> dict[str, tuple[str, str]]:
        ir = model.export({"forward": {"x": spec.Tensor(["n", D])}})
        return {w.name: (w.role, w.stored) for w in quantize_weights.report(ir, scheme).weights}

    def test_they_are_found_by_what_they_feed_not_by_their_name(self):
        class Mixture(nn.Module):
            def __init__(self) -> None:
                self.chooses, self.gate = nn.Linear(D, 8, bias=False), nn.Linear(D, D, bias=False)
                self.up, self.down = nn.Parameter([8, 2 * F, D]), nn.Parameter([8, D, F])

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                logits = op.astype(self.chooses(x), "float32")
                share, chosen = op.topk(op.sigmoid(logits) + 1.0, 2)
                return op.moe_mlp(x * op.sigmoid(self.gate(x)), self.up, self.down, chosen, share)

        assert self.roles(Mixture()) == {
            "chooses.weight": ("router", "keep"),
            "gate.weight": ("product", "int4"),
            "up": ("experts", "int4"),
            "down": ("experts", "int4"),
        }
        everything = QuantScheme("int4", rules=(("*", "int8"),))
        assert self.roles(Mixture(), everything)["chooses.weight"] == ("router", "keep")

    def test_a_head_whose_logits_are_drawn_from_is_no_router(self):
        class Draws(nn.Module):
            def __init__(self) -> None:
                self.lm_head = nn.Linear(D, 64, bias=False)

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return op.argmax(self.lm_head(x), -1)

        assert self.roles(Draws()) == {"lm_head.weight": ("head", "int8")}


class TestRules:
    def stored(self, *rules: tuple[str, str], head: str | None = None) -> dict[str, str]:
        ir = llama.build(llama.TINY).export(llama.export_spec(llama.TINY))
        scheme = QuantScheme("int4", head, rules)
        lifted = lift_transform_params(quantize_weights(ir, scheme), shared_transform=True)
        held = {p.name for f in lifted.methods for p in f.weights}
        report = quantize_weights.report(ir, scheme)
        for w in report.weights:
            assert (w.name in held) == (w.format is None)
            assert (f"{w.name}.scales" in held) == (w.format is not None)
        nn.compile(lifted)
        return {w.name.removeprefix("model."): w.stored for w in report.weights if w.role}

    def test_they_are_for_full_paths_where_layers_share_a_function(self):
        found = self.stored(("model.layers.0.*", "int8"))
        assert {found[f"layers.0.{n}"] for n in ("self_attn.qkv.weight", "mlp.down_proj.weight")} == {"int8"}
        assert {found[f"layers.1.{n}"] for n in ("self_attn.qkv.weight", "mlp.down_proj.weight")} == {"int4"}
        assert self.stored(("model.layers.0", "int8")) == found

    def test_the_last_that_fits_counts(self):
        found = self.stored(("*.o_proj", "keep"), ("model.layers.1", "int8:16"))
        assert found["layers.0.self_attn.o_proj.weight"] == "keep"
        assert found["layers.1.self_attn.o_proj.weight"] == "int8:16"
        found = self.stored(("model.layers.1", "int8:16"), ("*.o_proj", "keep"))
        assert found["layers.1.self_attn.o_proj.weight"] == "keep"

    def test_a_fused_weight_goes_by_its_parts_and_a_tied_one_by_both_names(self):
        assert (
            self.stored(("model.layers.0.self_attn.k_proj", "uint4"))["layers.0.self_attn.qkv.weight"]
            == "uint4"
        )
        config = replace(llama.TINY, tie_word_embeddings=True)
        ir = llama.build(config).export(llama.export_spec(config))
        (tied,) = (
            w
            for w in quantize_weights.report(ir, QuantScheme("int4", rules=(("lm_head", "fp8"),))).weights
            if w.name == "model.embed_tokens.weight"
        )
        assert (tied.role, tied.stored) == ("embedding and head", "fp8")

    def test_a_pattern_that_fits_nothing_is_an_error_that_names_the_nearest(self):
        with pytest.raises(PassError) as caught:
            self.stored(("*.o_prj", "keep"))
        assert str(caught.value) == (
            "no weight that can be quantised is in a module '*.o_prj'\n  help: did you mean '*.o_proj'?"
        )
        with pytest.raises(PassError) as caught:
            self.stored(("xyz", "keep"))
        assert (
            caught.value.help == "patterns are for paths of modules, such as '*.o_proj' or 'model.layers.0'"
        )

    def test_results_are_those_of_each_layer_in_its_format(self):
        config = replace(llama.TINY, tie_word_embeddings=True)
        model = llama.build(config)
        torch.manual_seed(0)
        given = {n: torch.randn(tuple(map(int, p.shape))) * 0.2 for n, p in model.named_parameters()}
        ir = model.export(llama.export_spec(config))
        rules = (("model.layers.0", "int8:32"), ("*.down_proj", "keep"))
        ir_q = quantize_weights(ir, QuantScheme("int4", "uint8", rules))
        session = nn.compile(lift_transform_params(ir_q, shared_transform=True)).load(given)
        rounded = dict(given)
        for name, w in given.items():
            if w.ndim < 2 or "down_proj" in name:
                continue
            rounded[name] = stands_for(
                w, "uint8" if "embed" in name else "int8:32" if ".0." in name else "int4"
            )
        plain = nn.compile(lift_transform_params(ir, shared_transform=True)).load(rounded)
        tokens = torch.randint(0, 259, (2, 9))
        torch.testing.assert_close(session["logits"](tokens), plain["logits"](tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "int4:x",
            "'int4:x' does not say how many neighbours share a scale\n  help: write int4:64, or int4:channel for one scale for each output",
        ),
        (
            "int4:0",
            "'int4:0' does not say how many neighbours share a scale\n  help: write int4:64, or int4:channel for one scale for each output",
        ),
        (
            "keep",
            "the format of a scheme is 'keep'\n  help: say what weights are to be quantised to, such as 'int8'",
        ),
    ],
)
def test_formats_that_are_not_well_said(text, error):
    with pytest.raises(PassError) as caught:
        QuantScheme(text)
    assert str(caught.value) == error
