# SPDX-License-Identifier: Apache-2.0
"""OLMoE: a decoder whose feed-forward layers are mixtures of experts, with norms over all heads of q and of k.

Source: transformers' `modeling_olmoe.py` (5.x), whose attribute names are the checkpoint's. Differences: q, k, v and an expert's gate and up, stored
apart, are multiplied as one; experts are stacked (derived tensors); rotary tables are computed once for all layers.

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

    model_types: ClassVar = {"olmoe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {"hidden_act": ("silu", "swish")}

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class OlmoeAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k, bias = config.hidden_size, config.head_size, config.attention_bias
        q, kv = config.num_attention_heads * k, config.kv_heads * k
        self.q_proj = nn.Linear(d, q, bias)
        self.k_proj = nn.Linear(d, kv, bias)
        self.v_proj = nn.Linear(d, kv, bias)
        self.o_proj = nn.Linear(q, d, bias)
        self.q_norm = nn.RMSNorm(q, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(kv, -1, config.rms_norm_eps, bias=False)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.limit = k, config.clip_qkv

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        q, key, value = self.qkv(x_BSD)
        parts = self.q_norm(q), self.k_norm(key), value
        if self.limit is not None:
            parts = tuple(op.clip(part, -self.limit, self.limit) for part in parts)
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        q_BSHK, k_BSGK = op.rope(q_BSHK, *rope), op.rope(k_BSGK, *rope)
        return self.o_proj(op.merge_heads(op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache)))


class OlmoeSparseMoeBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        d, e = config.hidden_size, config.num_experts
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.Experts(e, d, config.intermediate_size)
        self.chosen, self.normalized = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        scores_TE = op.softmax(op.astype(self.gate(x_TD), "float32"), -1)
        chosen_TC, weights_TC = nn.top_experts(scores_TE, self.chosen, normalized=self.normalized)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC), x_BSD.shape)


class OlmoeDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = OlmoeAttention(config)
        self.mlp = OlmoeSparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class OlmoeModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [OlmoeDecoderLayer(config) for _ in range(config.num_hidden_layers)]
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
        model = OlmoeModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    cache = spec.Cache(config.num_hidden_layers, config.kv_heads, config.head_size, config.dtype)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
