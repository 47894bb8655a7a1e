# SPDX-License-Identifier: Apache-2.0
"""LFM2: gated short convolutions, attention in some layers, and gated feed-forward layers.

Source: transformers' `modeling_lfm2.py` (5.x), whose attribute names are the checkpoint's.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_attention_heads", "num_key_value_heads", "inner", "vocab_size")
    model_types: ClassVar = {"lfm2": {}}
    aliases: ClassVar = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    only: ClassVar = {"layer_types": ("conv", "full_attention")}
    unused: ClassVar = {
        "block_dim": "transformers does not read it",
        "block_mlp_init_scale": "how weights begin",
        "block_norm_eps": "transformers reads norm_eps",
        "block_out_init_scale": "how weights begin",
        "block_use_swiglu": "transformers does not read it",
        "block_use_xavier_init": "how weights begin",
        "conv_dim": "transformers does not read it",
        "conv_dim_out": "transformers does not read it",
        "conv_use_xavier_init": "how weights begin",
        "num_heads": "transformers reads num_attention_heads",
        "use_pos_enc": "transformers does not read it",
    }
    rope_defaults: ClassVar = {"rope_theta": 1000000.0}

    vocab_size: int = 65536
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: tuple[int, ...] | None = None
    layer_types: tuple[str, ...] | None = None
    inner: int | None = None
    """Features inside a feed-forward layer: what config.json says, rounded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner is None:
            object.__setattr__(self, "inner", self.rounded_inner())

    def attends(self, layer: int) -> bool:
        """Whether a layer is one of attention."""
        if self.layer_types is not None:
            return self.layer_types[layer] != "conv"
        return self.full_attn_idxs is None or layer in self.full_attn_idxs

    def rounded_inner(self) -> int:
        """Of `intermediate_size`, which is two thirds too large where it is adjusted."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size, step = int(2 * self.intermediate_size / 3), self.block_multiple_of
        if self.block_ffn_dim_multiplier is None:
            return size
        return step * -(-int(self.block_ffn_dim_multiplier * size) // step)


class Lfm2Attention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, g, k = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.q_proj = nn.Linear(d, h * k, bias=False)
        self.k_proj = nn.Linear(d, g * k, bias=False)
        self.v_proj = nn.Linear(d, g * k, bias=False)
        self.out_proj = nn.Linear(h * k, d, bias=False)
        self.q_layernorm = nn.RMSNorm(k, -1, config.norm_eps, bias=False)
        self.k_layernorm = nn.RMSNorm(k, -1, config.norm_eps, bias=False)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.rotated = k, True

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_layernorm(q_BSHK), self.k_layernorm(k_BSGK), v_BSGK

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.out_proj(self.attend(x_BSD, rope, cache))


class Lfm2ShortConv(nn.Module):
    def __init__(self, config: Config) -> None:
        d, bias = config.hidden_size, config.conv_bias
        self.conv = nn.CausalConv(d, config.conv_L_cache, bias, activation=None)
        self.in_proj = nn.Linear(d, 3 * d, bias)
        self.out_proj = nn.Linear(d, d, bias)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        before_BSD, after_BSD, x_BSD = op.split(self.in_proj(x_BSD), 3, -1)
        return self.out_proj(after_BSD * self.conv(before_BSD * x_BSD, cache))


class Lfm2MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        d, inner = config.hidden_size, config.inner
        self.w1, self.w3 = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.w2 = nn.Linear(inner, d, bias=False)
        self.gate_up = nn.Fused(self.w1, self.w3)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = self.gate_up(x_BSD)
        return self.w2(op.silu(gate) * up)


class Lfm2DecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        self.attends = config.attends(index)
        if self.attends:
            self.self_attn = Lfm2Attention(config)
        else:
            self.conv = Lfm2ShortConv(config)
        self.feed_forward = Lfm2MLP(config)
        self.operator_norm = nn.RMSNorm(config.hidden_size, -1, config.norm_eps, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, -1, config.norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.operator_norm(x_BSD)
        x_BSD = x_BSD + (self.self_attn(y_BSD, rope, cache) if self.attends else self.conv(y_BSD, cache))
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Lfm2Model(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k = config.hidden_size, config.head_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.layers = [Lfm2DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.embedding_norm = nn.RMSNorm(d, -1, config.norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(k, config.rope_parameters, config.max_position_embeddings)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.embedding_norm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = Lfm2Model(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    conv = spec.Layer(per_sequence=nn.conv_state(config.hidden_size, config.conv_L_cache, config.dtype))
    attention = spec.KV(config.kv_heads, config.head_size, config.dtype)
    layers = [attention if config.attends(i) else conv for i in range(config.num_hidden_layers)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    block_multiple_of=16,
    layer_types=("conv", "full_attention"),
    max_position_embeddings=256,
)
