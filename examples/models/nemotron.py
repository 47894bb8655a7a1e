# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 and 4, and Minitron.

Source: transformers' `modeling_nemotron.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: layer norms, which multiply by one plus their
weight; the feed-forward part has no gate; half of each head is rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"nemotron": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 256000
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_attention_heads: int = 48
    hidden_act: str = "relu2"
    max_position_embeddings: int = 4096
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class NemotronLayerNorm(nn.LayerNorm):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.norm_eps)
        self.factor = self.weight + 1.0

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.layer_norm(x_BSD, self.normalized_shape, self.factor, self.bias, self.eps)


class NemotronDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, config.attention_bias)
        self.mlp = nn.MLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = NemotronLayerNorm(config)
        self.post_attention_layernorm = NemotronLayerNorm(config)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [NemotronDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            NemotronLayerNorm(config),
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
