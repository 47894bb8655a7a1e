# SPDX-License-Identifier: Apache-2.0
"""GPT-2.

Source: transformers' `modeling_gpt2.py` (5.x), whose attribute names are the checkpoint's. A decoder with learned positions, layer norms, biases, and matrices that
are stored the other way around.

Sizes: B batch, S seq, D n_embd, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

IGNORED = ("*.attn.bias", "*.attn.masked_bias")  # masks
PREFIXES = {"": "transformer."}  # the first checkpoints hold the decoder alone

_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"gpt2": {}}
    aliases: ClassVar = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    lacks: ClassVar = {"gpt2": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads")}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS}
    unused: ClassVar = {
        "n_ctx": "the older name of n_positions, which is there as well",
        "reorder_and_upcast_attn": "how scores are rounded",
        **{f"summary_{key}": "classification" for key in _SUMMARY},
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    activation_function: str = "gelu_new"
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class Projection(nn.Module):
    """A linear layer whose weight is stored as [in, out]."""

    def __init__(self, size: int, out: int) -> None:
        self.weight = nn.Parameter((size, out))
        self.bias = nn.Parameter((out,))
        self.turned = op.permute_dims(self.weight)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.linear(x, self.turned, self.bias)


class GPT2Attention(nn.Attention):
    def __init__(self, config: Config, index: int) -> None:
        d = config.hidden_size
        self.c_attn = Projection(d, 3 * d)
        self.c_proj = Projection(d, d)
        self.head_size, self.splits = config.head_size, (d, 2 * d)
        self.scale = config.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= index + 1

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        parts = op.split(self.c_attn(x_BSD), self.splits, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSHK, v_BSHK

    def forward(self, x_BSD: nn.Tensor, rope: None, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.c_proj(self.attend(x_BSD, rope, cache))


class GPT2MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        inner = config.intermediate_size or 4 * config.hidden_size
        self.c_fc = Projection(config.hidden_size, inner)
        self.c_proj = Projection(inner, config.hidden_size)
        self.activation = nn.ACTIVATIONS[config.activation_function]

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.c_proj(self.activation(self.c_fc(x_BSD)))


class GPT2Block(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, index)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), None, cache)
        return x_BSD + self.mlp(self.ln_2(x_BSD))


class GPT2Model(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.wte = nn.Embedding(config.vocab_size, d)
        self.wpe = nn.Embedding(config.max_position_embeddings, d)
        self.h = [GPT2Block(config, i) for i in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(d, eps)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.wte(tokens_BS) + self.wpe(op.positions(tokens_BS, cache))
        for i, block in enumerate(self.h):
            x_BSD = block(x_BSD, cache[i])
        return self.ln_f(x_BSD)


class GPT2ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = GPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return GPT2ForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
)
