# SPDX-License-Identifier: Apache-2.0
"""What `test_models` does not ask of the Llama model file: half types, both generations of keys, eager runs, transformers' own generation."""

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


def reference(**changes: Any) -> transformers.LlamaForCausalLM:
    """transformers' model with random weights."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a weight that is not read
                p.add_(0.3 * torch.randn_like(p))
    return model


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids, use_cache=False).logits
    return result


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
