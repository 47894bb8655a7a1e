# SPDX-License-Identifier: Apache-2.0
"""The text model of Qwen 3.5: gated delta nets, and every few layers gated attention.

Source: transformers' `modeling_qwen3_5.py` (5.x), whose attribute names are the checkpoint's. Differences from Qwen3-Next: what a delta net projects is
stored apart, and multiplied as one; no experts. The positions of a text are the same in all three directions of its rotation.

Sizes: B batch, S seq, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("mtp.*", "model.visual.*")  # layers that guess further tokens; the encoder of images


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"qwen3_5_text": {}}
    only: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "layer_types": ("linear_attention", "full_attention"),
    }
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 128
    linear_num_value_heads: int = 32
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is a delta net."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "linear_attention"
        return (layer + 1) % self.full_attention_interval != 0

    @property
    def rotation(self) -> dict[str, Any]:
        """Rotary parameters, but for what tells directions apart."""
        return {k: v for k, v in self.rope_parameters.items() if not k.startswith("mrope_")}

    @property
    def sizes(self) -> nn.DeltaSizes:
        return nn.DeltaSizes(
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )


class Qwen35GatedDeltaNet(nn.GatedDeltaNet):
    def __init__(self, config: Config) -> None:
        d, sizes = config.hidden_size, config.sizes
        super().__init__(d, sizes, config.rms_norm_eps)
        self.in_proj_qkv = nn.Linear(d, sizes.channels, bias=False)
        self.in_proj_z = nn.Linear(d, sizes.values, bias=False)
        self.in_proj_b = nn.Linear(d, sizes.heads, bias=False)
        self.in_proj_a = nn.Linear(d, sizes.heads, bias=False)
        parts = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        self.weight = op.concat([part.weight for part in parts], 0)


class Qwen35DecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear = config.is_linear(index)
        if self.is_linear:
            self.linear_attn = Qwen35GatedDeltaNet(config)
        else:
            heads, kv_heads, k = config.num_attention_heads, config.kv_heads, config.head_size
            self.self_attn = nn.GatedAttention(d, heads, kv_heads, k, eps, config.attention_bias)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False, offset=1.0)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False, offset=1.0)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        y_BSD = self.linear_attn(y_BSD, cache) if self.is_linear else self.self_attn(y_BSD, rope, cache)
        x_BSD = x_BSD + y_BSD
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Qwen35DecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False, offset=1.0),
            nn.RotaryEmbedding(config.head_size, config.rotation, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    linear = spec.Layer(per_sequence=config.sizes.state(config.dtype))
    full = spec.KV(config.kv_heads, config.head_size, config.dtype)
    layers = [linear if config.is_linear(i) else full for i in range(config.num_hidden_layers)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_num_value_heads=4,
    linear_value_head_dim=8,
    full_attention_interval=2,
    max_position_embeddings=256,
)
