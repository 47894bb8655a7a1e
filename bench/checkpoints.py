# SPDX-License-Identifier: Apache-2.0
"""Write random bf16 checkpoints in the shapes of well-known models: `python bench/checkpoints.py FOLDER [NAME ...]`.

They have config.json and model.safetensors, no tokenizer. qwen2.5-0.5b has that model's sizes in Llama's architecture. `write_int4` adds one whose linear layers are in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
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


def write_int4(path: Path) -> Path:
    """A checkpoint beside one, FOLDER-int4, unless it is there; return its folder.

    Linear layers are in 4 bits, groups of 128 without zero points, as compressed-tensors packs them; the embedding, which is the head as well, stays as it is.
    """
    folder, groups = path.with_name(f"{path.name}-int4"), 128
    if (folder / "model.safetensors").exists():
        return folder
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=groups, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        grouped = weight.unflatten(1, (-1, groups))
        scale, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        base = name.removesuffix("weight")
        stored |= {f"{base}{key}": part for key, part in compressor.compress(state, scheme).items()}
    how = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    )
    folder.mkdir(exist_ok=True)
    for each in path.glob("*.json"):
        shutil.copy(each, folder)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = how.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


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
