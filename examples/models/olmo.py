# SPDX-License-Identifier: Apache-2.0
"""OLMo 1.

Source: transformers' `modeling_olmo.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: norms have no weights, and q, k and v may be
clipped.

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

    model_types: ClassVar = {"olmo": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 50304
    hidden_act: str = "silu"
    attention_bias: bool = False
    clip_qkv: float | None = None


class OlmoAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias)
        self.clip = config.clip_qkv

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        if self.clip is None:
            return q_BSHK, k_BSGK, v_BSGK
        q_BSHK, k_BSGK, v_BSGK = (op.clip(part, -self.clip, self.clip) for part in (q_BSHK, k_BSGK, v_BSGK))
        return q_BSHK, k_BSGK, v_BSGK


class OlmoDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.self_attn = OlmoAttention(config)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(d, 1e-5, elementwise_affine=False)
        self.post_attention_layernorm = nn.LayerNorm(d, 1e-5, elementwise_affine=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [OlmoDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.LayerNorm(config.hidden_size, 1e-5, elementwise_affine=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
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
