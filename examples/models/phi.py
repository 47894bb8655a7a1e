# SPDX-License-Identifier: Apache-2.0
"""Phi-1, Phi-1.5 and Phi-2.

Source: transformers' `modeling_phi.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: layer norms and biases everywhere, in the head too;
both parts of a layer read the same norm; half of each head is rotated; the feed-forward part has no gate.

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

    model_types: ClassVar = {"phi": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 51200
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False


class PhiAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, k, eps = config.hidden_size, config.head_size, config.layer_norm_eps
        self.q_proj = nn.Linear(d, config.num_attention_heads * k)
        self.k_proj = nn.Linear(d, config.kv_heads * k)
        self.v_proj = nn.Linear(d, config.kv_heads * k)
        self.dense = nn.Linear(config.num_attention_heads * k, d)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.q_layernorm = nn.LayerNorm(k, eps) if config.qk_layernorm else nn.Identity()
        self.k_layernorm = nn.LayerNorm(k, eps) if config.qk_layernorm else nn.Identity()
        self.head_size = k

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_layernorm(q_BSHK), self.k_layernorm(k_BSGK), v_BSGK

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.dense(self.attend(x_BSD, rope, cache))


class PhiDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        self.self_attn = PhiAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, names=("fc1", "fc2")
        )
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        return x_BSD + self.self_attn(y_BSD, rope, cache) + self.mlp(y_BSD)


class PhiModel(nn.Module):
    def __init__(self, config: Config) -> None:
        length = config.max_position_embeddings
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [PhiDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = nn.RotaryEmbedding(config.head_size, config.rope_parameters, length)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.final_layernorm(x_BSD)


class PhiForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.model = PhiModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return PhiForCausalLM(config)


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
