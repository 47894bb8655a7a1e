# SPDX-License-Identifier: Apache-2.0
"""Bamba: mixers of Mamba-2, attention in some layers, and gated feed-forward layers.

Source: transformers' `modeling_bamba.py` (5.x), whose attribute names are the checkpoint's.

Sizes: B batch, S seq, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = (*nn.USUALLY_DIVIDED, "mamba_n_heads", "mamba_n_groups")
    model_types: ClassVar = {"bamba": {}}
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    unused: ClassVar = {
        "mamba_chunk_size": "how many tokens are computed at once, which changes their rounding alone",
        "num_logits_to_keep": "how transformers generates",
        "z_loss_coefficient": "training",
    }
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}

    vocab_size: int = 128000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_layer_indices: tuple[int, ...] | None = None
    mamba_n_heads: int = 128
    mamba_d_head: int | str = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.mamba_d_head, str):
            size = self.mamba_expand * self.hidden_size // self.mamba_n_heads
            object.__setattr__(self, "mamba_d_head", size)

    def attends(self, layer: int) -> bool:
        """Whether a layer is one of attention."""
        return layer in (self.attn_layer_indices or ())

    @property
    def limits(self) -> tuple[float, float]:
        """Of the steps."""
        return nn.step_limits(self.time_step_limit)

    @property
    def sizes(self) -> nn.Mamba2Sizes:
        heads, size = self.mamba_n_heads, self.mamba_d_head
        return nn.Mamba2Sizes(heads, size, self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv)


class BambaDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attends = config.attends(index)
        if self.attends:
            heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
            self.self_attn = nn.Attention(d, heads, config.kv_heads, k, bias)
        else:
            bias, conv_bias = config.mamba_proj_bias, config.mamba_conv_bias
            limits = config.limits
            self.mamba = nn.Mamba2Mixer(d, config.sizes, eps, bias=bias, conv_bias=conv_bias, limits=limits)
        self.feed_forward = nn.GatedMLP(d, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.pre_ff_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        x_BSD = x_BSD + (self.self_attn(y_BSD, rope, cache) if self.attends else self.mamba(y_BSD, cache))
        return x_BSD + self.feed_forward(self.pre_ff_layernorm(x_BSD))


class BambaModel(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k = config.hidden_size, config.head_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.layers = [BambaDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.final_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(k, config.rope_parameters, config.max_position_embeddings)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.final_layernorm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = BambaModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    mixer = spec.Layer(per_sequence=config.sizes.state(config.dtype))
    attention = spec.KV(config.kv_heads, config.head_size, config.dtype)
    layers = [attention if config.attends(i) else mixer for i in range(config.num_hidden_layers)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=(1,),
    mamba_n_heads=8,
    mamba_d_state=8,
    max_position_embeddings=256,
)
