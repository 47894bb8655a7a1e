# SPDX-License-Identifier: Apache-2.0
"""Falcon.

Source: transformers' `modeling_falcon.py` (5.x), whose attribute names are the checkpoint's. Layer norms; q, k and v are stored as one, in groups of heads; parts
of a layer read the same norm, or one each, or follow one another; positions are rotations, or what ALiBi adds to scores.

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

    divided: ClassVar = (*nn.USUALLY_DIVIDED, "num_kv_heads", "ffn_hidden_size")
    model_types: ClassVar = {"falcon": {}}
    aliases: ClassVar = {
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    }
    lacks: ClassVar = {"falcon": ("head_dim", "num_key_value_heads", "intermediate_size")}
    only: ClassVar = {
        "activation": nn.ACTIVATIONS,
    }

    vocab_size: int = 65024
    hidden_size: int = 4544
    num_attention_heads: int = 71
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    bias: bool = False
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)

    @property
    def kv_heads(self) -> int:
        if self.multi_query and not self.new_decoder_architecture:
            return 1
        return self.num_kv_heads or self.num_attention_heads

    @property
    def num_norms(self) -> int:
        """How many norms the parts of a layer read that do not follow one another."""
        new = self.new_decoder_architecture
        return (self.num_ln_in_parallel_attn or 2 if new else 1) if new or self.parallel_attn else 0


class FalconAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, g, k = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.query_key_value = nn.Linear(d, (h + 2 * g) * k, config.bias)
        self.dense = nn.Linear(h * k, d, config.bias)
        if config.multi_query and not config.new_decoder_architecture:
            nn.joined((h * k, k, k), self.query_key_value.weight, self.query_key_value.bias)
        # Stored group by group: its heads of q, its key, its value.
        groups, self.biases = (g, h // g + 2, k), None
        self.weights = self.by_kind(op.reshape(self.query_key_value.weight, (*groups, d)))
        if config.bias:
            self.biases = self.by_kind(op.reshape(self.query_key_value.bias, groups))
        self.head_size, self.splits = k, (h * k, (h + g) * k)

    def by_kind(self, stored: nn.Tensor) -> nn.Tensor:
        """[groups, heads + 2, size, ...] as all of q, then of k, then of v."""
        shape = (-1, *stored.shape[3:])
        parts = (stored[:, :-2], stored[:, -2:-1], stored[:, -1:])
        return op.concat([op.reshape(part, shape) for part in parts], 0)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(op.linear(x_BSD, self.weights, self.biases), self.splits, -1)
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSGK, v_BSGK

    def forward(
        self,
        x_BSD: nn.Tensor,
        rope: nn.Rotation | None,
        cache: nn.CacheLayer | None,
        alibi_1H1T: nn.Tensor | None,
    ) -> nn.Tensor:
        return self.dense(self.attend(x_BSD, rope, cache, alibi_1H1T))


class FalconDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        self.self_attention = FalconAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            config.activation,
            config.bias,
            ("dense_h_to_4h", "dense_4h_to_h"),
        )
        self.num_norms = config.num_norms
        if self.num_norms == 2:
            self.ln_attn = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
            self.ln_mlp = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        else:
            self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        if self.num_norms == 0:
            self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self,
        x_BSD: nn.Tensor,
        rope: nn.Rotation | None,
        cache: nn.CacheLayer | None,
        alibi_1H1T: nn.Tensor | None,
    ) -> nn.Tensor:
        if self.num_norms == 2:
            return (
                x_BSD
                + self.self_attention(self.ln_attn(x_BSD), rope, cache, alibi_1H1T)
                + self.mlp(self.ln_mlp(x_BSD))
            )
        y_BSD = self.input_layernorm(x_BSD)
        x_BSD = x_BSD + self.self_attention(y_BSD, rope, cache, alibi_1H1T)
        return x_BSD + self.mlp(y_BSD if self.num_norms else self.post_attention_layernorm(x_BSD))


class FalconModel(nn.Module):
    def __init__(self, config: Config) -> None:
        length = config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = [FalconDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.alibi = nn.ALiBi(config.num_attention_heads) if config.alibi else None
        self.scale = config.head_size**-0.5
        self.rotary_emb = nn.RotaryEmbedding(config.head_size, config.rope_parameters, length)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = alibi_1H1T = None
        if self.alibi is None:
            rope = self.rotary_emb(op.positions(tokens_BS, cache))
        else:  # rounded as in training, and divided as the scores are
            alibi_1H1T = (
                op.astype(op.astype(self.alibi(tokens_BS, cache), "bfloat16"), "float32") * self.scale
            )
        x_BSD = self.word_embeddings(tokens_BS)
        for i, layer in enumerate(self.h):
            x_BSD = layer(x_BSD, rope, cache[i], alibi_1H1T)
        return self.ln_f(x_BSD)


class FalconForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = FalconModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.word_embeddings.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return FalconForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
)
