# SPDX-License-Identifier: Apache-2.0
"""GPT-Neo.

Source: transformers' `modeling_gpt_neo.py` (5.x), whose attribute names are the checkpoint's. Differences from GPT-2: matrices are stored as usual, q, k and v without
biases; every other layer sees a window; scores are not scaled.

Sizes: B batch, S seq, D hidden_size, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op

IGNORED = ("*.attn.attention.bias", "*.attn.attention.masked_bias")  # masks


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"gpt_neo": {}}
    aliases: ClassVar = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
    lacks: ClassVar = {"gpt_neo": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads")}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS, "attention_layers": ("global", "local")}
    unused: ClassVar = {
        **dict.fromkeys(("classifier_dropout", "embed_dropout", "resid_dropout"), "training"),
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

    vocab_size: int = 50257
    hidden_size: int = 2048
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    window_size: int = 256
    attention_types: tuple[Any, ...] = ([["global", "local"], 12],)
    attention_layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)

    def window(self, layer: int) -> int | None:
        types = [kind for kinds, count in self.attention_types for _ in range(count) for kind in kinds]
        return self.window_size if (self.attention_layers or types)[layer] == "local" else None


class NeoSelfAttention(nn.Attention):
    scale = 1.0

    def __init__(self, config: Config, window: int | None) -> None:
        d, inner = config.hidden_size, config.num_attention_heads * config.head_size
        self.k_proj = nn.Linear(d, inner, bias=False)
        self.v_proj = nn.Linear(d, inner, bias=False)
        self.q_proj = nn.Linear(d, inner, bias=False)
        self.out_proj = nn.Linear(inner, d)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size, self.window = config.head_size, window

    def forward(self, x_BSD: nn.Tensor, rope: None, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.out_proj(self.attend(x_BSD, rope, cache))


class NeoAttention(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        self.attention = NeoSelfAttention(config, config.window(index))

    def forward(self, x_BSD: nn.Tensor, rope: None, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.attention(x_BSD, rope, cache)


class NeoBlock(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = NeoAttention(config, index)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = nn.MLP(
            config.hidden_size, config.intermediate_size, config.activation_function, names=("c_fc", "c_proj")
        )

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), None, cache)
        return x_BSD + self.mlp(self.ln_2(x_BSD))


class NeoModel(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.wte = nn.Embedding(config.vocab_size, d)
        self.wpe = nn.Embedding(config.max_position_embeddings, d)
        self.h = [NeoBlock(config, i) for i in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(d, eps)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.wte(tokens_BS) + self.wpe(op.positions(tokens_BS, cache))
        for i, block in enumerate(self.h):
            x_BSD = block(x_BSD, cache[i])
        return self.ln_f(x_BSD)


class NeoForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = NeoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return NeoForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention_layers=("global", "local"),
    max_position_embeddings=256,
)
