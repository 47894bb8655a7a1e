# SPDX-License-Identifier: Apache-2.0
"""Persimmon and Fuyu's decoder.

Source: transformers' `modeling_persimmon.py` (5.x), whose attribute names are the checkpoint's. Layer norms and biases; q, k and v are stored as one, head by
head; heads of q and k are normalised; half of each head is rotated; the feed-forward part has no gate.

Sizes: B batch, S seq, D hidden_size, H heads, K head size.
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
    model_types: ClassVar = {"persimmon": {}}
    lacks: ClassVar = {"persimmon": ("head_dim", "num_key_value_heads")}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}

    vocab_size: int = 262144
    intermediate_size: int = 16384
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    hidden_act: str = "relu2"
    max_position_embeddings: int = 16384
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = True


class PersimmonAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, k, eps = config.hidden_size, config.num_attention_heads, config.head_size, config.layer_norm_eps
        self.query_key_value = nn.Linear(d, 3 * h * k)
        self.dense = nn.Linear(h * k, d)
        self.q_layernorm = nn.LayerNorm(k, eps) if config.qk_layernorm else nn.Identity()
        self.k_layernorm = nn.LayerNorm(k, eps) if config.qk_layernorm else nn.Identity()
        self.weight = nn.part_by_part(self.query_key_value.weight, h)
        self.bias = nn.part_by_part(self.query_key_value.bias, h)
        self.head_size, self.splits = k, (h * k, 2 * h * k)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(op.linear(x_BSD, self.weight, self.bias), self.splits, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        return self.q_layernorm(q_BSHK), self.k_layernorm(k_BSHK), v_BSHK

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.dense(self.attend(x_BSD, rope, cache))


class PersimmonDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        self.self_attn = PersimmonAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            names=("dense_h_to_4h", "dense_4h_to_h"),
        )
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)


class PersimmonModel(nn.Module):
    def __init__(self, config: Config) -> None:
        length = config.max_position_embeddings
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [PersimmonDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = nn.RotaryEmbedding(config.head_size, config.rope_parameters, length)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.final_layernorm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = PersimmonModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
