# SPDX-License-Identifier: Apache-2.0
"""OPT.

Source: transformers' `modeling_opt.py` (5.x), whose attribute names are the checkpoint's. A decoder with learned positions, layer norms and biases; in the smallest
model norms come after what is added, and embeddings are narrower than the rest.

Sizes: B batch, S seq, D hidden_size, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

PREFIXES = {"decoder.": "model.decoder."}  # some checkpoints hold the decoder alone


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"opt": {}}
    aliases: ClassVar = {"ffn_dim": "intermediate_size"}
    lacks: ClassVar = {"opt": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads")}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS}
    unused: ClassVar = dict.fromkeys(("activation_dropout", "dropout", "init_std", "layerdrop"), "training")

    vocab_size: int = 50272
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    activation_function: str = "relu"
    tie_word_embeddings: bool = True
    word_embed_proj_dim: int | None = 768
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True


class OPTAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, inner, bias = config.hidden_size, config.num_attention_heads * config.head_size, config.enable_bias
        self.k_proj = nn.Linear(d, inner, bias)
        self.v_proj = nn.Linear(d, inner, bias)
        self.q_proj = nn.Linear(d, inner, bias)
        self.out_proj = nn.Linear(inner, d, bias)
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size = config.head_size

    def forward(self, x_BSD: nn.Tensor, rope: None, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.out_proj(self.attend(x_BSD, rope, cache))


class OPTDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, f, affine = config.hidden_size, config.intermediate_size, config.layer_norm_elementwise_affine
        self.self_attn = OPTAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(d, 1e-5, affine)
        self.fc1 = nn.Linear(d, f, config.enable_bias)
        self.fc2 = nn.Linear(f, d, config.enable_bias)
        self.final_layer_norm = nn.LayerNorm(d, 1e-5, affine)
        self.activation = nn.ACTIVATIONS[config.activation_function]
        self.norm_first = config.do_layer_norm_before

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        if self.norm_first:
            x_BSD = x_BSD + self.self_attn(self.self_attn_layer_norm(x_BSD), None, cache)
            return x_BSD + self.feed_forward(self.final_layer_norm(x_BSD))
        x_BSD = self.self_attn_layer_norm(x_BSD + self.self_attn(x_BSD, None, cache))
        return self.final_layer_norm(x_BSD + self.feed_forward(x_BSD))

    def feed_forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.fc2(self.activation(self.fc1(x_BSD)))


class OPTDecoder(nn.Module):
    def __init__(self, config: Config) -> None:
        d, narrow = config.hidden_size, config.word_embed_proj_dim or config.hidden_size
        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.embed_tokens = nn.Embedding(config.vocab_size, narrow)
        self.embed_positions = nn.Embedding(
            config.max_position_embeddings + 2, d
        )  # the first two are not used
        self.project_in = nn.Identity() if narrow == d else nn.Linear(narrow, d, bias=False)
        self.project_out = nn.Identity() if narrow == d else nn.Linear(d, narrow, bias=False)
        self.layers = [OPTDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.final_layer_norm = (
            nn.LayerNorm(d, 1e-5, config.layer_norm_elementwise_affine) if has_norm else nn.Identity()
        )

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.project_in(self.embed_tokens(tokens_BS))
        x_BSD = x_BSD + self.embed_positions(op.positions(tokens_BS, cache) + 2)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cache[i])
        return self.project_out(self.final_layer_norm(x_BSD))


class OPTModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.decoder = OPTDecoder(config)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.decoder(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = OPTModel(config)
        return nn.CausalLM(model, model.decoder.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    word_embed_proj_dim=32,
)
