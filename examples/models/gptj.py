# SPDX-License-Identifier: Apache-2.0
"""GPT-J.

Source: transformers' `modeling_gptj.py` (5.x), whose attribute names are the checkpoint's. Differences from GPT-2: a part of each head is rotated, neighbours by
pairs, in the place of learned positions; both parts of a layer read the same norm; the head has a bias.

Sizes: B batch, S seq, D n_embd, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

IGNORED = ("*.attn.bias", "*.attn.masked_bias")  # masks


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"gptj": {}}
    aliases: ClassVar = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    lacks: ClassVar = {"gptj": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads")}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS}
    unused: ClassVar = {
        "rotary": "transformers does not read it",
        "scale_attn_weights": "transformers does not read it",
        **dict.fromkeys(
            (
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
            "classification",
        ),
    }

    vocab_size: int = 50400
    hidden_size: int = 4096
    intermediate_size: int | None = None
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    rotary_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)


class GPTJAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, inner = config.hidden_size, config.num_attention_heads * config.head_size
        self.k_proj = nn.Linear(d, inner, bias=False)
        self.v_proj = nn.Linear(d, inner, bias=False)
        self.q_proj = nn.Linear(d, inner, bias=False)
        self.out_proj = nn.Linear(inner, d, bias=False)
        order = nn.pairs_as_halves(config.head_size, config.rotary_dim)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj, orders=(order, order))
        self.head_size = config.head_size

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.out_proj(self.attend(x_BSD, rope, cache))


class GPTJBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPTJAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size,
            config.intermediate_size,
            config.activation_function,
            names=("fc_in", "fc_out"),
        )

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.ln_1(x_BSD)
        return x_BSD + self.attn(y_BSD, rope, cache) + self.mlp(y_BSD)


class GPTJModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = [GPTJBlock(config) for _ in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.rotary = nn.RotaryEmbedding(config.rotary_dim)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary(op.positions(tokens_BS, cache))
        x_BSD = self.wte(tokens_BS)
        for i, block in enumerate(self.h):
            x_BSD = block(x_BSD, rope, cache[i])
        return self.ln_f(x_BSD)


class GPTJForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = GPTJModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return GPTJForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    rotary_dim=8,
    max_position_embeddings=256,
)
