# SPDX-License-Identifier: Apache-2.0
"""Command R7B and Command A (Cohere).

Source: transformers' `modeling_cohere2.py` (5.x), whose attribute names are the checkpoint's. Differences from Command R: three of four layers see a window, and only
these are rotated; heads are not normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"cohere2": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {
        "cache_implementation": "how transformers runs it",
        "order_of_interleaved_layers": "transformers does not read it",
        "position_embedding_type": "transformers does not read it",
        "rotary_pct": "transformers does not read it",
        "use_embedding_sharing": "transformers does not read it",
        "use_gated_activation": "transformers does not read it",
        "use_parallel_block": "transformers does not read it",
        "use_parallel_embedding": "transformers does not read it",
    }

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
    logit_scale: float = 0.0625
    sliding_window_pattern: int = 4

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json; heads are as large as transformers has them, whatever head_dim says."""
        return super().from_hf({key: value for key, value in config.items() if key != "head_dim"})

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0


class Cohere2DecoderLayer(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        d, bias = config.hidden_size, config.attention_bias
        sizes = d, config.num_attention_heads, config.kv_heads, config.head_size
        rotated = window is not None
        self.self_attn = nn.Attention(
            *sizes, bias, window=window, rotated=rotated, interleaved=config.head_size
        )
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(d, config.layer_norm_eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        return x_BSD + self.self_attn(y_BSD, rope, cache) + self.mlp(y_BSD)


class Cohere2ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Cohere2DecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)],
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
        return Cohere2ForCausalLM(config)


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
