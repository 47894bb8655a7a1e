# SPDX-License-Identifier: Apache-2.0
"""Every shipped decoder against transformers' own class with random weights, in the configurations of `configs/`; and what holds for every model file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import CONFIGS, TOKENS, assert_near, configurations, is_decoder, with_random_weights
from few_of import few_of
from transformers import AutoConfig, AutoModelForCausalLM

import nnfront as nn
from nnfront.llm.model_files import find_architecture, known_architectures

DECODERS = [name for name in known_architectures() if is_decoder(name)]


def reference(model_type: str, sizes: dict[str, Any]) -> Any:
    """transformers' model with random weights, such that logits are of order 1 and no vector is all ones or zeros."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    attention = "sdpa" if sizes.get("alibi") else "eager"  # Falcon's eager attention adds its biases twice
    return with_random_weights(AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits.float()


@pytest.mark.parametrize(("model_type", "sizes"), [*configurations(is_decoder)])
def test_it_computes_what_transformers_does(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(model_type, sizes)
    theirs.save_pretrained(tmp_path)
    ours = nn.LLM.load(tmp_path)

    # Whole texts, of one token and longer than any window, and than what a rotation was scaled for.
    for batch, seq in ((1, 1), (1, 90), (2, 40)):
        ids = torch.randint(0, TOKENS, (batch, seq))
        assert_near(ours.logits(ids), logits_of(theirs, ids))

    # A prompt in two parts, then token by token.
    expected = logits_of(theirs, ids)
    cache = ours.session.make_cache(batch=2, max_seq=40)
    got = [ours.session["prefill"](ids[:, :5], cache), ours.session["prefill"](ids[:, 5:20], cache)]
    got += [ours.session["decode"](ids[:, i : i + 1], cache) for i in range(20, 40)]
    assert_near(torch.cat(got, 1), expected[:, [4, *range(19, 40)]])

    # Greedy tokens of prompts of different lengths: each is the likeliest after those before it, so the texts are those of transformers.
    prompts = [torch.randint(0, TOKENS, (n,)) for n in (3, 17, 8)]
    for prompt, tokens in zip(prompts, ours.generate_ids(prompts, max_new_tokens=16), strict=True):
        logits = logits_of(theirs, torch.cat([prompt, tokens])[None])[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens.tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", DECODERS)
def test_bfloat16_errs_no_more_than_three_times_as_much_as_transformers(
    model_type: str, tmp_path: Path
) -> None:
    _, sizes = next(values.values for values in configurations(is_decoder) if values.values[0] == model_type)
    reference(model_type, sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.randint(0, TOKENS, (2, 40))
    exact, half = (
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval(), ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = nn.LLM.load(tmp_path, dtype="bfloat16")  # casts what stays in float32 in real checkpoints
    cache = ours.session.make_cache(batch=2, max_seq=40)
    got = [ours.session["prefill"](ids[:, :20], cache)]
    got += [ours.session["decode"](ids[:, i : i + 1], cache) for i in range(20, 40)]
    allowed = 3 * (half - exact).square().mean().sqrt()  # a router may choose another expert
    assert 0 < (ours.logits(ids) - exact).square().mean().sqrt() < allowed
    assert 0 < (torch.cat(got, 1) - exact[:, 19:]).square().mean().sqrt() < allowed


def test_every_model_type_of_a_file_is_known_by_it_and_has_three_configurations() -> None:
    known = known_architectures()
    for name, file in known.items():
        assert name in find_architecture(name).file.Config.model_types, f"{name} of {file}.py"
        path = CONFIGS / f"{name}.json"
        assert path.exists(), f"{name} has no configurations"
        assert len(json.loads(path.read_text())["configs"]) >= 3, name
    for file in set(known.values()):
        types = find_architecture(file).file.Config.model_types
        assert {name for name in known if known[name] == file} == {*types}


@pytest.mark.parametrize("model_type", [*known_architectures()])
def test_keys_that_are_absent_mean_what_transformers_takes_them_for(model_type: str) -> None:
    config = find_architecture(model_type).file.Config
    absent = config.from_hf({"model_type": model_type})
    written = config.from_hf(AutoConfig.for_model(model_type).to_dict())
    made_of_others = {
        *("attention_layers", "attn_config", "ffn_hidden_size", "head_dim", "layer_types", "mlp_layer_types"),
        *("moe_layers", "no_rope_layers", "num_decoder_layers", "num_key_value_heads", "num_kv_heads"),
        *("per_layer_config", "scale_decoder_outputs", "sliding_window", "text_config", "vision_config"),
        *("full_attn_idxs", "layers_block_type", "mamba_d_head", "time_step_limit", "time_step_rank"),
        *(("attention_hidden_size", "intermediate_size") if model_type == "rwkv" else ()),
    }
    for name in vars(written):
        if name not in made_of_others:
            assert getattr(absent, name) == getattr(written, name), name
    for name in {
        "averaged",
        "decoder_layers",
        "head_size",
        "inner",
        "kinds",
        "kv_heads",
        "limits",
        "rank",
        "scales_outputs",
        "sizes",
    } & {*dir(config)}:
        assert getattr(absent, name) == getattr(written, name), name
    for name in {"window", "kv_of", "layer_type", "is_rotated", "is_sparse", "is_chunked"} & {*dir(config)}:
        for layer in range(absent.num_hidden_layers):
            assert getattr(absent, name)(layer) == getattr(written, name)(layer), (name, layer)


@pytest.mark.parametrize("model_type", few_of(known_architectures(), 15))
def test_its_tiny_model_is_exported_the_same_way_twice(model_type: str) -> None:
    file = find_architecture(model_type).file
    first, second = (file.build(file.TINY).export(file.export_spec(file.TINY)) for _ in range(2))
    assert str(first) == str(second)
    assert nn.ir.first_difference(nn.ir.parse(str(first)), first) is None


def test_the_documentation_lists_the_model_types_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+)\.py \|", text, re.MULTILINE)
    assert rows == sorted(known_architectures().items())
