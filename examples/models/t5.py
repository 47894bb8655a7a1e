# SPDX-License-Identifier: Apache-2.0
"""T5, of version 1.0 and 1.1: an encoder reads a text, a decoder writes another about it.

Source: transformers' `modeling_t5.py` (5.x), whose attribute names are the checkpoint's. Positions are nowhere but in a bias of the scores, by how far a key is from
its query, in buckets; the first layer's table is that of all. Scores are not scaled. Version 1.1 has a gate, and a head whose input is not scaled.

source and tokens are [B, S]. Sizes: B batch, S seq, D d_model, H heads, K d_kv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)  # nothing reads it

LONGEST = 1 << 15  # tokens; positions are relative, so that the model has no bound of its own


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"t5": {}}
    aliases: ClassVar = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    only: ClassVar = {
        "feed_forward_proj": (*nn.ACTIVATIONS, *(f"gated-{name}" for name in nn.ACTIVATIONS)),
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
    }
    unused: ClassVar = {
        "dropout_rate": "training",
        "classifier_dropout": "training",
        "initializer_factor": "training",
        "n_positions": "how long texts were in training",
        "output_past": "how transformers runs it",
        "is_gated_act": "feed_forward_proj says it",
        "dense_act_fn": "feed_forward_proj says it",
    }

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None
    dtype: str = "float32"

    @property
    def decoder_layers(self) -> int:
        return self.num_decoder_layers or self.num_layers

    @property
    def max_position_embeddings(self) -> int:
        return LONGEST

    @property
    def scales_outputs(self) -> bool:
        """Whether the head reads what the decoder gives divided by sqrt(D): where its weight is the embedding's, unless config.json says otherwise."""
        given = self.scale_decoder_outputs
        return self.tie_word_embeddings if given is None else given

    @property
    def activation(self) -> str:
        name = self.feed_forward_proj.removeprefix("gated-")
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else name


class T5LayerNorm(nn.RMSNorm):
    def __init__(self, config: Config) -> None:
        super().__init__(config.d_model, -1, config.layer_norm_epsilon, bias=False)


class T5Attention(nn.Module):
    def __init__(self, config: Config, has_bias: bool = False) -> None:
        d, inner = config.d_model, config.num_heads * config.d_kv
        self.q, self.k, self.v = (nn.Linear(d, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, d, bias=False)
        self.head_size = config.d_kv
        if has_bias:
            table = config.relative_attention_num_buckets, config.num_heads
            self.relative_attention_bias = nn.Embedding(*table)


class T5SelfAttention(T5Attention):
    def __init__(self, config: Config, has_bias: bool, is_causal: bool) -> None:
        super().__init__(config, has_bias)
        self.qkv = nn.Fused(self.q, self.k, self.v)
        self.is_causal = is_causal

    def forward(self, x_BSD: nn.Tensor, bias: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        q, k, v = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        y = op.attention(q, k, v, cache=cache, bias=bias, is_causal=self.is_causal, scale=1.0)
        return self.o(op.merge_heads(y))


class T5CrossAttention(T5Attention):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kv = nn.Fused(self.k, self.v)

    def keys_and_values(self, x_BSD: nn.Tensor) -> nn.KeysAndValues:
        k, v = (op.split_heads(part, self.head_size) for part in self.kv(x_BSD))
        return k, v

    def forward(self, x_BSD: nn.Tensor, memory: nn.Memory) -> nn.Tensor:
        q = op.split_heads(self.q(x_BSD), self.head_size)
        return self.o(op.merge_heads(nn.cross_attention(q, memory, scale=1.0)))


class T5LayerSelfAttention(nn.Module):
    def __init__(self, config: Config, has_bias: bool, is_causal: bool) -> None:
        self.SelfAttention = T5SelfAttention(config, has_bias, is_causal)
        self.layer_norm = T5LayerNorm(config)

    def forward(self, x_BSD: nn.Tensor, bias: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        return x_BSD + self.SelfAttention(self.layer_norm(x_BSD), bias, cache)


class T5LayerCrossAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        self.EncDecAttention = T5CrossAttention(config)
        self.layer_norm = T5LayerNorm(config)

    def forward(self, x_BSD: nn.Tensor, memory: nn.Memory) -> nn.Tensor:
        return x_BSD + self.EncDecAttention(self.layer_norm(x_BSD), memory)


class T5DenseGatedActDense(nn.Module):
    def __init__(self, config: Config) -> None:
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.wi = nn.Fused(self.wi_0, self.wi_1)
        self.activation = nn.ACTIVATIONS[config.activation]

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = self.wi(x_BSD)
        return self.wo(self.activation(gate) * up)


class T5LayerFF(nn.Module):
    def __init__(self, config: Config) -> None:
        names = ("wi", "wo")
        self.DenseReluDense = (
            T5DenseGatedActDense(config)
            if config.feed_forward_proj.startswith("gated-")
            else nn.MLP(config.d_model, config.d_ff, config.activation, bias=False, names=names)
        )
        self.layer_norm = T5LayerNorm(config)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return x_BSD + self.DenseReluDense(self.layer_norm(x_BSD))


class T5EncoderBlock(nn.Module):
    def __init__(self, config: Config, has_bias: bool) -> None:
        self.layer = [T5LayerSelfAttention(config, has_bias, is_causal=False), T5LayerFF(config)]

    def forward(self, x_BSD: nn.Tensor, bias: nn.Tensor) -> nn.Tensor:
        attention, mlp = self.layer
        return mlp(attention(x_BSD, bias, None))


class T5DecoderBlock(nn.Module):
    def __init__(self, config: Config, has_bias: bool) -> None:
        attention = T5LayerSelfAttention(config, has_bias, is_causal=True)
        self.layer = [attention, T5LayerCrossAttention(config), T5LayerFF(config)]

    def forward(
        self, x_BSD: nn.Tensor, bias: nn.Tensor, memory: nn.Memory, cache: nn.CacheLayer | None
    ) -> nn.Tensor:
        attention, cross_attention, mlp = self.layer
        return mlp(cross_attention(attention(x_BSD, bias, cache), memory))


class T5Stack(nn.Module):
    """The blocks of one side, under the embedding of both."""

    def __init__(self, config: Config, embedding: nn.Embedding, block: Any, count: int) -> None:
        self.embed_tokens = embedding
        self.block = [block(config, i == 0) for i in range(count)]
        self.final_layer_norm = T5LayerNorm(config)
        self.sees_ahead = block is T5EncoderBlock
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance

    def bias(self, tokens: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        """What is added to scores: tokens [B, S] to [1 or B, H, S, positions]."""
        layer = cache[0]
        count = tokens.shape[1] if layer is None else layer.max_seq
        at = op.unsqueeze(op.positions(tokens, cache), 2)
        away = op.arange(count, dtype="int64") - at
        table = self.block[0].layer[0].SelfAttention.relative_attention_bias
        return op.permute_dims(table(self.bucket(away)), (0, 3, 1, 2))

    def bucket(self, away: nn.Tensor) -> nn.Tensor:
        """The row of the table for keys that are so many tokens after their query: one for each distance up to half of the rows, then ever wider ones."""
        rows, first = self.buckets, 0
        if self.sees_ahead:
            rows //= 2
            first = op.astype(away > 0, "int64") * rows
            away = op.abs(away)
        else:
            away = op.maximum(-away, 0)
        exact = rows // 2
        share = op.log(op.astype(op.maximum(away, 1), "float32") / exact) / math.log(
            self.max_distance / exact
        )
        wide = op.minimum(exact + op.astype(share * (rows - exact), "int64"), rows - 1)
        return first + op.where(away < exact, away, wide)


class T5ForConditionalGeneration(nn.EncoderDecoder):
    def __init__(self, config: Config) -> None:
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared, T5EncoderBlock, config.num_layers)
        self.decoder = T5Stack(config, self.shared, T5DecoderBlock, config.decoder_layers)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.shared.weight
        self.scale = config.d_model**-0.5 if config.scales_outputs else None

    def encoded(self, source: nn.Tensor) -> nn.Tensor:
        x_BSD, bias = self.shared(source), self.encoder.bias(source, nn.NO_CACHE)
        for block in self.encoder.block:
            x_BSD = block(x_BSD, bias)
        return self.encoder.final_layer_norm(x_BSD)

    def keys_and_values(self, x: nn.Tensor) -> Iterator[nn.KeysAndValues]:
        for block in self.decoder.block:
            yield block.layer[1].EncDecAttention.keys_and_values(x)

    def hidden(
        self, tokens: nn.Tensor, memory: Sequence[nn.Memory] | nn.Cache, cache: nn.Cache | nn.NoCache
    ) -> nn.Tensor:
        x_BSD, bias = self.shared(tokens), self.decoder.bias(tokens, cache)
        for i, block in enumerate(self.decoder.block):
            x_BSD = block(x_BSD, bias, memory[i], cache[i])
        return self.decoder.final_layer_norm(x_BSD)

    def head(self, x: nn.Tensor) -> nn.Tensor:
        return op.astype(self.lm_head(x if self.scale is None else x * self.scale), "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return T5ForConditionalGeneration(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export; a source is tokens."""
    source = spec.Tensor([nn.Dim("batch", min=1), nn.Dim("source", min=1, max=LONGEST)], "int64")
    sizes = config.decoder_layers, config.num_heads, config.d_kv, config.dtype
    return nn.encoder_decoder_spec(source, *sizes, max_source=LONGEST, max_positions=LONGEST)


TINY = Config(vocab_size=259, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
