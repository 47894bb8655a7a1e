# SPDX-License-Identifier: Apache-2.0
"""BLOOM.

Source: transformers' `modeling_bloom.py` (5.x), whose attribute names are the checkpoint's. Layer norms, of the embeddings too, and biases; positions are what ALiBi adds
to scores; q, k and v are stored as one, head by head.

Sizes: B batch, S seq, D hidden_size, H heads, K head size, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

PREFIXES = {"": "transformer."}  # the first checkpoints hold the decoder alone


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"bloom": {}}
    aliases: ClassVar = {
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
    }
    lacks: ClassVar = {"bloom": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads", "intermediate_size")}
    unused: ClassVar = {
        **dict.fromkeys(
            (
                "attention_softmax_in_fp32",
                "masked_softmax_fusion",
                "bias_dropout_fusion",
                "skip_bias_add",
                "skip_bias_add_qkv",
                "offset_alibi",
                "slow_but_exact",
                "pretraining_tp",
                "unk_token_id",
                "n_inner",
            ),
            "transformers computes the same with it",
        ),
    }

    vocab_size: int = 250880
    hidden_size: int = 64
    intermediate_size: int | None = None
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    apply_residual_connection_post_layernorm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)


class BloomAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, k = config.hidden_size, config.num_attention_heads, config.head_size
        self.query_key_value = nn.Linear(d, 3 * h * k)
        self.dense = nn.Linear(h * k, d)
        self.weight = nn.part_by_part(self.query_key_value.weight, h)
        self.bias = nn.part_by_part(self.query_key_value.bias, h)
        self.head_size, self.splits = k, (h * k, 2 * h * k)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(op.linear(x_BSD, self.weight, self.bias), self.splits, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSHK, v_BSHK

    def forward(self, x_BSD: nn.Tensor, alibi_1H1T: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.dense(self.attend(x_BSD, None, cache, alibi_1H1T))


class BloomBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        d, names = config.hidden_size, ("dense_h_to_4h", "dense_4h_to_h")
        self.input_layernorm = nn.LayerNorm(d, config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(d, config.layer_norm_epsilon)
        self.mlp = nn.MLP(d, config.intermediate_size, "gelu_pytorch_tanh", names=names)
        self.adds_norms = config.apply_residual_connection_post_layernorm

    def forward(self, x_BSD: nn.Tensor, alibi_1H1T: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        x_BSD = (y_BSD if self.adds_norms else x_BSD) + self.self_attention(y_BSD, alibi_1H1T, cache)
        y_BSD = self.post_attention_layernorm(x_BSD)
        return (y_BSD if self.adds_norms else x_BSD) + self.mlp(y_BSD)


class BloomModel(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.word_embeddings = nn.Embedding(config.vocab_size, d)
        self.word_embeddings_layernorm = nn.LayerNorm(d, eps)
        self.h = [BloomBlock(config) for _ in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(d, eps)
        self.alibi = nn.ALiBi(config.num_attention_heads)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        alibi_1H1T = self.alibi(tokens_BS, cache)
        x_BSD = self.word_embeddings_layernorm(self.word_embeddings(tokens_BS))
        for i, block in enumerate(self.h):
            x_BSD = block(x_BSD, alibi_1H1T, cache[i])
        return self.ln_f(x_BSD)


class BloomForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = BloomModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.word_embeddings.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return BloomForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(vocab_size=259, max_position_embeddings=256)
