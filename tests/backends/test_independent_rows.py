# SPDX-License-Identifier: Apache-2.0
"""Which methods may be given rows that are nobody's: those of which each instruction keeps to the rows of a sequence."""

from __future__ import annotations

import dataclasses

import pytest
from nnfront_models import bloom, deepseek_v3, lfm2, llama, mamba, mamba2, qwen3_moe, qwen3_next, rwkv

import nnfront as nn
from nnfront import op
from nnfront.backends.cuda.independent_rows import Rows, independent_rows, independent_tokens

CONFIG = dataclasses.replace(llama.TINY, dtype="bfloat16", head_dim=64, num_hidden_layers=1)


def decode_of(model, config, quant=None, export_spec=llama.export_spec):
    ir = model.export(export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    return nn.compile(ir, target="cuda:sm_90").program.methods


@pytest.mark.parametrize("quant", [None, "int8", "int4", "fp8"])
def test_a_decode_step_keeps_to_the_rows_of_each_sequence(quant):
    methods = decode_of(llama.build(CONFIG), CONFIG, quant)
    found = independent_rows(methods["decode"])
    assert isinstance(found, Rows)
    slots = methods["decode"].slots
    assert slots[found.dim].name == "batch"
    assert {*methods["decode"].result.leaves()} <= found.tensors
    # Of a row that is nobody's a prompt would be read where there is none.
    assert "cache_positions at model may not keep" in str(independent_rows(methods["prefill"]))


def test_experts_keep_to_rows_as_well():
    config = dataclasses.replace(qwen3_moe.TINY, dtype="bfloat16", head_dim=64)
    methods = decode_of(qwen3_moe.build(config), config, export_spec=qwen3_moe.export_spec)
    assert isinstance(independent_rows(methods["decode"]), Rows)


def test_adapters_of_sequences_keep_to_rows_as_well():
    ir = llama.build(CONFIG).export(llama.export_spec(CONFIG))
    ir = nn.passes.add_adapters(ir, {"model.layers.0.self_attn.o_proj.weight": 4}, 2)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    methods = nn.compile(ir, target="cuda:sm_90").program.methods
    assert isinstance(independent_rows(methods["decode"]), Rows)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (mamba, {}),
        (mamba2, {}),
        (qwen3_next, {"head_dim": 64}),
        (lfm2, {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_states_of_whole_sequences_are_rows_of_the_next_token(file, changes):
    config = dataclasses.replace(file.TINY, dtype="bfloat16", **changes)
    methods = decode_of(file.build(config), config, export_spec=file.export_spec)
    assert isinstance(independent_rows(methods["decode"]), Rows)
    assert "may not keep" in str(independent_rows(methods["prefill"]))


def test_what_a_loop_does_with_states_is_not_looked_into():
    methods = decode_of(rwkv.build(rwkv.TINY), rwkv.TINY, export_spec=rwkv.export_spec)
    assert "may not keep" in str(independent_rows(methods["decode"]))


@pytest.mark.parametrize("file", [llama, qwen3_moe, bloom], ids=lambda file: file.__name__)
def test_a_prompt_keeps_to_its_tokens_up_to_the_last_one(file):
    config = dataclasses.replace(file.TINY, dtype="bfloat16", head_dim=64)
    methods = decode_of(file.build(config), config, export_spec=file.export_spec)
    found = independent_tokens(methods["prefill"])
    assert isinstance(found, Rows)
    assert (methods["prefill"].slots[found.dim].name, found.axis) == ("seq", 1)
    assert found.tensors.isdisjoint(methods["prefill"].result.leaves())
    assert "no tokens" in str(independent_tokens(methods["decode"]))


@pytest.mark.parametrize(
    ("file", "why"), [(mamba2, "cache_read"), (deepseek_v3, "may not keep")], ids=["states", "latents"]
)
def test_prompts_whose_tokens_all_go_into_a_state_or_are_counted_from_their_end_are_not_padded(file, why):
    config = dataclasses.replace(file.TINY, dtype="bfloat16")
    methods = decode_of(file.build(config), config, export_spec=file.export_spec)
    assert why in str(independent_tokens(methods["prefill"]))


def prompt_of(compute):
    """Whether a prompt's tokens are independent of which something is computed besides."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            self.model = llama.build(CONFIG)

        def prefill(self, tokens, cache):
            return self.model.head(compute(self.model.hidden(tokens, cache))[:, -1:])

    spec = {"prefill": llama.export_spec(CONFIG)["prefill"]}
    ir = nn.passes.lift_transform_params(Beside().export(spec), shared_transform=True)
    return independent_tokens(nn.compile(ir, target="cuda:sm_90").program.methods["prefill"])


EARLIER = {
    "mean": lambda x: x - op.mean(x, axis=1, keepdims=True),
    "first": lambda x: x + x[:, :1],
    "last but one": lambda x: op.concat([x, x[:, -2:]], 1),
    "order": lambda x: op.flip(x, axis=1),
    "running sum": lambda x: op.cumsum(x, axis=1),
    "how many": lambda x: x * op.astype(op.dim_value(x.shape[1]), "bfloat16"),
    "axes turned": lambda x: op.permute_dims(op.softmax(op.permute_dims(x, [0, 2, 1]), axis=2), [0, 2, 1]),
    "pairs": lambda x: op.matmul(op.softmax(op.matmul(x, op.permute_dims(x, [0, 2, 1])), -1), x),
}


@pytest.mark.parametrize("mixed", EARLIER)
def test_what_looks_at_other_tokens_of_a_prompt_is_found(mixed):
    assert isinstance(prompt_of(EARLIER[mixed]), str)


def test_what_looks_at_each_token_alone_is_not_refused():
    found = prompt_of(lambda x: op.reshape(op.softmax(op.reshape(x, [-1, 4, 16]), axis=2), x.shape) * x)
    assert isinstance(found, Rows)


MIXED = {
    "mean": lambda x: x - op.mean(x, axis=0, keepdims=True),
    "all of them": lambda x: x / op.sum(x),
    "order": lambda x: x + op.flip(x, axis=0),
    "running sum": lambda x: op.cumsum(x, axis=0),
    "how many": lambda x: x * op.astype(op.dim_value(x.shape[0]), "bfloat16"),
    "one of them": lambda x: x + x[0],
    "pairs": lambda x: op.matmul(op.reshape(x, [-1, 64]), op.permute_dims(op.reshape(x, [-1, 64])))[:, :1, None] * x,
    "axes turned": lambda x: op.permute_dims(op.softmax(op.permute_dims(x, [1, 0, 2]), axis=1), [1, 0, 2]),
    "shapes": lambda x: op.reshape(op.exp(op.reshape(x, [1, x.shape[0], 64])), [x.shape[0], 1, 64]),
}  # fmt: skip


def rows_beside(compute):
    """Whether a decode step keeps to rows that computes something of its tokens besides."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            self.model = llama.build(CONFIG)

        def decode(self, tokens, cache):
            return compute(self.model.model.embed_tokens(tokens)), self.model.decode(tokens, cache)

    spec = {"decode": llama.export_spec(CONFIG)["decode"]}
    ir = nn.passes.lift_transform_params(Beside().export(spec), shared_transform=True)
    return independent_rows(nn.compile(ir, target="cuda:sm_90").program.methods["decode"])


@pytest.mark.parametrize("mixed", MIXED)
def test_what_looks_at_other_sequences_is_found(mixed):
    assert isinstance(rows_beside(MIXED[mixed]), str)


def test_what_looks_at_its_own_sequence_alone_is_not_refused():
    inside = rows_beside(
        lambda x: (
            op.softmax(op.permute_dims(x, [0, 2, 1]), axis=1) * op.full([x.shape[0], 1, 1], 2, "bfloat16")
        )
    )
    assert isinstance(inside, Rows)
