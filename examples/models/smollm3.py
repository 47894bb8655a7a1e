# SPDX-License-Identifier: Apache-2.0
"""SmolLM 3.

Source: transformers' `modeling_smollm3.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: every fourth layer is not rotated, and may
see a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"smollm3": {}}
    only: ClassVar = {
        "hidden_act": nn.ACTIVATIONS,
        "no_rope_layers": (0, 1),
    }
    unused: ClassVar = {"max_window_layers": "transformers does not read it", "pretraining_tp": "training"}
    rope_defaults: ClassVar = {"rope_theta": 2000000.0}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer is rotated: `no_rope_layers` holds 0 for those that are not."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window and not self.is_rotated(layer)

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.use_sliding_window else None


class SmolLM3DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, index: int) -> None:
        d, bias = config.hidden_size, config.attention_bias
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        window, rotated = config.window(index), config.is_rotated(index)
        self.self_attn = nn.Attention(*sizes, bias, window=window, rotated=rotated)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [SmolLM3DecoderLayer(config, i) for i in range(config.num_hidden_layers)],
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
    no_rope_layers=(1, 0),
    max_position_embeddings=256,
)
