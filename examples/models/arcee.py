# SPDX-License-Identifier: Apache-2.0
"""Arcee (AFM).

Source: transformers' `modeling_arcee.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: the feed-forward part has no gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"arcee": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    hidden_size: int = 2560
    intermediate_size: int = 18432
    hidden_act: str = "relu2"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class ArceeDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, config.attention_bias)
        self.mlp = nn.MLP(d, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [ArceeDecoderLayer(config) for _ in range(config.num_hidden_layers)],
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
