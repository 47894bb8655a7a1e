# SPDX-License-Identifier: Apache-2.0
"""Random adapters of the shipped checkpoint, in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")


def random_adapter(folder: Path, seed: int, rank: int = 4, modules: tuple[str, ...] = MODULES) -> Path:
    """Write one that changes texts, and return its folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(SHIPPED / "model.safetensors").items():
        if name.removesuffix(".weight").split(".", 3)[-1] in modules:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 16
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})
    )
    return folder
