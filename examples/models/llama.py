# SPDX-License-Identifier: Apache-2.0
"""Llama 1 to 3.x, and the many models with its architecture.

Source: transformers' `modeling_llama.py` (5.x), whose attribute names are the checkpoint's. Differences: q, k, v and gate, up are
stored apart and multiplied as one (derived tensors); rotary tables are computed once for all layers.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("*.rotary_emb.inv_freq",)  # computed here; checkpoints of the first Llamas hold it


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {
        "llama": {},
        "mistral": {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    }
    lacks: ClassVar = {"llama": ("sliding_window",)}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {
        "pretraining_tp": "how products were split in training, which changes their rounding alone",
        "is_llama_config": "a note of those who converted the checkpoint",
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=lambda: nn.rope_parameters({}))
    dtype: str = "float32"

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class LlamaAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        self.heads, self.kv_heads, self.head_size = (
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
        )
        d, q, kv = config.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        self.window = config.sliding_window
        bias, dtype = config.attention_bias, config.dtype
        self.q_proj = nn.Linear(d, q, bias, dtype)
        self.k_proj = nn.Linear(d, kv, bias, dtype)
        self.v_proj = nn.Linear(d, kv, bias, dtype)
        self.o_proj = nn.Linear(q, d, bias, dtype)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self.qkv_weight = op.concat([p.weight for p in parts], 0)
        self.qkv_bias = op.concat([p.bias for p in parts], 0) if bias else None

    def forward(self, x_BSD: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache: Any = None) -> nn.Tensor:
        b, s, _ = x_BSD.shape
        h, g, k = self.heads, self.kv_heads, self.head_size
        qkv = op.linear(x_BSD, self.qkv_weight, self.qkv_bias)
        q, key, value = op.split(qkv, [h * k, (h + g) * k], -1)
        q_BSHK = op.rope(op.reshape(q, (b, s, h, k)), cos, sin)
        key_BSGK = op.rope(op.reshape(key, (b, s, g, k)), cos, sin)
        value_BSGK = op.reshape(value, (b, s, g, k))
        y_BSHK = op.attention(q_BSHK, key_BSGK, value_BSGK, cache=cache, window=self.window)
        return self.o_proj(op.reshape(y_BSHK, (b, s, h * k)))


class LlamaMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        d, f, bias, dtype = config.hidden_size, config.intermediate_size, config.mlp_bias, config.dtype
        self.gate_proj = nn.Linear(d, f, bias, dtype)
        self.up_proj = nn.Linear(d, f, bias, dtype)
        self.down_proj = nn.Linear(f, d, bias, dtype)
        self.act = nn.ACTIVATIONS[config.hidden_act]
        parts = (self.gate_proj, self.up_proj)
        self.gate_up_weight = op.concat([p.weight for p in parts], 0)
        self.gate_up_bias = op.concat([p.bias for p in parts], 0) if bias else None

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.linear(x_BSD, self.gate_up_weight, self.gate_up_bias), 2, -1)
        return self.down_proj(self.act(gate) * up)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False, dtype=dtype)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False, dtype=dtype)

    def forward(self, x_BSD: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache: Any = None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos, sin, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class LlamaModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)
        self.layers = [LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False, dtype=config.dtype)
        self.rotary_emb = nn.RotaryEmbedding(
            config.head_size, config.rope_parameters, max_positions=config.max_position_embeddings
        )

    def forward(self, tokens_BS: nn.Tensor, cache: Any = None) -> nn.Tensor:
        _, s = tokens_BS.shape
        positions = op.reshape(op.arange(s), (1, s)) if cache is None else op.cache_positions(cache[0], s)
        cos, sin = self.rotary_emb(positions)
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cos, sin, None if cache is None else cache[i])
        return self.norm(x_BSD)


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: Config) -> None:
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def logits(self, tokens: nn.Tensor) -> nn.Tensor:
        """Logits of every position: [B, S] to float32 [B, S, V]."""
        return op.astype(self.lm_head(self.model(tokens)), "float32")

    def prefill(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """Append a prompt and give the logits of its last position: [B, S] to float32 [B, 1, V]."""
        return op.astype(self.lm_head(self.model(tokens, cache)[:, -1:]), "float32")

    def decode(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """Append one token to each sequence: [B, 1] to float32 [B, 1, V]."""
        return op.astype(self.lm_head(self.model(tokens, cache)), "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    return LlamaForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    batch = nn.Dim("batch", min=1)
    seq = nn.Dim("seq", min=1, max=config.max_position_embeddings)
    cache = spec.Cache(
        config.num_hidden_layers,
        config.kv_heads,
        config.head_size,
        config.dtype,
        batch,
        nn.Dim("max_seq", min=1, max=config.max_position_embeddings),
        config.sliding_window,
    )
    return {
        "logits": {"tokens": spec.Tensor([batch, seq], "int64")},
        "prefill": {"tokens": spec.Tensor([batch, seq], "int64"), "cache": cache},
        "decode": {"tokens": spec.Tensor([batch, 1], "int64"), "cache": cache},
    }


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
