# SPDX-License-Identifier: Apache-2.0
"""HyperCLOVA X.

Source: transformers' `modeling_hyperclovax.py` (5.x), whose attribute names are the checkpoint's. Differences from Granite: what each part adds
is normalised too, and logits are multiplied, not divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"hyperclovax": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    use_post_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_multiplier is None:
            object.__setattr__(self, "attention_multiplier", self.head_size**-0.5)


class HyperClovaXDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, bias = config.hidden_size, config.attention_bias
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, bias, scale=config.attention_multiplier)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_norm1 = self.post_norm2 = nn.Identity()
        if config.use_post_norm:
            self.post_norm1 = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
            self.post_norm2 = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.multiplier = config.residual_multiplier

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        x_BSD = x_BSD + self.post_norm1(y_BSD) * self.multiplier
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + self.post_norm2(y_BSD) * self.multiplier


class HyperClovaXForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.ScaledEmbedding(config.vocab_size, config.hidden_size, config.embedding_multiplier),
            [HyperClovaXDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.scaling = config.logits_scaling

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return super().head(x_BSD) * self.scaling


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return HyperClovaXForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_multiplier=0.125,
    residual_multiplier=0.5,
    embedding_multiplier=12.0,
    logits_scaling=4.0,
    max_position_embeddings=256,
)
