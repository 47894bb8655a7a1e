# SPDX-License-Identifier: Apache-2.0
"""GLM-4 (of 2025) and GLM-Z1.

Source: transformers' `modeling_glm4.py` (5.x), whose attribute names are the checkpoint's. Differences from the earlier GLM: what each part adds is normalised too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"glm4": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True


class Glm4DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, bias = config.hidden_size, config.attention_bias
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        rotated = int(config.head_size * config.rope_parameters["partial_rotary_factor"])
        self.self_attn = nn.Attention(*sizes, bias, out_bias=False, interleaved=rotated)
        self.mlp = nn.GateUpMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_self_attn_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_mlp_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        x_BSD = x_BSD + self.post_self_attn_layernorm(y_BSD)
        return x_BSD + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x_BSD)))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Glm4DecoderLayer(config) for _ in range(config.num_hidden_layers)],
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
