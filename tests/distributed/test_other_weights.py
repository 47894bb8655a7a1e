# SPDX-License-Identifier: Apache-2.0
"""Weights that are not simply a checkpoint's, divided among ranks: with an adapter, kept in a cache of results, quantised by others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import assert_near
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


def in_8_bits(group: int | None, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    scale = groups.abs().amax(2) / 127
    q = (groups / scale[..., None]).round()
    return {"": q.reshape(weight.shape).to(torch.int8), "_scale": scale}, (q * scale[..., None]).reshape(
        weight.shape
    )


def in_8_bits_if_square(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """q and o, of q, k and v that are multiplied with as one, and o."""
    return in_8_bits(None, weight) if weight.shape[0] == weight.shape[1] else ({"": weight}, weight)


def in_nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Any numbers of the format."""
    codes = torch.randint(0, 16, weight.shape)
    scale = torch.rand(weight.shape[0], weight.shape[1] // 16).add(0.5).to(torch.float8_e4m3fn)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    dense = torch.cat([sizes, -sizes])[codes] * (scale.float() * 0.03).repeat_interleave(16, 1)
    return {"": packed, "_scale": scale, "_scale_2": torch.tensor(0.03)}, dense


def in_groups(size: int) -> dict[str, Any]:
    """The settings, with scales for so many inputs."""
    found: dict[str, Any] = json.loads(json.dumps(SETTINGS))
    found["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": size}
    return found


# How weights are stored, what config.json says of it, and what becomes of them.
WAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "int8": (partial(in_8_bits, None), SETTINGS, "compressed-tensors of 8 bits: 14 weights kept as int8"),
    "groups": (
        partial(in_8_bits, 32),
        in_groups(32),
        "compressed-tensors of 8 bits: 14 weights kept as int8 in groups of 32",
    ),
    "beside floats": (
        in_8_bits_if_square,
        SETTINGS,
        "compressed-tensors of 8 bits: 4 weights kept as int8",
    ),
    "nvfp4": (
        in_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4: 14 weights kept as nvfp4",
    ),
}


def quantised(way: str, folder: Path, theirs: Any) -> dict[str, Any]:
    """A folder that is stored in a way, and what that stands for in transformers' model."""
    torch.manual_seed(0)
    store, settings, _ = WAYS[way]
    stored = load_file(folder / "model.safetensors")
    weights = dict(theirs.named_parameters())
    for name in [each for each in stored if each.endswith("_proj.weight")]:
        parts, dense = store(stored.pop(name))
        stored |= {f"{name}{part}": tensor for part, tensor in parts.items()}
        weights[name].data.copy_(dense)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return {}


@pytest.mark.parametrize("kind", ["adapter", "cache", *WAYS])
def test_ranks_compute_what_transformers_does(
    kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager").eval()
    folder = tmp_path / "model"
    theirs.save_pretrained(folder)
    how: dict[str, Any] = {}
    if kind != "cache":
        how = adapted(folder, theirs) if kind == "adapter" else quantised(kind, folder, theirs)
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
            assert_near(found, expected)
    if kind in WAYS:
        assert str(compiled.stored) == f"stored as {WAYS[kind][2]}"
