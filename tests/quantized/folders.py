# SPDX-License-Identifier: Apache-2.0
"""Folders of a small random Llama whose linear layers are stored in some way, and the same model in transformers with what the stored tensors stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import nnfront as nn

HIDDEN, INNER, VOCAB = 128, 256, 96
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))

Store = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""From a weight's name and value to the tensors that are stored in its place, and what they stand for in float32."""


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, **changes}, attn_implementation="eager")


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(**changes)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.1)
    return model


def write(
    folder: Path,
    model: torch.nn.Module,
    store: Store,
    quantization: Mapping[str, Any],
    *,
    dtype: str = "float32",
    others: str = "",
    key: str = "quantization_config",
) -> torch.nn.Module:
    """Write a folder whose linear layers, head excepted, are stored so; give the model what they stand for, in a dtype."""
    folder.mkdir(exist_ok=True)
    torch_dtype = getattr(torch, dtype)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if "proj.weight" in name:
            stored, dense = store(name, parameter.detach())
            found |= stored
            parameter.data = dense.to(torch_dtype).float()
        else:
            found[name] = parameter.detach().to(torch_dtype)
            parameter.data = found[name].float()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in found.items()}, folder / "model.safetensors"
    )
    said = {**model.config.to_dict(), "dtype": dtype, key: dict(quantization)}
    (folder / "config.json").write_text(json.dumps(said, default=str))
    return model


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def agrees(folder: Path, model: torch.nn.Module, **options: Any) -> nn.LLM:
    """Load a folder and hold its logits to those of transformers, and so the tokens behind a prompt and behind the first one."""
    llm = nn.LLM.load(folder, **options)
    expected = logits(model)
    torch.testing.assert_close(llm.logits(IDS), expected, rtol=1e-4, atol=1e-4)
    new = llm.generate_ids(IDS, 2)
    assert new[:, 0].tolist() == expected[:, -1].argmax(-1).tolist()
    assert new[:, 1].tolist() == logits(model, torch.cat([IDS, new[:, :1]], 1))[:, -1].argmax(-1).tolist()
    return llm


def kinds(llm: Any) -> dict[str, int]:
    """How many weights became what."""
    assert llm.stored is not None
    found: dict[str, int] = {}
    for weight in llm.stored.weights:
        text = weight.format or weight.dtype
        found[text] = found.get(text, 0) + 1
    return found
