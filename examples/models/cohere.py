# SPDX-License-Identifier: Apache-2.0
"""Command R (Cohere).

Source: transformers' `modeling_cohere.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: layer norms without bias; both parts of a layer
read the same norm; neighbours are the pairs that are rotated; logits are multiplied by a number.

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

    model_types: ClassVar = {"cohere": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"rope_theta": 500000.0}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_qk_norm: bool = False
    logit_scale: float = 0.0625


class HeadNorm(nn.Module):
    """A layer norm of each head, by weights of its own."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        self.weight = nn.Parameter((heads, size))
        rows = nn.pairs_as_halves(size, size)(op.reshape(self.weight, (heads * size,)))
        self.ordered = op.reshape(rows, (heads, size))  # as the rows of the projection
        self.size, self.eps = size, eps

    def forward(self, x_BSHK: nn.Tensor) -> nn.Tensor:
        return op.layer_norm(x_BSHK, (self.size,), None, None, self.eps) * self.ordered


class CohereAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        h, g, k = config.num_attention_heads, config.kv_heads, config.head_size
        super().__init__(config.hidden_size, h, g, k, config.attention_bias, interleaved=k)
        self.q_norm = HeadNorm(h, k, config.layer_norm_eps) if config.use_qk_norm else nn.Identity()
        self.k_norm = HeadNorm(g, k, config.layer_norm_eps) if config.use_qk_norm else nn.Identity()

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK


class CohereDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.self_attn = CohereAttention(config)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(d, config.layer_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        return x_BSD + self.self_attn(y_BSD, rope, cache) + self.mlp(y_BSD)


class CohereForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [CohereDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.logit_scale = config.logit_scale

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return super().head(x_BSD) * self.logit_scale


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return CohereForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
