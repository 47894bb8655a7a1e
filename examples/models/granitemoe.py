# SPDX-License-Identifier: Apache-2.0
"""Granite MoE and PowerMoE: Granite, with its four multipliers, whose feed-forward layers are mixtures of experts.

Source: transformers' `modeling_granitemoe.py` (5.x), whose checkpoint names these are: experts are stored as stacks.

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"granitemoe": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS}

    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class Stack(nn.Module):
    """The matrices of all experts in one tensor."""

    def __init__(self, *shape: int) -> None:
        self.weight = nn.Parameter(shape)


class Router(nn.Module):
    def __init__(self, size: int, count: int) -> None:
        self.layer = nn.Linear(size, count, bias=False)


class GraniteMoeMoE(nn.Module):
    """Experts whose weights are a softmax over the logits of those that were chosen."""

    def __init__(self, config: Config) -> None:
        d, i, e = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.router = Router(d, e)
        self.input_linear, self.output_linear = Stack(e, 2 * i, d), Stack(e, d, i)
        self.chosen, self.activation = config.num_experts_per_tok, config.hidden_act

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        logits_TC, chosen_TC = op.topk(op.astype(self.router.layer(x_TD), "float32"), self.chosen)
        weights_TC = op.softmax(logits_TC, -1)
        gate_up, down = self.input_linear.weight, self.output_linear.weight
        y_TD = op.moe_mlp(
            x_TD, gate_up, down, chosen_TC, weights_TC, activation=nn.EXPERT_ACTIVATIONS[self.activation]
        )
        return op.reshape(y_TD, x_BSD.shape)


class GraniteMoeDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps, scale = config.hidden_size, config.rms_norm_eps, config.attention_multiplier
        sizes = config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(d, *sizes, config.attention_bias, scale=scale)
        self.block_sparse_moe = GraniteMoeMoE(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.multiplier = config.residual_multiplier

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache) * self.multiplier
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD)) * self.multiplier


class GraniteMoeForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.ScaledEmbedding(config.vocab_size, config.hidden_size, config.embedding_multiplier),
            [GraniteMoeDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.scaling = config.logits_scaling

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return super().head(x_BSD) / self.scaling


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return GraniteMoeForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=256,
    residual_multiplier=0.5,
)
