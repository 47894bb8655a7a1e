# SPDX-License-Identifier: Apache-2.0
"""A GGUF file, seen as a Hugging Face folder: its metadata say what config.json, generation_config.json and tokenizer.json would.

What is made of metadata goes the way of any folder from there on: keys that no model file knows are refused, an artefact takes the files along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from nnfront.errors import LoadError
from nnfront.files import Folder, shown
from nnfront.llm.folder_files import CONFIG, GENERATION
from nnfront.llm.gguf_tokenizer import NoTokenizer, tokenizer_of
from nnfront.quantized import Settings
from nnfront.quantized.gguf import ARCHITECTURES
from nnfront.weights import Checkpoint
from nnfront.weights.gguf import is_gguf
from nnfront.weights.gguf_parts import whole_of, with_its_parts

FACTORS = "rope_freqs.weight"
TOKENIZER = "tokenizer.json"


class GgufFolder(Folder):
    """The folder of a GGUF model, or of the one file at a path and its other parts. Raises LoadError for metadata that say no model that is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        is_file = not os.path.isdir(path)
        has_parts = is_file and whole_of(os.path.basename(path)) is not None
        whole = os.path.realpath(path) if is_file and not has_parts else os.path.abspath(path)
        super().__init__(os.path.dirname(whole) if is_file else whole)
        self._only = with_its_parts(os.path.basename(whole), super().names()) if is_file else None
        self._made: dict[str, bytes] = {}
        self._lacks: dict[str, str] = {}
        checkpoint = Checkpoint(whole, folder=self, headers_only=True)
        metadata = checkpoint.metadata
        self._put(CONFIG, lambda: _config(metadata, checkpoint, self._factors(checkpoint)))
        self._put(GENERATION, lambda: _generation(metadata))
        self._put(TOKENIZER, lambda: tokenizer_of(metadata))

    def _factors(self, checkpoint: Checkpoint) -> list[float] | None:
        """The factors of rotary wavelengths, if there are some; ones if the file ends before them."""
        info = checkpoint.infos.get(FACTORS)
        if info is None or len(info.shape) != 1 or info.dtype != "float32":
            return None
        if checkpoint.truncated:
            return [1.0] * info.shape[0]
        found: list[float] = Checkpoint(checkpoint.path, folder=self).tensor(FACTORS).tolist()
        return found

    def _put(self, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._made[name] = json.dumps(make(), ensure_ascii=False).encode("utf-8", "replace")
        except NoTokenizer as error:
            self._lacks[name] = str(error)

    def names(self, below: str = ".") -> list[str]:
        return (
            [name for name in super().names(below) if name.endswith(".gguf")]
            if self._only is None
            else list(self._only)
        )

    def has(self, name: str) -> bool:
        return name in self._made or (name in self.names() and super().has(name))

    def read(self, name: str) -> bytes:
        return self._made[name] if name in self._made else super().read(name)

    def why_not(self, name: str) -> str:
        return self._lacks.get(name, "")


def holds_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no safetensors."""
    if os.path.isdir(path):
        names = Folder(path).names()
        return any(n.endswith(".gguf") for n in names) and not any(n.endswith(".safetensors") for n in names)
    if not os.path.isfile(path):
        return False
    whole = os.path.realpath(path)
    return is_gguf(Folder(os.path.dirname(whole)), os.path.basename(whole))


def _config(
    metadata: Mapping[str, Any], checkpoint: Checkpoint, factors: list[float] | None
) -> dict[str, Any]:
    """config.json, from the keys of the file's architecture."""
    path, name = checkpoint.path, metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise LoadError(
            f"{path}: general.architecture is {shown(name)}",
            details=[f"known: {', '.join(ARCHITECTURES)}"],
            help="load the model from a folder with config.json and safetensors",
        )
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    settings, infos = Settings(own, f"{path}: metadata of {name}"), checkpoint.infos
    heads = settings.positive("attention.head_count") or 1
    hidden = settings.positive("embedding_length") or 1
    head_size = settings.positive("attention.key_length", max(hidden // heads, 1))
    settings.get("attention.value_length", head_size, only=(head_size,))
    settings.get("rope.dimension_count", head_size, only=(head_size,))
    settings.get("attention.causal", True, only=(True,))
    settings.get("expert_count", 0, only=(0,))
    settings.unused("expert_used_count")
    vocab = infos["token_embd.weight"].shape[0] if "token_embd.weight" in infos else 1
    config: dict[str, Any] = {
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": settings.positive("feed_forward_length"),
        "num_hidden_layers": settings.positive("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.positive("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": settings.positive("context_length"),
        "vocab_size": settings.get("vocab_size", vocab, only=(vocab,)),
        "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in infos,
        "rope_parameters": _rope(settings, factors),
        "dtype": _dtype(checkpoint),
        "quantization_config": {"quant_method": "gguf", "architecture": name, "head_dim": head_size},
    }
    if name == "llama" or name == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in infos
    settings.check()
    return config


def _rope(settings: Settings, factors: list[float] | None) -> dict[str, Any]:
    """Rotary parameters; factors of the wavelengths of each pair are a tensor of their own."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base", 10000.0)}
    kind = settings.get("rope.scaling.type", "none", only=("none", "linear", "yarn"))
    factor = settings.get("rope.scaling.factor")
    original = settings.get("rope.scaling.original_context_length")
    settings.unused("rope.scaling.finetuned")
    if kind in ("linear", "yarn"):
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_max_position_embeddings"] = original
    if factors is not None:
        if kind != "none":
            settings.problems.append(f"rope.scaling.type is {shown(kind)}, and there is {FACTORS}")
        found |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        found |= {"attention_factor": 1.0, "original_max_position_embeddings": settings.get("context_length")}
    return found


def _dtype(checkpoint: Checkpoint) -> str:
    """What to compute in: the dtype of the matrices if they have one, else bfloat16."""
    matrices = {info.encoding or info.dtype for info in checkpoint.infos.values() if len(info.shape) == 2}
    found = next(iter(matrices)) if len(matrices) == 1 else ""
    return found if found in ("float32", "float16", "bfloat16") else "bfloat16"


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the tokens that end a text."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {"eos_token_id": sorted({end for end in ends if isinstance(end, int)})}
