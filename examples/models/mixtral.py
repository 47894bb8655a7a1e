# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral with a mixture of experts in the place of each feed-forward layer.

Source: transformers' `modeling_mixtral.py` (5.x), whose checkpoint names these are (w1 gate, w3 up, w2 down). Differences: q, k, v and an expert's
gate and up, stored apart, are multiplied as one; experts are stacked (derived tensors); rotary tables are computed once for all layers.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"mixtral": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    unused: ClassVar = {"router_jitter_noise": "noise in training"}
    rope_defaults: ClassVar = {"rope_theta": 1e6}

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class MixtralAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k = config.hidden_size, config.head_size
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * k, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * k, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, bias=False)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.window = k, config.sliding_window

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        q_BSHK, k_BSGK = op.rope(q_BSHK, *rope), op.rope(k_BSGK, *rope)
        y_BSHK = op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache, window=self.window)
        return self.o_proj(op.merge_heads(y_BSHK))


class MixtralSparseMoeBlock(nn.Module):
    """Experts whose weights are a softmax over the scores of those that were chosen."""

    def __init__(self, config: Config) -> None:
        d, e = config.hidden_size, config.num_local_experts
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.Experts(e, d, config.intermediate_size, names=("w1", "w3", "w2"))
        self.chosen = config.num_experts_per_tok

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        scores_TE = op.softmax(op.astype(self.gate(x_TD), "float32"), -1)
        chosen_TC, weights_TC = nn.top_experts(scores_TE, self.chosen, normalized=True)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC), x_BSD.shape)


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = MixtralAttention(config)
        self.block_sparse_moe = MixtralSparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD))


class MixtralModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [MixtralDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(
            config.head_size, config.rope_parameters, config.max_position_embeddings
        )

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.norm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = MixtralModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    layers, window = config.num_hidden_layers, config.sliding_window
    cache = spec.Cache(layers, config.kv_heads, config.head_size, config.dtype, window=window)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)


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
