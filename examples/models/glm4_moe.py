# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and 4.6: a decoder of a few dense layers, then mixtures of experts beside one that every token takes.

Source: transformers' `modeling_glm4_moe.py` (5.x), whose attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import spec

IGNORED = ("model.layers.46.*", "model.layers.92.*")  # guess a further token, where that is asked for


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"glm4_moe": {}}
    aliases: ClassVar = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS}
    unused: ClassVar = dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers"), "the first of them is built where it is asked for"
    )
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}
    divided: ClassVar = (*nn.USUALLY_DIVIDED, "moe_intermediate_size")

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = field(default=1, metadata={"min": 0})
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class Glm4MoeAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k = (config.num_attention_heads, config.kv_heads), config.head_size
        super().__init__(config.hidden_size, *heads, k, config.attention_bias, out_bias=False)
        self.has_norms = config.use_qk_norm
        if self.has_norms:
            self.q_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)
            self.k_norm = nn.RMSNorm(k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        if self.has_norms:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        return q_BSHK, k_BSGK, v_BSGK


def experts(config: Config) -> nn.MixtureOfExperts:
    """Sigmoids as scores, which a bias corrects where they are compared; the best experts of the best groups."""
    d, inner, act = config.hidden_size, config.moe_intermediate_size, config.hidden_act
    count, chosen = config.n_routed_experts, config.num_experts_per_tok
    gate = nn.Router(
        d,
        count,
        chosen,
        corrected_sigmoids=True,
        wide=True,
        groups=(config.n_group, config.topk_group, 2) if config.n_group > 1 else None,
        normalized=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    shared = nn.GatedMLP(d, inner * config.n_shared_experts, act)
    return nn.MixtureOfExperts(gate, nn.Experts(count, d, inner, act), shared)


class Glm4MoeDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Glm4MoeAttention(config)
        self.mlp = (
            nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
            if index < config.first_k_dense_replace
            else experts(config)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


class Glm4MoeMTP(Glm4MoeDecoderLayer, nn.MultiTokenLayer):
    """One layer more, which guesses the token behind the next."""


def build(config: Config) -> nn.CausalLM:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Glm4MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def build_mtp(config: Config) -> nn.MultiTokenLM:
    """Return the model with the layer that guesses the token behind the next."""
    lm: Any = build(config)
    with nn.default_dtype(config.dtype):
        layer = Glm4MoeMTP(config, config.num_hidden_layers)
        layer.join(lm.model.embed_tokens, lm.lm_head, config.rms_norm_eps)
    lm.model.layers.append(layer)
    return nn.MultiTokenLM(lm, spec.KV(config.kv_heads, config.head_size, config.dtype))


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
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
