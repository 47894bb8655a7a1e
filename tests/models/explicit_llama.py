# SPDX-License-Identifier: Apache-2.0
"""A Llama (or Mistral) that says everything itself, for tests that put mistakes into its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    model_types: ClassVar = {"llama": {}, "mistral": {}}
    only: ClassVar = {"hidden_act": ("silu",)}
    unused: ClassVar = {"pretraining_tp": "", "mlp_bias": ""}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = None


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        self.heads, self.kv_heads, self.size = c.num_attention_heads, c.kv_heads, c.head_size
        d, h, g, k, bias = c.hidden_size, self.heads, self.kv_heads, self.size, c.attention_bias
        self.q_proj = nn.Linear(d, h * k, bias)
        self.k_proj = nn.Linear(d, g * k, bias)
        self.v_proj = nn.Linear(d, g * k, bias)
        self.o_proj = nn.Linear(h * k, d, bias)
        self.window = c.sliding_window
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self.qkv_weight = op.concat([p.weight for p in parts], 0)
        self.qkv_bias = op.concat([p.bias for p in parts], 0) if bias else None

    def forward(self, x, cos, sin, cache):
        b, s, _ = x.shape
        h, g, k = self.heads, self.kv_heads, self.size
        q, key, value = op.split(op.linear(x, self.qkv_weight, self.qkv_bias), [h * k, (h + g) * k], -1)
        q = op.rope(op.reshape(q, (b, s, h, k)), cos, sin)
        key = op.rope(op.reshape(key, (b, s, g, k)), cos, sin)
        value = op.reshape(value, (b, s, g, k))
        y = op.attention(q, key, value, cache=cache, window=self.window)
        return self.o_proj(op.reshape(y, (b, s, h * k)))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, False)
        self.gate_up_weight = op.concat([self.gate_proj.weight, self.up_proj.weight], 0)

    def forward(self, x):
        gate, up = op.split(op.linear(x, self.gate_up_weight), 2, -1)
        return self.down_proj(op.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, -1, c.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, -1, c.rms_norm_eps, bias=False)

    def forward(self, x, cos, sin, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = [Layer(c) for _ in range(c.num_hidden_layers)]
        self.norm = nn.RMSNorm(c.hidden_size, -1, c.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(c.head_size, c.rope_parameters, c.max_position_embeddings)

    def forward(self, tokens, cache):
        cos, sin = self.rotary_emb(op.positions(tokens, cache))
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache[i])
        return self.norm(x)


def build(config: Config) -> nn.Module:
    with nn.default_dtype(config.dtype):
        model = Model(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    cache = spec.Cache(config.num_hidden_layers, config.kv_heads, config.head_size, config.dtype)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)
