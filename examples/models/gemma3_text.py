# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text.

Source: transformers' `modeling_gemma3.py` (5.x), whose attribute names are the checkpoint's. Differences from Gemma 2: heads of q and k are
normalised, five of six layers see a window and are rotated by angles of their own, nothing is capped by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op

PREFIXES = {"language_model.": ""}  # checkpoints with images hold the text's model under it


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"gemma3_text": {}}
    only: ClassVar = {
        "hidden_activation": nn.ACTIVATIONS,
        "use_bidirectional_attention": (False,),
        "attn_logit_softcapping": (None,),
    }
    unused: ClassVar = {
        "hidden_act": "transformers reads hidden_activation",
        "rope_local_base_freq": "it is taken into rope_parameters",
    }
    rope_defaults: ClassVar = {
        "sliding_attention": {"rope_theta": 10000.0},
        "full_attention": {"rope_theta": 1000000.0},
    }
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    sliding_window_pattern: int = 6
    final_logit_softcapping: float | None = None

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0


class Gemma3RMSNorm(nn.RMSNorm):
    def __init__(self, config: Config, size: int) -> None:
        super().__init__(size, -1, config.rms_norm_eps, bias=False, offset=1.0)


class Gemma3Attention(nn.Attention):
    def __init__(self, config: Config, window: int | None) -> None:
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        scale = config.query_pre_attn_scalar**-0.5
        super().__init__(*sizes, bias=config.attention_bias, window=window, scale=scale)
        self.q_norm = Gemma3RMSNorm(config, config.head_size)
        self.k_norm = Gemma3RMSNorm(config, config.head_size)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK

    def forward(
        self,
        x_BSD: nn.Tensor,
        rope: nn.Rotation | None,
        cache: nn.CacheLayer | None,
        seen: nn.Tensor | None = None,
    ) -> nn.Tensor:
        """`seen`: where tokens do not see those before them alone, which positions each sees."""
        return self.o_proj(self.attend(x_BSD, rope, cache, seen, is_causal=seen is None))


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d = config.hidden_size
        self.layer_type = config.layer_type(index)
        self.self_attn = Gemma3Attention(config, config.window(index))
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_activation)
        self.input_layernorm = Gemma3RMSNorm(config, d)
        self.post_attention_layernorm = Gemma3RMSNorm(config, d)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(config, d)
        self.post_feedforward_layernorm = Gemma3RMSNorm(config, d)

    def forward(
        self,
        x_BSD: nn.Tensor,
        ropes: dict[str, nn.Rotation],
        cache: nn.CacheLayer | None,
        seen: dict[str, nn.Tensor] | None = None,
    ) -> nn.Tensor:
        own = None if seen is None else seen[self.layer_type]
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), ropes[self.layer_type], cache, own)
        x_BSD = x_BSD + self.post_attention_layernorm(y_BSD)
        y_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD))
        return x_BSD + self.post_feedforward_layernorm(y_BSD)


class Gemma3ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        d, length = config.hidden_size, config.max_position_embeddings
        model = nn.Decoder(
            nn.ScaledEmbedding(config.vocab_size, d, d**0.5),
            [Gemma3DecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            Gemma3RMSNorm(config, d),
            nn.RotaryByLayerType(config.head_size, config.rope_parameters, length),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.softcap = config.final_logit_softcapping

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        logits = super().head(x_BSD)
        return logits if self.softcap is None else op.tanh(logits / self.softcap) * self.softcap


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return Gemma3ForCausalLM(config)


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
