# SPDX-License-Identifier: Apache-2.0
"""Attention left to an engine: what it is told, what the rest computes, and what is refused with the layer named."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import PassError
from nnfront.llm.model_files import find_architecture
from nnfront.llm.parts import export_parts
from nnfront.passes.external_attention import AttentionCall, calls_of, external_attention
from nnfront.passes.split_embedding import split_embedding

WHOLE = AttentionCall("layers.0", 4, 2, 8, 8**-0.5, None, None, False, None)


class Layer(nn.Module):
    """Attention and nothing else; `options` as for `op.attention`."""

    def __init__(self, sinks: bool = False, own: bool = True, values: bool = True, **options: Any) -> None:
        self.sinks = nn.Parameter([4], "float32") if sinks else None
        self.own, self.values, self.options = own, values, options

    def forward(self, q: nn.Tensor, cache: Any) -> nn.Tensor:
        k = q[:, :, :2] if self.own else None
        v = k if self.own and self.values else None
        return op.attention(q, k, v, cache=cache, sinks=self.sinks, **self.options)


class Model(nn.Module):
    """Layers one after the other; `on` says for each which layer of the cache it is given."""

    def __init__(self, layers: Sequence[nn.Module], on: Sequence[int] | None = None) -> None:
        self.layers, self.on = list(layers), on or range(len(layers))

    def hidden(self, q: nn.Tensor, cache: Any) -> nn.Tensor:
        for layer, i in zip(self.layers, self.on, strict=True):
            q = layer(q, cache[i])
        return q


def exported(model: Model, cache: Any = None, seq: Any = 1) -> nn.ir.IRModule:
    cache = cache or spec.Cache(max(model.on) + 1, 2, 8, "float32", batch="batch", max_seq="max_seq")
    return model.export({"hidden": {"q": spec.Tensor(["batch", seq, 4, 8], "float32"), "cache": cache}})


def calls(model: Model, cache: Any = None) -> tuple[AttentionCall, ...]:
    ir = external_attention(exported(model, cache))
    nn.ir.verify(ir)
    assert nn.ir.parse(str(ir)) == ir
    return calls_of(ir["hidden"])


class TestWhatAnEngineIsTold:
    def test_scale_window_soft_cap_and_sinks_are_passed_on_as_they_are(self) -> None:
        layers = [Layer(), Layer(scale=0.5, softcap=20.0), Layer(window=7), Layer(sinks=True)]
        found = calls(Model(layers))
        assert found == (
            WHOLE,
            dataclasses.replace(WHOLE, module="layers.1", scale=0.5, softcap=20.0),
            dataclasses.replace(WHOLE, module="layers.2", window=7),
            dataclasses.replace(WHOLE, module="layers.3", has_sinks=True),
        )

    def test_the_smaller_of_a_layers_and_its_caches_window_holds(self) -> None:
        cache = spec.Cache(3, 2, 8, "float32", batch="batch", max_seq="max_seq", window=[5, 5, None])
        found = calls(Model([Layer(), Layer(window=3), Layer(window=9)]), cache)
        assert [call.window for call in found] == [5, 3, 9]

    def test_a_layer_without_keys_names_the_attention_whose_it_reads(self) -> None:
        found = calls(Model([Layer(), Layer(), Layer(own=False), Layer(own=False)], on=[0, 1, 1, 0]))
        assert [call.reads for call in found] == [None, None, 1, 0]

    def test_a_module_without_a_cache_stays_as_it_is(self) -> None:
        ir = nn.Linear(2, 3).export({"forward": {"x": spec.Tensor(["n", 2], "float32")}})
        assert external_attention(ir) is ir

    def test_formulas_over_weights_are_lifted_as_before(self) -> None:
        llama = find_architecture("llama").file
        ir = export_parts(llama.build(llama.TINY), llama.export_spec(llama.TINY))
        lift = nn.passes.lift_transform_params
        one, two = (lift(each, shared_transform=True) for each in (ir, external_attention(ir)))
        assert one["transform_params"].result_type == two["transform_params"].result_type
        assert {p.role for p in two["hidden"].params} == {"input", "transformed"}


class Reads(nn.Module):
    """Keeps something of each sequence."""

    def forward(self, q: nn.Tensor, cache: Any) -> nn.Tensor:
        return q + op.cache_read(cache, "state")


class Wide(nn.Module):
    """Values are smaller than keys."""

    def forward(self, q: nn.Tensor, cache: Any) -> nn.Tensor:
        return op.attention(q, q[:, :, :2], q[:, :, :2, :6], cache=cache)


class Biased(nn.Module):
    """Adds a bias to scores."""

    def __init__(self) -> None:
        self.bias = nn.Parameter([1, 4, 1, 64], "float32")

    def forward(self, q: nn.Tensor, cache: Any) -> nn.Tensor:
        return op.attention(q, q[:, :, :2], q[:, :, :2], cache=cache, bias=self.bias)


def state(**layer: Any) -> Any:
    return spec.State([spec.Layer(**layer)], batch="batch", max_seq="max_seq")


KEYS = {"keys": spec.Tensor([2, 8], "float32")}


class TestWhatIsRefused:
    def refusal(self, model: Model, cache: Any = None, seq: Any = 1) -> str:
        with pytest.raises(PassError) as raised:
            external_attention(exported(model, cache, seq))
        text = str(raised.value)
        assert re.search(r"at layers\.\d \(.*\.py:\d+\)\n  help: run this model by itself$", text), text
        return text.splitlines()[0]

    def test_a_latent_is_named(self) -> None:
        found = self.refusal(Model([Layer(values=False, value_size=6)]), state(per_token=KEYS))
        assert found == "layers.0 attends to one latent, 8 numbers of each token, as keys and values"

    def test_later_tokens_are_named(self) -> None:
        assert self.refusal(Model([Layer(), Layer(is_causal=False)])) == "layers.1 attends to later tokens"

    def test_two_that_store_in_one_place_are_named(self) -> None:
        found = self.refusal(Model([Layer(), Layer()], on=[0, 0]))
        assert found == "layers.1 stores keys and values where another attention does"

    def test_one_that_reads_what_nothing_stores_is_named(self) -> None:
        assert self.refusal(Model([Layer(own=False)])) == "layers.0 reads keys and values that nothing stores"

    def test_keys_and_values_of_different_sizes_are_named(self) -> None:
        cache = spec.State([spec.KV(2, 8, value_size=6)], batch="batch", max_seq="max_seq")
        assert self.refusal(Model([Wide()]), cache) == "layers.0 has keys of 8 and values of 6 numbers"

    def test_several_tokens_of_a_sequence_are_named(self) -> None:
        llama = find_architecture("llama").file
        spec_of = llama.export_spec(llama.TINY)
        ir = llama.build(llama.TINY).export({"prefill": spec_of["prefill"]})
        with pytest.raises(PassError, match=r"takes several tokens of a sequence in one call\n"):
            external_attention(ir)

    def test_a_bias_is_named(self) -> None:
        cache = spec.Cache(1, 2, 8, "float32", batch="batch", max_seq=64)
        assert self.refusal(Model([Biased()]), cache) == "layers.0 adds a bias to scores"

    def test_a_state_of_sequences_is_named(self) -> None:
        cache = state(per_sequence={"state": spec.Tensor([1, 4, 8], "float32")})
        assert self.refusal(Model([Reads()]), cache) == "layers.0 keeps what no attention reads: cache_read"

    def test_what_looks_at_the_positions_of_all_sequences_is_named(self) -> None:
        llama = find_architecture("llama").file
        growing = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        config = dataclasses.replace(llama.TINY, rope_parameters=growing)
        ir = export_parts(llama.build(config), llama.export_spec(config))
        with pytest.raises(PassError, match=r"^model.rotary_emb looks at all tokens of a call, .*: max\n"):
            external_attention(ir)


class TestTheTableOfTokens:
    TEXT = """
    def hidden[n](tokens: input int64[n], table: weight float32[8, 4]) -> float32[n, 8] {{
        x: float32[n, 4] = take(table, tokens, axis=0)
        y: float32[n, 8] = {}
        return y
    }}"""

    def test_a_table_that_is_read_again_stays_with_both(self) -> None:
        ir = split_embedding(nn.ir.parse(self.TEXT.format("linear(x, table)")), "hidden", "tokens", "embed")
        nn.ir.verify(ir)
        read = {f.name: [p.name for p in f.params] for f in ir.functions}
        assert read == {"embed": ["tokens", "table"], "hidden": ["embedded", "table"]}
        table, tokens = torch.randn(8, 4), torch.tensor([3, 0, 3])
        session = nn.compile(ir).load({"table": table})
        assert torch.equal(session["embed"](tokens), table[tokens])
        torch.testing.assert_close(session["hidden"](table[tokens]), table[tokens] @ table.T)

    def test_tokens_that_are_read_again_stay_an_argument(self) -> None:
        ir = nn.ir.parse(self.TEXT.format("concat(x, t, dim=1)").replace("y:", "t: float32[n, 4] = take(table, tokens, axis=0)\n        y:"))  # fmt: skip
        assert split_embedding(ir, "hidden", "tokens", "embed") is ir
