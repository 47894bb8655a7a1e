# SPDX-License-Identifier: Apache-2.0
"""Weights that are not simply a checkpoint's, divided among ranks: with an adapter, kept in a cache of results, quantised by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Threads
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nnfront as nn

SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}


def adapted(folder: Path, theirs: Any) -> dict[str, Any]:
    """An adapter of weights that ranks cut along either axis, and the same sum in transformers' model."""
    weights, tensors = dict(theirs.named_parameters()), {}
    for layer in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.0.{layer}"
        weight = weights[f"{name}.weight"].data
        a, b = torch.randn(4, weight.shape[1]) / 8, torch.randn(weight.shape[0], 4) / 8
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        weight += 2 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return {"lora": [folder]}


def quantised(folder: Path, theirs: Any) -> dict[str, Any]:
    """A folder in 8 bits, and what they stand for in transformers' model."""
    stored = load_file(folder / "model.safetensors")
    weights = dict(theirs.named_parameters())
    for name in [each for each in stored if each.endswith("_proj.weight")]:
        scale = stored[name].abs().amax(1, keepdim=True) / 127
        stored[f"{name}_scale"] = scale
        stored[name] = (stored[name] / scale).round().to(torch.int8)
        weights[name].data.copy_(stored[name].float() * scale)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return {}


@pytest.mark.parametrize("kind", ["adapter", "cache", "quantised"])
def test_ranks_compute_what_transformers_does(
    kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager").eval()
    folder = tmp_path / "model"
    theirs.save_pretrained(folder)
    how: dict[str, Any] = {}
    if kind != "cache":
        how = {"adapter": adapted, "quantised": quantised}[kind](folder, theirs)
        folder = folders["llama"] if kind == "adapter" else folder
    compiled = nn.compile_folder(folder, ranks=2, **how)
    ids = torch.load(folders["llama"] / "ids.pt")
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    cache = tmp_path / "results" if kind == "cache" else None

    def logits(rank: int) -> torch.Tensor:
        session = compiled.executable.of_rank(rank).load(compiled.checkpoint, cache=cache)
        found: torch.Tensor = session["logits"](ids)
        return found

    for _ in range(2):  # the second time from what is kept
        for found in Threads(2, monkeypatch).run(logits):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if kind == "quantised":
        assert compiled.stored is not None
        assert "made float32" in str(compiled.stored)
