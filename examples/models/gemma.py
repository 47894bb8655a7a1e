# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 and CodeGemma.

Source: transformers' `modeling_gemma.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: norms multiply by one plus
their weight, embeddings by the root of their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"gemma": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {"hidden_activation": "transformers reads hidden_act"}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False


class GemmaRMSNorm(nn.RMSNorm):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, -1, config.rms_norm_eps, bias=False, offset=1.0)


class GemmaDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, bias=config.attention_bias)
        self.mlp = nn.GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = GemmaRMSNorm(config)
        self.post_attention_layernorm = GemmaRMSNorm(config)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.ScaledEmbedding(config.vocab_size, config.hidden_size, config.hidden_size**0.5),
            [GemmaDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            GemmaRMSNorm(config),
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
