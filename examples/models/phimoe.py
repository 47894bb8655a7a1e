# SPDX-License-Identifier: Apache-2.0
"""Phi-3.5-MoE: layer norms with biases, and in each layer a mixture of experts of which two are chosen one after the other.

Source: transformers' `modeling_phimoe.py` (5.x), whose checkpoint names these are (w1 is gate, w3 up, w2 down). Experts, stored one by one, are stacked
(derived tensors). Difference: with `longrope`, texts longer than the original length are rotated by the long factors, as LongRoPE (arXiv 2402.13753) says.

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"phimoe": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS, "num_experts_per_tok": (2,)}
    unused: ClassVar = {"input_jitter_noise": "noise in training"}
    rope_defaults: ClassVar = {"rope_theta": 1e6}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 32064
    intermediate_size: int = 6400
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    lm_head_bias: bool = False
    sliding_window: int | None = None
    num_local_experts: int = 16
    router_jitter_noise: float = 0.01

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def rotation(self) -> dict[str, Any]:
        """The rotary parameters: what multiplies cosines and sines goes by a name of its own here, for short texts and for long ones."""
        given = dict(self.rope_parameters)
        factors = {given.pop(name) for name in ("short_mscale", "long_mscale") if name in given}
        if len(factors) > 1:
            raise nn.errors.LoadError(
                "config.json says what this model file does not compute",
                details=["rope_parameters: short_mscale and long_mscale differ"],
            )
        return {**given, "attention_factor": factors.pop()} if factors else given


class PhimoeSparseMoeBlock(nn.Module):
    """The best expert, then the best of the others, each weighed by the softmax over those that come near it."""

    def __init__(self, config: Config) -> None:
        d, e, names = config.hidden_size, config.num_local_experts, ("w1", "w3", "w2")
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.Experts(e, d, config.intermediate_size, config.hidden_act, names)
        self.near, self.count = 2 * config.router_jitter_noise, e

    def best(self, logits_TE: nn.Tensor, left_TE: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        """The best of those that are left, [T, 1], and its weight. Source: Sparsemixer (arXiv 2409.12136)."""
        top_T1, chosen_T1 = op.topk(left_TE, 1)
        distance_TE = (top_T1 - logits_TE) / op.maximum(op.abs(logits_TE), top_T1)
        near_TE = op.where(distance_TE > self.near, float("-inf"), left_TE)
        return chosen_T1, op.gather(op.softmax(near_TE, -1), chosen_T1, -1)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        logits_TE = op.astype(self.gate(x_TD), "float32")
        first_T1, weight_T1 = self.best(logits_TE, logits_TE)
        others_TE = op.where(op.arange(self.count) == first_T1, float("-inf"), logits_TE)
        second_T1, other_T1 = self.best(logits_TE, others_TE)
        chosen_TC, weights_TC = op.concat([first_T1, second_T1], -1), op.concat([weight_T1, other_T1], -1)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC), x_BSD.shape)


class PhimoeDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        sizes = config.num_attention_heads, config.kv_heads, config.head_size
        self.self_attn = nn.Attention(d, *sizes, bias, window=config.sliding_window)
        self.block_sparse_moe = PhimoeSparseMoeBlock(config)
        self.input_layernorm = nn.LayerNorm(d, eps)
        self.post_attention_layernorm = nn.LayerNorm(d, eps)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD))


class PhimoeForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [PhimoeDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.LayerNorm(config.hidden_size, config.rms_norm_eps),
            nn.RotaryEmbedding(config.head_size, config.rotation, config.max_position_embeddings),
        )
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        if config.lm_head_bias:
            self.lm_head.bias = nn.Parameter([config.vocab_size])


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return PhimoeForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    num_local_experts=4,
)
