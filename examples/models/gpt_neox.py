# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX, Pythia and Dolly 2.

Source: transformers' `modeling_gpt_neox.py` (5.x), whose attribute names are the checkpoint's. A decoder with layer norms and biases, whose two parts read what
comes in (or one after the other); a part of each head is rotated; q, k and v are stored as one, head by head.

Sizes: B batch, S seq, D hidden_size, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

IGNORED = (
    "*.attention.bias",
    "*.attention.masked_bias",
    "*.rotary_emb.inv_freq",
)  # masks, and what is computed here
PREFIXES = {"lm_head.": "embed_out."}  # transformers' name of the head in memory


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"gpt_neox": {}}
    aliases: ClassVar = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    lacks: ClassVar = {"gpt_neox": ("head_dim", "num_key_value_heads")}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {"classifier_dropout": "training", "is_decoder": "transformers does not read it"}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}

    vocab_size: int = 50432
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True


class NeoXAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, k, bias = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_size,
            config.attention_bias,
        )
        self.query_key_value = nn.Linear(d, 3 * h * k, bias)
        self.dense = nn.Linear(h * k, d, bias)
        self.weight = nn.part_by_part(self.query_key_value.weight, h)
        self.bias = nn.part_by_part(self.query_key_value.bias, h) if bias else None
        self.head_size, self.splits = k, (h * k, 2 * h * k)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(op.linear(x_BSD, self.weight, self.bias), self.splits, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSHK, v_BSHK

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.dense(self.attend(x_BSD, rope, cache))


class NeoXLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = NeoXAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            names=("dense_h_to_4h", "dense_4h_to_h"),
        )
        self.parallel = config.use_parallel_residual

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = x_BSD + self.attention(self.input_layernorm(x_BSD), rope, cache)
        return y_BSD + self.mlp(self.post_attention_layernorm(x_BSD if self.parallel else y_BSD))


class NeoXModel(nn.Module):
    def __init__(self, config: Config) -> None:
        length = config.max_position_embeddings
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [NeoXLayer(config) for _ in range(config.num_hidden_layers)]
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = nn.RotaryEmbedding(config.head_size, config.rope_parameters, length)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_in(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.final_layer_norm(x_BSD)


class NeoXForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.gpt_neox = NeoXModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.embed_out.weight = self.gpt_neox.embed_in.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.gpt_neox(tokens_BS, cache)

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.astype(self.embed_out(x_BSD), "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return NeoXForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
