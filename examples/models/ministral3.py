# SPDX-License-Identifier: Apache-2.0
"""Ministral 3, text.

Source: transformers' `modeling_ministral3.py` (5.x), whose attribute names are the checkpoint's. Differences from Mistral: queries far into a text are multiplied
by a number that grows with the logarithm of their position.

Sizes: B batch, S seq, H heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

PREFIXES = {"language_model.": ""}  # checkpoints with images hold the text's model under it


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"ministral3": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Ministral3Rotary(nn.RotaryEmbedding):
    """Cosines and sines, and the number by which queries are multiplied."""

    def __init__(self, config: Config) -> None:
        given = dict(config.rope_parameters)
        given.pop("max_position_embeddings", None)
        self.beta = given.pop("llama_4_scaling_beta")
        self.original = given["original_max_position_embeddings"]
        super().__init__(config.head_size, given, config.max_position_embeddings)

    def forward(self, positions_BS: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        turns = op.astype(op.floor_divide(positions_BS, self.original), "float32")
        factor = op.unsqueeze(op.unsqueeze(1 + self.beta * op.log(1 + turns), -1), -1)
        return *super().forward(positions_BS), factor


class Ministral3Attention(nn.Attention):
    def rotate(
        self, q_BSHK: nn.Tensor, k_BSGK: nn.Tensor, rope: tuple[nn.Tensor, nn.Tensor, nn.Tensor]
    ) -> tuple[nn.Tensor, nn.Tensor]:
        cos, sin, factor = rope
        q_BSHK, k_BSGK = super().rotate(q_BSHK, k_BSGK, (cos, sin))
        return q_BSHK * op.astype(factor, q_BSHK.dtype), k_BSGK


class Ministral3DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = Ministral3Attention(*sizes, window=config.sliding_window)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Ministral3DecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            Ministral3Rotary(config),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
