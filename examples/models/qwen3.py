# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense.

Source: transformers' `modeling_qwen3.py` (5.x), whose attribute names are the checkpoint's. Differences from Qwen 2: each head of q and k is
normalised before it is rotated; biases are a switch.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"qwen3": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False
    max_window_layers: int = field(default=28, metadata={"min": 0})

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.use_sliding_window else None


class Qwen3Attention(nn.Attention):
    def __init__(self, config: Config, window: int | None) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias, window=window)
        self.q_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK


class Qwen3DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, window: int | None) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Qwen3Attention(config, window)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Qwen3DecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
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
    head_dim=16,
    max_position_embeddings=256,
)
