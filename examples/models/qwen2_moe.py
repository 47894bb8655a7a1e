# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 whose feed-forward layers are mixtures of experts beside one that every token takes.

Source: transformers' `modeling_qwen2_moe.py` (5.x), whose attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"qwen2_moe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS}
    divided: ClassVar = (*nn.USUALLY_DIVIDED, "shared_expert_intermediate_size")

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    use_sliding_window: bool = False
    sliding_window: int | None = field(default=4096, metadata={"min": 0})
    max_window_layers: int = field(default=28, metadata={"min": 0})
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.use_sliding_window else None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen2MoeSparseMoeBlock(nn.MixtureOfExperts):
    """Experts of which a router chooses some, and one for all tokens that a gate of its own weighs."""

    def __init__(self, config: Config) -> None:
        d, e, act = config.hidden_size, config.num_experts, config.hidden_act
        gate = nn.Router(d, e, config.num_experts_per_tok, normalized=config.norm_topk_prob)
        super().__init__(gate, nn.Experts(e, d, config.moe_intermediate_size, act))
        self.shared_expert = nn.GatedMLP(d, config.shared_expert_intermediate_size, act)
        self.shared_expert_gate = nn.Linear(d, 1, bias=False)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        shared_BSD = op.sigmoid(self.shared_expert_gate(x_BSD)) * self.shared_expert(x_BSD)
        return super().forward(x_BSD) + shared_BSD


class Qwen2MoeDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, index: int) -> None:
        d, eps, act = config.hidden_size, config.rms_norm_eps, config.hidden_act
        heads, kv_heads, k, bias = (
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            config.qkv_bias,
        )
        self.self_attn = nn.Attention(d, heads, kv_heads, k, bias, False, window=config.window(index))
        self.mlp = (
            Qwen2MoeSparseMoeBlock(config)
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
            [Qwen2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)],
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
    shared_expert_intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    max_position_embeddings=256,
)
