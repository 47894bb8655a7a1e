# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense.

Source: transformers' `modeling_ernie4_5.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: neighbours are the pairs that are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"ernie4_5": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"rope_theta": 500000.0}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = False


class ErnieDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d, bias = config.hidden_size, config.use_bias
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, bias, interleaved=config.head_size)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act, bias)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [ErnieDecoderLayer(config) for _ in range(config.num_hidden_layers)],
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
    head_dim=16,
    max_position_embeddings=256,
)
