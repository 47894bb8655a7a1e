# SPDX-License-Identifier: Apache-2.0
"""Llama 1 to 3.x, Mistral, Ministral and Seed-OSS, and the many models with their architecture.

Source: transformers' `modeling_llama.py` (5.x), whose attribute names are the checkpoint's. Differences: q, k, v and gate, up are
stored apart and multiplied as one (derived tensors); rotary tables are computed once for all layers.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("*.rotary_emb.inv_freq",)  # computed here; checkpoints of the first Llamas hold it


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {
        "llama": {},
        "mistral": {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "ministral": {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "iquestcoder": {
            "vocab_size": 76800,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        "seed_oss": {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    }
    lacks: ClassVar = {
        "llama": ("sliding_window", "layer_types", "attention_out_bias"),
        "iquestcoder": ("sliding_window", "layer_types", "attention_out_bias"),
        "mistral": ("attention_bias", "attention_out_bias", "mlp_bias", "layer_types"),
        "ministral": ("attention_bias", "attention_out_bias", "mlp_bias"),
        "seed_oss": ("sliding_window", "layer_types"),
    }
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {
        "pretraining_tp": "how products were split in training, which changes their rounding alone",
        "is_llama_config": "a note of those who converted the checkpoint",
        "residual_dropout": "training",
    }
    divided: ClassVar = nn.USUALLY_DIVIDED

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    mlp_bias: bool = False


class LlamaAttention(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        d, k, bias = config.hidden_size, config.head_size, config.attention_bias
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias)
        self.k_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.v_proj = nn.Linear(d, config.kv_heads * k, bias)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, out_bias)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.window = k, window

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        q_BSHK, k_BSGK = op.rope(q_BSHK, *rope), op.rope(k_BSGK, *rope)
        y_BSHK = op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache, window=self.window)
        return self.o_proj(op.merge_heads(y_BSHK))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, window)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class LlamaModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [LlamaDecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)]
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
        model = LlamaModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    windows = [config.window(i) for i in range(config.num_hidden_layers)]
    cache = spec.Cache(len(windows), config.kv_heads, config.head_size, config.dtype, window=windows)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
