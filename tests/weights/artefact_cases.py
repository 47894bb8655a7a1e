# SPDX-License-Identifier: Apache-2.0
"""Small models whose weights are a formula of their names, and the artefacts that the tests make of them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.artefact.integrity import digest_files
from nnfront.artefact.manifest import digest_of_fields
from nnfront.files import Folder

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
    "dtype": "float32",
}


def weight(name: str, shape: tuple[int, ...], scale: float = 0.5) -> torch.Tensor:
    """A weight that depends on its name and nothing else: sines at a phase of its own."""
    count = int(torch.tensor(shape).prod())
    phase = zlib.crc32(name.encode()) % 1000
    wave = torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + phase)
    return (scale * wave + (1.0 if "norm" in name else 0.0)).to(torch.float32).reshape(shape)


def llama_weights() -> dict[str, torch.Tensor]:
    """The weights of the two-layer Llama of CONFIG."""
    d, h, v, kv = 8, 12, 16, 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (d, d),
            f"{layer}.self_attn.k_proj.weight": (kv, d),
            f"{layer}.self_attn.v_proj.weight": (kv, d),
            f"{layer}.self_attn.o_proj.weight": (d, d),
            f"{layer}.mlp.gate_proj.weight": (h, d),
            f"{layer}.mlp.up_proj.weight": (h, d),
            f"{layer}.mlp.down_proj.weight": (d, h),
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
        }
    shapes |= {"model.norm.weight": (d,), "lm_head.weight": (v, d)}
    return {name: weight(name, shape) for name, shape in shapes.items()}


def write_folder(folder: Path) -> Path:
    """A Hugging Face folder of that Llama, with a tokenizer of sixteen words."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.torch.save_file(llama_weights(), folder / "model.safetensors")
    words = {word: i for i, word in enumerate("[unk] a b c d e f g h i j k l m n o".split())}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[unk]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Varied(nn.Module):
    """Two methods over shared weights: derived ones, dims that only weights say, a branch, a dict and a tuple as results."""

    def __init__(self) -> None:
        self.gate = nn.Linear(4, 6, bias=False)
        self.up = nn.Linear(4, 6)
        self.table = nn.Embedding("vocab", 4)
        self.both = op.concat([self.gate.weight, self.up.weight], dim=0)
        self.half = op.astype(self.gate.weight, "bfloat16")

    def forward(self, x: Any) -> Any:
        gate, up = op.split(op.matmul(x, op.permute_dims(self.both)), 2, axis=-1)
        y = op.silu(gate) * (up + self.up.bias)
        return {"y": y, "half": op.matmul(op.astype(x, "bfloat16"), op.permute_dims(self.half))}

    def look(self, ids: Any, flag: Any) -> Any:
        rows = self.table(ids)
        scaled = op.cond(flag, lambda: rows * 2.0, lambda: rows + 1.0)
        return scaled, op.matmul(rows, op.permute_dims(self.table.weight))


VARIED_SPEC = {
    "forward": {"x": spec.Tensor(["n", 4])},
    "look": {"ids": spec.Tensor(["n", "m"], "int64"), "flag": spec.Tensor([], "bool")},
}
VARIED_WEIGHTS = {
    "gate.weight": weight("gate.weight", (6, 4)),
    "up.weight": weight("up.weight", (6, 4)),
    "up.bias": weight("up.bias", (6,)),
    "table.weight": weight("table.weight", (5, 4)),
}


def varied_inputs() -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        "forward": (weight("x", (3, 4)),),
        "look": (torch.tensor([[0, 4], [2, 1]]), torch.tensor(True)),
    }


def varied_session(**lift: Any) -> nn.Session:
    """The session of `Varied`; `lift` are options of the lifting."""
    ir = nn.passes.lift_transform_params(
        Varied().export(VARIED_SPEC), **({"shared_transform": True, "allow_growth": True} | lift)
    )
    return nn.compile(ir).load(VARIED_WEIGHTS)


def outputs(session: nn.Session) -> list[torch.Tensor]:
    """What the methods of `Varied` give, as one list."""
    y, look = (session[name](*args) for name, args in varied_inputs().items())
    return [y["y"], y["half"], *look]


def rehash(folder: Path, **changes: Any) -> None:
    """Write the hashes of the files as they are now into the manifest, as whoever forges an artefact would; `changes` are fields."""
    file = folder / "nnfront.json"
    fields = json.loads(file.read_text())
    names = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file() and f != file)
    fields["files"] = {
        name: {
            "bytes": d.size_bytes,
            "sha256": d.sha256,
            "crc32": [f"{c:08x}" for c in d.crc32],
        }
        for name, d in zip(names, digest_files(Folder(folder), names), strict=True)
    }
    file.write_text(json.dumps(fields | changes))
    reseal(folder)


def reseal(folder: Path) -> None:
    """Make the manifest's own hash right, if it is a JSON object."""
    file = folder / "nnfront.json"
    fields = json.loads(file.read_text())
    if isinstance(fields, dict):
        file.write_text(json.dumps({**fields, "sha256": digest_of_fields(fields)}))
