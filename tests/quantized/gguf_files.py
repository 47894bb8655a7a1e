# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small random models, written by the library that defines the format; and what their tensors stand for, by the same library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
}


def name_of(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def in_pairs(x: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of heads whose halves are rotated together, as pairs of neighbours."""
    halves = x.reshape(-1, 2, head_size // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def in_halves(x: np.ndarray, head_size: int) -> np.ndarray:
    pairs = x.reshape(-1, head_size // 2, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def random_blocks(shape: tuple[int, ...], type: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Bytes of blocks whose scales are small finite numbers."""
    rng = np.random.default_rng(seed)
    numbers, size = GGML_QUANT_SIZES[type]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // numbers, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    places = halves.get(type.name, (0, 2) if type.name.endswith("_1") else (0,))
    if type.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    else:
        for place in places:
            scales = rng.uniform(0.5, 1.5, len(blocks)) * 0.1 / {32: 16, 256: 512}[numbers]
            blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path,
    model: torch.nn.Module,
    architecture: str = "llama",
    types: Mapping[str, str] | str = "F32",
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    factors: np.ndarray | None = None,
    tensors_each: int = 0,
) -> torch.nn.Module:
    """Write a model, into several files if one is to have so many tensors, whose matrices are of these types, by a part of their name; give it what they stand for, in a dtype."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_each)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_eos_token_id(7)
    for key, value in (metadata or {}).items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        is_transposed = architecture == "llama" and ("q_proj" in name or "k_proj" in name)
        wanted = types if isinstance(types, str) else next((t for n, t in types.items() if n in name), "F32")
        data = parameter.detach().numpy()
        data = in_pairs(data, head_size) if is_transposed else data
        kind = GGMLQuantizationType[wanted if data.ndim == 2 else "F32"]
        if kind.name in ("F32", "F16"):
            data = data.astype(kind.name.lower().replace("f", "float"))
            dense = data.astype(np.float32)
        elif kind.name == "BF16":
            data = gguf.quants.quantize(data, kind)
            dense = dequantize(data, kind)
        else:
            data = random_blocks(data.shape, kind, seed)
            dense = dequantize(data, kind)
        writer.add_tensor(name_of(name), data, raw_dtype=kind)
        dense = in_halves(dense, head_size) if is_transposed else dense
        parameter.data = torch.from_numpy(dense.copy()).to(dtype).float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
