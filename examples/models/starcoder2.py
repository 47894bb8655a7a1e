# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2.

Source: transformers' `modeling_starcoder2.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: layer norms, biases everywhere, a
feed-forward part without a gate, all layers may see a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"starcoder2": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS, "mlp_type": ("default",), "norm_type": ("layer_norm",)}
    unused: ClassVar = {"residual_dropout": "training", "embedding_dropout": "training"}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 4096
    norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    sliding_window: int | None = None
    use_bias: bool = True

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Starcoder2DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(*sizes, config.use_bias, window=config.sliding_window)
        self.mlp = nn.MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            config.use_bias,
            ("c_fc", "c_proj"),
        )
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.norm_epsilon)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Starcoder2DecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.LayerNorm(config.hidden_size, config.norm_epsilon),
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
