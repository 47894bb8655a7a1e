# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: attention and a mixer of Mamba-2 side by side in each layer, and gated feed-forward layers.

Source: transformers' `modeling_falcon_h1.py` (5.x), whose attribute names are the checkpoint's. The multipliers of a mixer's parts are multiplied into its weight (a
derived tensor).

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
    model_types: ClassVar = {"falcon_h1": {}}
    only: ClassVar = {"hidden_act": ("silu", "swish"), "mamba_use_mlp": (True,)}
    unused: ClassVar = {
        "mamba_chunk_size": "how many tokens are computed at once, which changes their rounding alone",
        "mamba_expand": "it takes mamba_d_ssm to be null",
        "num_logits_to_keep": "how transformers generates",
        "time_step_floor": "how weights begin",
        "time_step_max": "how weights begin",
        "time_step_min": "how weights begin",
        "time_step_rank": "transformers does not read it",
    }

    vocab_size: int = 128000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 8192
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba_d_ssm: int | None = 1024
    mamba_expand: int = 2
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_head: int | str = "auto"
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    time_step_limit: Any = None
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.mamba_d_head, str):
            inner = self.mamba_expand * self.hidden_size if self.mamba_d_ssm is None else self.mamba_d_ssm
            object.__setattr__(self, "mamba_d_head", inner // self.mamba_n_heads)

    @property
    def limits(self) -> tuple[float, float]:
        """Of the steps."""
        return nn.step_limits(self.time_step_limit)

    @property
    def sizes(self) -> nn.Mamba2Sizes:
        return nn.Mamba2Sizes(
            self.mamba_n_heads, self.mamba_d_head, self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv
        )


class FalconH1Attention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias)
        self.multiplier = config.key_multiplier

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return q_BSHK, k_BSGK * self.multiplier, v_BSGK


class FalconH1Mixer(nn.Mamba2Mixer):
    def __init__(self, config: Config) -> None:
        sizes, eps, bias = config.sizes, config.rms_norm_eps, config.mamba_proj_bias
        super().__init__(
            config.hidden_size,
            sizes,
            eps,
            bias=bias,
            out_bias=config.projectors_bias,
            conv_bias=config.mamba_conv_bias,
            limits=config.limits,
        )
        self.is_normed = config.mamba_rms_norm
        if self.is_normed:
            first = not config.mamba_norm_before_gate
            self.norm = nn.GatedRMSNorm(sizes.inner, eps, sizes.groups, gate_first=first)
        else:
            self.norm = nn.Identity()
        of_b = 2 * sizes.inner + sizes.groups * sizes.states
        ends = [sizes.inner, 2 * sizes.inner, of_b, of_b + sizes.groups * sizes.states]
        factors = config.ssm_multipliers
        of_input = config.ssm_in_multiplier

        def scaled(rows: nn.Tensor, factor: float) -> nn.Tensor:
            parts = zip(op.split(rows, ends, 0), factors, strict=True)
            return op.concat([part * (each * factor) for part, each in parts], 0)

        self.weight = scaled(self.in_proj.weight, of_input)
        self.bias = scaled(self.in_proj.bias, 1.0) if bias else None

    def project(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.linear(x_BSD, self.weight, self.bias)

    def gated(self, y: nn.Tensor, gate: nn.Tensor) -> nn.Tensor:
        return self.norm(y, gate) if self.is_normed else y * op.silu(gate)


class FalconH1MLP(nn.GatedMLP):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.multipliers = config.mlp_multipliers

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = self.gate_up(x_BSD)
        of_gate, of_result = self.multipliers
        return self.down_proj(up * self.activation(gate * of_gate)) * of_result


class FalconH1DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.mamba = FalconH1Mixer(config)
        self.self_attn = FalconH1Attention(config)
        self.feed_forward = FalconH1MLP(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.pre_ff_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.of_attention = config.attention_in_multiplier, config.attention_out_multiplier
        self.of_mixer = config.ssm_out_multiplier

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        given, made = self.of_attention
        mixed_BSD = self.mamba(y_BSD, cache) * self.of_mixer
        x_BSD = x_BSD + (mixed_BSD + self.self_attn(y_BSD * given, rope, cache) * made)
        return x_BSD + self.feed_forward(self.pre_ff_layernorm(x_BSD))


class FalconH1Model(nn.Module):
    def __init__(self, config: Config) -> None:
        d, k = config.hidden_size, config.head_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.layers = [FalconH1DecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.final_layernorm = nn.RMSNorm(d, -1, config.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(k, config.rope_parameters, config.max_position_embeddings)
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD = self.embed_tokens(tokens_BS) * self.multiplier
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.final_layernorm(x_BSD)


class FalconH1ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = FalconH1Model(config)
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.multiplier = config.lm_head_multiplier

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.astype(self.lm_head(x_BSD) * self.multiplier, "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return FalconH1ForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    attention = spec.KV(config.kv_heads, config.head_size, config.dtype)
    layer = spec.Layer(attention.per_token, config.sizes.state(config.dtype))
    return nn.causal_lm_spec(spec.State([layer] * config.num_hidden_layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_d_ssm=64,
    mamba_n_heads=8,
    mamba_d_state=8,
    max_position_embeddings=256,
)
