# SPDX-License-Identifier: Apache-2.0
"""Granite MoE and PowerMoE: Granite, with its four multipliers, whose feed-forward layers are mixtures of experts.

Source: transformers' `modeling_granitemoe.py` (5.x), whose checkpoint names these are: experts are stored as stacks. Differences: q, k, v, stored apart,
are multiplied as one (derived tensors); rotary tables are computed once for all layers.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token, I intermediate_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"granitemoe": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {"hidden_act": ("silu", "swish")}

    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class GraniteMoeAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k, bias = config.hidden_size, config.head_size, config.attention_bias
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias)
        self.k_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.v_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, bias)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.scale = k, config.attention_multiplier

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        q_BSHK, k_BSGK = op.rope(q_BSHK, *rope), op.rope(k_BSGK, *rope)
        y_BSHK = op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache, scale=self.scale)
        return self.o_proj(op.merge_heads(y_BSHK))


class Stack(nn.Module):
    """The matrices of all experts in one tensor."""

    def __init__(self, *shape: int) -> None:
        self.weight = nn.Parameter(shape)


class Router(nn.Module):
    def __init__(self, size: int, count: int) -> None:
        self.layer = nn.Linear(size, count, bias=False)


class GraniteMoeMoE(nn.Module):
    """Experts whose weights are a softmax over the logits of those that were chosen."""

    def __init__(self, config: Config) -> None:
        d, i, e = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.router = Router(d, e)
        self.input_linear, self.output_linear = Stack(e, 2 * i, d), Stack(e, d, i)
        self.chosen = config.num_experts_per_tok

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        logits_TC, chosen_TC = op.topk(op.astype(self.router.layer(x_TD), "float32"), self.chosen)
        weights_TC = op.softmax(logits_TC, -1)
        y_TD = op.moe_mlp(x_TD, self.input_linear.weight, self.output_linear.weight, chosen_TC, weights_TC)
        return op.reshape(y_TD, x_BSD.shape)


class GraniteMoeDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = GraniteMoeAttention(config)
        self.block_sparse_moe = GraniteMoeMoE(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.multiplier = config.residual_multiplier

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache) * self.multiplier
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD)) * self.multiplier


class GraniteMoeModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [GraniteMoeDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(
            config.head_size, config.rope_parameters, config.max_position_embeddings
        )
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS) * self.multiplier
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.norm(x_BSD)


class GraniteMoeForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = GraniteMoeModel(config)
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.scaling = config.logits_scaling

    def head(self, x: nn.Tensor) -> nn.Tensor:
        return super().head(x) / self.scaling


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return GraniteMoeForCausalLM(config)


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
    num_local_experts=4,
    max_position_embeddings=256,
    residual_multiplier=0.5,
)
