# SPDX-License-Identifier: Apache-2.0
"""Gemma 2.

Source: transformers' `modeling_gemma2.py` (5.x), whose attribute names are the checkpoint's. Differences from Gemma 1: a norm before and after
each part, every other layer sees a window, scores of attention and logits are capped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"gemma2": {}}
    only: ClassVar = {
        "hidden_activation": nn.ACTIVATIONS,
        "use_bidirectional_attention": (False,),
    }
    unused: ClassVar = {"hidden_act": "transformers reads hidden_activation"}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


class Gemma2RMSNorm(nn.RMSNorm):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, -1, config.rms_norm_eps, bias=False, offset=1.0)


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(
            *sizes,
            bias=config.attention_bias,
            window=window,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        self.mlp = nn.GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_activation)
        self.input_layernorm = Gemma2RMSNorm(config)
        self.post_attention_layernorm = Gemma2RMSNorm(config)
        self.pre_feedforward_layernorm = Gemma2RMSNorm(config)
        self.post_feedforward_layernorm = Gemma2RMSNorm(config)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        x_BSD = x_BSD + self.post_attention_layernorm(y_BSD)
        y_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD))
        return x_BSD + self.post_feedforward_layernorm(y_BSD)


class Gemma2ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.ScaledEmbedding(config.vocab_size, config.hidden_size, config.hidden_size**0.5),
            [Gemma2DecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)],
            Gemma2RMSNorm(config),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.softcap = config.final_logit_softcapping

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        logits = super().head(x_BSD)
        return logits if self.softcap is None else op.tanh(logits / self.softcap) * self.softcap


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return Gemma2ForCausalLM(config)


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
