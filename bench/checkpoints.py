# SPDX-License-Identifier: Apache-2.0
"""Write random bf16 checkpoints in the shapes of well-known models: `python bench/checkpoints.py FOLDER [NAME ...]`.

They have config.json and model.safetensors, no tokenizer. qwen2.5-0.5b has that model's sizes in Llama's architecture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIGS = {
    "llama-3.2-1b": LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2.5-0.5b": LlamaConfig(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write one checkpoint unless it is there; return its folder."""
    path = folder / name
    if (path / "model.safetensors").exists():
        return path
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(CONFIGS[name], dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.02)
    model.save_pretrained(path)
    return path


def main() -> None:
    """Write the named checkpoints, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CONFIGS))
    args = parser.parse_args()
    for name in args.names:
        print(write(name, args.folder))


if __name__ == "__main__":
    main()
