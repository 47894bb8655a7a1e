# SPDX-License-Identifier: Apache-2.0
"""The Llama model file against transformers' own class with random weights, for every variation of its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nnfront_models import llama

import nnfront as nn

BASE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # logits of order 1
}

LONG = [1.0 + 0.1 * i for i in range(8)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": LONG,
        "long_factor": [2 * f for f in LONG],
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "one kv head": {"num_key_value_heads": 1},
    "all kv heads": {"num_key_value_heads": 4},
    "four of eight kv heads": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "head size not hidden over heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd vocabulary": {"vocab_size": 131, "hidden_act": "gelu"},
    **{f"rope {name}": {"rope_parameters": {"rope_theta": 10000.0, **rope}} for name, rope in ROPES.items()},
}


def reference(**changes: Any) -> transformers.LlamaForCausalLM:
    """transformers' model with random weights."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a weight that is not read
                p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, nn.LLM]:
    """A reference model and ours, loaded from the folder that the reference saved."""
    model = reference(**CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, nn.LLM.load(folder)


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids, use_cache=False).logits
    return result


@pytest.mark.parametrize("seq", [1, 2, 17, 300])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_equal_transformers(pair: Any, batch: int, seq: int) -> None:
    model, llm = pair
    ids = torch.randint(0, model.config.vocab_size, (batch, seq))
    expected = reference_logits(model, ids)
    assert 0.3 < expected.std() < 10
    torch.testing.assert_close(llm.logits(ids), expected, rtol=0, atol=1e-4)


def test_decoding_token_by_token_equals_the_whole_text(pair: Any) -> None:
    model, llm = pair
    ids = torch.randint(0, model.config.vocab_size, (3, 60))
    expected = reference_logits(model, ids)
    cache = llm.session.make_cache(batch=3, max_seq=64)
    got = [llm.session["prefill"](ids[:, :20], cache)]
    got += [llm.session["decode"](ids[:, i : i + 1], cache) for i in range(20, 60)]
    torch.testing.assert_close(torch.cat(got, 1), expected[:, 19:], rtol=0, atol=1e-4)


def test_a_prompt_in_chunks_equals_the_whole_text(pair: Any) -> None:
    model, llm = pair
    ids = torch.randint(0, model.config.vocab_size, (2, 50))
    expected = reference_logits(model, ids)
    cache = llm.session.make_cache(batch=2, max_seq=50)
    for first, last in ((0, 7), (7, 8), (8, 31), (31, 50)):
        got = llm.session["prefill"](ids[:, first:last], cache)
        torch.testing.assert_close(got[:, 0], expected[:, last - 1], rtol=0, atol=1e-4)


def test_greedy_tokens_of_prompts_of_different_lengths_are_those_transformers_would_choose(pair: Any) -> None:
    model, llm = pair
    if model.config.rope_parameters["rope_type"] == "dynamic":
        prompts = [torch.randint(0, model.config.vocab_size, (9,)) for _ in range(3)]
    else:
        prompts = [torch.randint(0, model.config.vocab_size, (n,)) for n in (5, 23, 11)]
    for prompt, tokens in zip(prompts, llm.generate_ids(prompts, max_new_tokens=64), strict=True):
        # Each token is the likeliest after those before it: by induction the two models generate the same text.
        logits = reference_logits(model, torch.cat([prompt, tokens])[None])[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens.tolist()


def test_greedy_text_equals_transformers_generate(tmp_path: Path) -> None:
    model = reference()
    model.save_pretrained(tmp_path)
    llm = nn.LLM.load(tmp_path)
    model.generation_config.eos_token_id = None
    prompts = [torch.randint(0, model.config.vocab_size, (n,)) for n in (4, 9, 6)]
    for prompt, tokens in zip(prompts, llm.generate_ids(prompts, max_new_tokens=64), strict=True):
        ids = prompt[None]
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert theirs[0, len(prompt) :].tolist() == tokens.tolist()


def test_bfloat16_errs_no_more_than_three_times_as_much_as_transformers(tmp_path: Path) -> None:
    reference(num_hidden_layers=3).to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.randint(0, 259, (2, 64))
    exact, half = (
        reference_logits(
            transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval(), ids
        ).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    theirs = (half - exact).abs()
    ours = (nn.LLM.load(tmp_path).logits(ids) - exact).abs()
    assert 0 < ours.max() <= 3 * theirs.max()
    assert ours.square().mean().sqrt() <= 3 * theirs.square().mean().sqrt()


def test_a_checkpoint_can_be_loaded_in_another_dtype(tmp_path: Path) -> None:
    reference().to(torch.bfloat16).save_pretrained(tmp_path)
    wide = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 259, (2, 17))
    llm = nn.LLM.load(tmp_path, dtype="float32")
    torch.testing.assert_close(llm.logits(ids), reference_logits(wide, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("generation", ["old", "new"])
def test_both_generations_of_configuration_keys_are_read(generation: str) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    common = {k: v for k, v in BASE.items() if k != "initializer_range"}
    if generation == "old":
        raw = {
            **common,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **scaling},
            "torch_dtype": "bfloat16",
        }
    else:
        raw = {
            **common,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling},
            "dtype": "bfloat16",
        }
    config = llama.Config.from_hf(raw)
    assert config.rope_parameters == {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert config.dtype == "bfloat16"
    assert config.hidden_size == 64


def test_the_module_runs_eagerly_like_transformers() -> None:
    model = reference()
    config = llama.Config.from_hf(model.config.to_dict())
    ours = llama.build(config)
    ours.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
    ids = torch.randint(0, 259, (2, 17))
    torch.testing.assert_close(nn.eager(ours.logits, ids), reference_logits(model, ids), rtol=0, atol=1e-4)
