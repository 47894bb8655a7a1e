# SPDX-License-Identifier: Apache-2.0
"""OLMo 2.

Source: transformers' `modeling_olmo2.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: what each part adds is normalised, not what it
reads; q and k are normalised, all heads at once.

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
    model_types: ClassVar = {"olmo2": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}

    vocab_size: int = 50304
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Olmo2Attention(nn.Attention):
    def __init__(self, config: Config) -> None:
        h, g, k = config.num_attention_heads, config.kv_heads, config.head_size
        super().__init__(config.hidden_size, h, g, k, config.attention_bias)
        self.q_norm = nn.RMSNorm(h * k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(g * k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q, k, v = self.qkv(x_BSD)
        parts = (self.q_norm(q), self.k_norm(k), v)
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSGK, v_BSGK


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.self_attn = Olmo2Attention(config)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_feedforward_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.post_attention_layernorm(self.self_attn(x_BSD, rope, cache))
        return x_BSD + self.post_feedforward_layernorm(self.mlp(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Olmo2DecoderLayer(config) for _ in range(config.num_hidden_layers)],
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
