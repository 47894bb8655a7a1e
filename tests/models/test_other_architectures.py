# SPDX-License-Identifier: Apache-2.0
"""Every causal language model of transformers through a shipped model file of another: an error; never other logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from few_of import few_of
from nnfront_models import llama
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import nnfront as nn
from nnfront.errors import LoadError, NnfrontError
from nnfront.llm.model_files import find_architecture, known_architectures

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits of order 1
}


def config_of(kind: Any) -> Any:
    """A small configuration, or the class's own where it has its own ideas of sizes; None if it cannot be made without help."""
    for sizes in (TINY, {"vocab_size": 131}, {}):
        try:
            return kind(**sizes)
        except Exception:  # what each of 190 classes raises for sizes that it does not take is its own
            continue
    return None


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """A config.json of each model type that transformers generates text with."""
    made = {kind.model_type: config_of(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    return {name: config.to_dict() for name, config in made.items() if config is not None}


@pytest.mark.parametrize("name", few_of(sorted({*known_architectures().values()}), 8))
def test_of_all_architectures_none_is_taken_that_is_not_computed(
    name: str, configs: dict[str, dict[str, Any]]
) -> None:
    file, taken = find_architecture(name).file, set()
    for model_type, config in configs.items():
        try:
            file.Config.from_hf(config)
        except NnfrontError:
            continue
        taken.add(model_type)
    assert len(configs) > 150
    assert taken <= {*file.Config.model_types}


CHANGES: dict[str, Any] = {
    "attention_bias": True,
    "attention_multiplier": 0.5,
    "hidden_act": "relu",
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_bias": True,
    "pretraining_tp": 2,
    "rms_norm_eps": 0.5,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    "sliding_window": 8,
    "use_cache": False,
}
REFUSED = {
    transformers.LlamaConfig: {
        "attention_bias",
        "attention_multiplier",
        "layer_types",
        "mlp_bias",
        "sliding_window",
    },
    transformers.MistralConfig: {"attention_bias", "attention_multiplier", "layer_types", "mlp_bias"},
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.model_type)
def test_a_key_that_is_changed_afterwards_is_refused_or_computed(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(kind(**TINY)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    before = json.loads(path.read_text())
    ids = torch.randint(0, 131, (1, 40))
    refused = set()
    for key, value in CHANGES.items():
        path.write_text(json.dumps({**before, key: value}))
        try:
            got = nn.LLM.load(tmp_path, model_file=llama.__file__).logits(ids)
        except NnfrontError:
            refused.add(key)
            continue
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(
            got, expected, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert refused == REFUSED[kind]


def test_multipliers_are_refused_by_their_names(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(
        **TINY, attention_multiplier=0.5, architectures=["GraniteForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(tmp_path, model_file=llama.__file__)
    first, *rest = caught.value.details
    assert (
        first
        == "model_type is 'granite', expected 'llama', 'mistral', 'ministral', 'iquestcoder' or 'seed_oss'"
    )
    assert "attention_multiplier is 0.5, and the file does not know the key" in rest


def test_what_mpt_says_of_attention_inside_another_key_is_refused_as_well() -> None:
    mpt = find_architecture("mpt").file.Config
    with pytest.raises(LoadError) as caught:
        mpt.from_hf({"attn_config": {"alibi": True, "qk_ln": True}})
    assert caught.value.what == "attn_config has qk_ln True, expected False"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"per_layer_config": {"3": {"sliding_window": 4}}},
            "per_layer_config gives layer 3 another sliding_window",
        ),
        (
            {"per_layer_config": {"full_attention": {"head_dim": 4}}},
            "per_layer_config speaks of layer 'full_attention', expected a number",
        ),
    ],
)
def test_sizes_of_single_layers_that_are_not_computed_are_refused(
    given: dict[str, object], expected: str
) -> None:
    with pytest.raises(LoadError) as caught:
        find_architecture("gemma4_text").file.Config.from_hf({"model_type": "gemma4_text", **given})
    assert caught.value.what == expected


def test_layers_that_read_keys_of_a_kind_that_none_stores_are_refused() -> None:
    file = find_architecture("gemma4_text").file
    config = dataclasses.replace(
        file.TINY, layer_types=("full_attention",) * 2 + ("sliding_attention", "full_attention")
    )
    with pytest.raises(
        LoadError, match="layer 2 reads keys and values of sliding_attention, and no layer stores such"
    ):
        file.build(config).export(file.export_spec(config))
