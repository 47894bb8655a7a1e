# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen 3 whose feed-forward layers are mixtures of experts.

Source: transformers' `modeling_qwen3_moe.py` (5.x), whose attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"qwen3_moe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS, "use_sliding_window": (False,)}
    unused: ClassVar = {
        "sliding_window": "it takes use_sliding_window",
        "max_window_layers": "it takes use_sliding_window",
    }
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 768
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen3MoeAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k = (config.num_attention_heads, config.kv_heads), config.head_size
        super().__init__(config.hidden_size, *heads, k, config.attention_bias)
        self.q_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK


class Qwen3MoeSparseMoeBlock(nn.MixtureOfExperts):
    """A router, and experts of which it chooses some for each token."""

    def __init__(self, config: Config) -> None:
        d, e, inner = config.hidden_size, config.num_experts, config.moe_intermediate_size
        gate = nn.Router(d, e, config.num_experts_per_tok, normalized=config.norm_topk_prob)
        super().__init__(gate, nn.Experts(e, d, inner, config.hidden_act))


class Qwen3MoeDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, index: int) -> None:
        d, eps, act = config.hidden_size, config.rms_norm_eps, config.hidden_act
        self.self_attn = Qwen3MoeAttention(config)
        self.mlp = (
            Qwen3MoeSparseMoeBlock(config)
            if config.is_sparse(index)
            else nn.GatedMLP(d, config.intermediate_size, act)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Qwen3MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    max_position_embeddings=256,
)
