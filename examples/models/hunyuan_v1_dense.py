# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense.

Source: transformers' `modeling_hunyuan_v1_dense.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: heads of q and k are normalised after
they are rotated.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"hunyuan_v1_dense": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {"pretraining_tp": "training", "eod_token_id": "choosing tokens"}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 290943
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    @property
    def rotation(self) -> dict[str, Any]:
        """Rotary parameters: a `dynamic` scaling with an `alpha` is one of theta alone, for texts of any length."""
        given = dict(self.rope_parameters)
        alpha, k = given.pop("alpha", None), self.head_size
        if given["rope_type"] != "dynamic" or not alpha:
            return given
        return {"rope_theta": given["rope_theta"] * alpha ** (k / (k - 2))}


class HunyuanAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias)
        self.query_layernorm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
        self.key_layernorm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def rotate(self, q_BSHK: nn.Tensor, k_BSGK: nn.Tensor, rope: nn.Rotation) -> tuple[nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK = super().rotate(q_BSHK, k_BSGK, rope)
        return self.query_layernorm(q_BSHK), self.key_layernorm(k_BSGK)


class HunyuanDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.self_attn = HunyuanAttention(config)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [HunyuanDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rotation, config.max_position_embeddings),
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
    max_position_embeddings=256,
)
