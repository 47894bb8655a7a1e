# SPDX-License-Identifier: Apache-2.0
"""Apertus.

Source: transformers' `modeling_apertus.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: heads of q and k are normalised; the
feed-forward part has no gate, and an activation with two learned numbers.

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

    model_types: ClassVar = {"apertus": {}}
    only: ClassVar = {"hidden_act": ("xielu",)}
    unused: ClassVar = {
        "post_norm": "transformers does not read it",
        "qk_norm": "transformers does not read it",
        "mlp_bias": "transformers has none",
    }
    rope_defaults: ClassVar = {
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 131072
    intermediate_size: int = 14336
    hidden_act: str = "xielu"
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class XIELU(nn.Module):
    """alpha_p * x^2 + beta * x for positive x, else (exp(min(x, eps)) - 1 - x) * alpha_n + beta * x, alphas by softplus of what is learned."""

    def __init__(self) -> None:
        self.alpha_p = nn.Parameter((1,))
        self.alpha_n = nn.Parameter((1,))
        self.beta = nn.Parameter(())
        self.eps = nn.Parameter(())
        self.positive = op.softplus(self.alpha_p)
        self.negative = self.beta + op.softplus(self.alpha_n)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        below = (op.exp(op.minimum(x, self.eps)) - 1 - x) * self.negative
        return op.where(x > 0, self.positive * x * x, below) + self.beta * x


class ApertusMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = XIELU()

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x_BSD)))


class ApertusAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias)
        self.q_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK


class ApertusDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        self.self_attn = ApertusAttention(config)
        self.mlp = ApertusMLP(config)
        self.attention_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.feedforward_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.attention_layernorm(x_BSD), rope, cache)
        return x_BSD + self.mlp(self.feedforward_layernorm(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [ApertusDecoderLayer(config) for _ in range(config.num_hidden_layers)],
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
