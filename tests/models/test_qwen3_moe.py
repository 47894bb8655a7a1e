# SPDX-License-Identifier: Apache-2.0
"""The Qwen3-MoE model file against transformers' own class with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from few_of import few_of
from nnfront_models import qwen3_moe

import nnfront as nn
from nnfront.errors import LoadError

ACTIVATIONS = "'silu', 'swish', 'gelu', 'gelu_new', 'gelu_fast', 'gelu_pytorch_tanh', 'relu' or 'relu2'"
BASE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # logits of order 1
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shares that add up to one, biases": {"norm_topk_prob": True, "attention_bias": True},
    "one expert of all": {"num_experts_per_tok": 1, "num_experts": 1},
    "all experts, tied": {"num_experts_per_tok": 6, "tie_word_embeddings": True},
    "dense layers between": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


@pytest.fixture(scope="module", params=few_of(CONFIGS, 3), ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.LLM]:
    """transformers' model and ours, of one folder."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**BASE, **CONFIGS[request.param]})
    theirs = transformers.Qwen3MoeForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("qwen3_moe")
    theirs.save_pretrained(folder)
    return theirs, nn.LLM.load(folder)


@pytest.mark.parametrize(("batch", "seq"), few_of([(1, 1), (3, 2), (1, 17), (3, 130)], 2))
def test_logits_equal_transformers(pair: tuple[Any, nn.LLM], batch: int, seq: int) -> None:
    theirs, ours = pair
    ids = torch.randint(0, BASE["vocab_size"], (batch, seq))
    with torch.no_grad():
        expected = theirs(ids).logits
    torch.testing.assert_close(
        ours.logits(ids), expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max()))
    )


def test_greedy_tokens_equal_transformers_for_prompts_of_different_lengths(pair: tuple[Any, nn.LLM]) -> None:
    theirs, ours = pair
    prompts = [torch.randint(0, BASE["vocab_size"], (n,)) for n in (1, 5, 12)]
    for prompt, got in zip(prompts, ours.generate_ids(prompts, max_new_tokens=16), strict=True):
        expected = theirs.generate(
            prompt[None], max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert got.tolist() == expected[0, len(prompt) :].tolist()


def test_both_generations_of_config_keys_are_read() -> None:
    old = {**BASE, "rope_theta": 1e6, "torch_dtype": "bfloat16"}
    new = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"}
    new["num_local_experts"] = new.pop("num_experts")
    assert qwen3_moe.Config.from_hf(old) == qwen3_moe.Config.from_hf(new)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is true, expected false"),
        ({"hidden_act": "mish"}, f"hidden_act is 'mish', expected {ACTIVATIONS}"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an int >= 1"),
        ({"mlp_only_layers": [0, -1]}, "mlp_only_layers is [0, -1], expected a list, each item an int >= 0"),
        ({"num_local_experts": 7}, "num_local_experts is 7, but num_experts is 6"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, and the file does not know the key"),
    ],
)
def test_what_the_file_cannot_do_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = {key: value for key, value in BASE.items() if key not in changes}
    with pytest.raises(LoadError) as caught:
        qwen3_moe.Config.from_hf({**config, "num_experts": 6, **changes})
    assert caught.value.details == (problem,)


def test_the_folder_is_proved_before_it_is_read(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**BASE)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 6', '"num_local_experts": 7'))
    with pytest.raises(LoadError, match=r"experts\.6\.gate_proj\.weight"):
        nn.LLM.load(tmp_path)
