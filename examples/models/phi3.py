# SPDX-License-Identifier: Apache-2.0
"""Phi-3, Phi-3.5 and Phi-4.

Source: transformers' `modeling_phi3.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: q, k, v and gate, up are
stored as one; a part of each head may be rotated.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"phi3": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {"attention_bias": "transformers has none", "embd_layer": "how it was trained"}
    rope_defaults: ClassVar = {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096}

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Phi3Attention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, k = config.hidden_size, config.head_size
        q, kv = config.num_attention_heads * k, config.kv_heads * k
        self.qkv_proj = nn.Linear(d, q + 2 * kv, bias=False)
        nn.joined((q, kv, kv), self.qkv_proj.weight)
        self.o_proj = nn.Linear(q, d, bias=False)
        self.head_size, self.window, self.splits = k, config.sliding_window, (q, q + kv)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(self.qkv_proj(x_BSD), self.splits, -1)
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSGK, v_BSGK


class Phi3DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        self.self_attn = Phi3Attention(config)
        self.mlp = nn.GateUpMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Phi3DecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
