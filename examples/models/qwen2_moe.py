# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 whose feed-forward layers are mixtures of experts beside one that every token takes.

Source: transformers' `modeling_qwen2_moe.py` (5.x), whose attribute names are the checkpoint's. Differences: q, k, v and gate, up, stored apart, are
multiplied as one; experts are stacked (derived tensors); rotary tables are computed once for all layers.

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

    model_types: ClassVar = {"qwen2_moe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
    }
    unused: ClassVar = {
        "sliding_window": "it takes use_sliding_window",
        "max_window_layers": "it takes use_sliding_window",
    }

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen2MoeAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k, bias = config.hidden_size, config.head_size, config.qkv_bias
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias)
        self.k_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.v_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, bias=False)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size = k

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        q_BSHK, k_BSGK = op.rope(q_BSHK, *rope), op.rope(k_BSGK, *rope)
        return self.o_proj(op.merge_heads(op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache)))


class Qwen2MoeSparseMoeBlock(nn.Module):
    """Experts of which a router chooses some, and one for all tokens that a gate of its own weighs."""

    def __init__(self, config: Config) -> None:
        d, e = config.hidden_size, config.num_experts
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.Experts(e, d, config.moe_intermediate_size)
        self.shared_expert = nn.GatedMLP(d, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(d, 1, bias=False)
        self.chosen, self.normalized = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        scores_TE = op.softmax(op.astype(self.gate(x_TD), "float32"), -1)
        chosen_TC, weights_TC = nn.top_experts(scores_TE, self.chosen, normalized=self.normalized)
        shared_TD = op.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC) + shared_TD, x_BSD.shape)


class Qwen2MoeDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Qwen2MoeAttention(config)
        self.mlp = (
            Qwen2MoeSparseMoeBlock(config)
            if config.is_sparse(index)
            else nn.GatedMLP(d, config.intermediate_size)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Qwen2MoeModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Qwen2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
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
        model = Qwen2MoeModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    cache = spec.Cache(config.num_hidden_layers, config.kv_heads, config.head_size, config.dtype)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    max_position_embeddings=256,
)
