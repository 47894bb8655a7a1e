# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers' own, with random weights, written as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
"""Heads of the smallest size that vLLM's attention computes on a CPU."""

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 2.0}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""What transformers calls each, and what it has besides the sizes."""


def written(folder: Path, name: str, **changes: Any) -> Any:
    """Write a model of a kind to `folder`; return transformers' own, in float32, with its own attention: not every other has soft caps."""
    kind, more = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, **more, **changes}, attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # so that what is attended to matters
        for parameter in model.parameters():
            parameter.mul_(6.0) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What the model of transformers writes after a prompt."""
    with torch.no_grad():
        written = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
        )
    return written[0, len(prompt) :].tolist()
