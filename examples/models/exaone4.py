# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4.

Source: transformers' `modeling_exaone4.py` (5.x), whose attribute names are the checkpoint's. Differences from OLMo 3: q and k are normalised by head, and layers of
full attention are not rotated where others see a window.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"exaone4": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 102400
    intermediate_size: int = 16384
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    sliding_window_pattern: Any = 4

    def is_sliding(self, layer: int) -> bool:
        return self.sliding_window is not None and (layer + 1) % 4 != 0


class Exaone4Attention(nn.Attention):
    def __init__(self, config: Config, window: int | None) -> None:
        heads, k = config.num_attention_heads, config.head_size
        rotated = config.sliding_window is None or window is not None
        super().__init__(config.hidden_size, heads, config.kv_heads, k, window=window, rotated=rotated)
        self.q_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK


class Exaone4DecoderLayer(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        d = config.hidden_size
        self.self_attn = Exaone4Attention(config, window)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_feedforward_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.post_attention_layernorm(self.self_attn(x_BSD, rope, cache))
        return x_BSD + self.post_feedforward_layernorm(self.mlp(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Exaone4DecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)],
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
    max_position_embeddings=256,
)
