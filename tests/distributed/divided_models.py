# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose sizes divide by 4, with fewer heads of keys than that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from configurations import with_random_weights
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3_moe": SMALL | EXPERTS | {"mlp_only_layers": [0]},
    "deepseek_v3": SMALL
    | EXPERTS
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen3_next": SMALL
    | EXPERTS
    | {
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def save(name: str, folder: Path, seed: int = 0) -> None:
    """Write transformers' model with random weights in float32, and ids."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with_random_weights(model).save_pretrained(folder)
    torch.save(torch.randint(0, 101, (2, 12)), folder / "ids.pt")
