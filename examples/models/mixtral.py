# SPDX-License-Identifier: Apache-2.0
"""Mixtral.

Source: transformers' `modeling_mixtral.py` (5.x), whose checkpoint names these are (w1 is gate, w3 up, w2 down). Differences from Mistral: each feed-forward
layer is a mixture of experts, which are stored one by one and stacked here (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"mixtral": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS}
    unused: ClassVar = {"router_jitter_noise": "noise in training"}
    rope_defaults: ClassVar = {"rope_theta": 1e6}
    divided: ClassVar = nn.USUALLY_DIVIDED

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class MixtralSparseMoeBlock(nn.MixtureOfExperts):
    """Experts that are weighed by the softmax of the scores of those that were chosen."""

    def __init__(self, config: Config) -> None:
        d, e, inner = config.hidden_size, config.num_local_experts, config.intermediate_size
        gate = nn.Router(d, e, config.num_experts_per_tok, normalized=True)
        super().__init__(gate, nn.Experts(e, d, inner, config.hidden_act, ("w1", "w3", "w2")))


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads, k = config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(d, heads, kv_heads, k, window=config.sliding_window)
        self.block_sparse_moe = MixtralSparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [MixtralDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    num_local_experts=4,
)
