# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: latent attention, a few dense layers, then mixtures of experts beside one that every token takes.

Source: transformers' `modeling_deepseek_v3.py` (5.x), whose attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors); attention is
computed on latents, not on keys and values.

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import spec

IGNORED = ("model.layers.61.*",)  # guesses a further token, where that is asked for


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"deepseek_v3": {}}
    aliases: ClassVar = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
    only: ClassVar = {
        "hidden_act": nn.EXPERT_ACTIVATIONS,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }
    unused: ClassVar = {
        "num_nextn_predict_layers": "the first of them is built where it is asked for, and it guesses any number of tokens",
        "num_mtp_layers": "as num_nextn_predict_layers",
        "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
        "pretraining_tp": "how products were split in training, which changes their rounding alone",
        "ep_size": "how experts were spread over devices",
        "aux_loss_alpha": "training",
        "seq_aux": "training",
    }
    divided: ClassVar = (*nn.USUALLY_DIVIDED, "moe_intermediate_size")

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    first_k_dense_replace: int = field(default=3, metadata={"min": 0})
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5

    @property
    def head_size(self) -> int:
        """Features of a head that positions turn."""
        return self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What scores of attention are multiplied with."""
        rope, scale = self.rope_parameters, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
        grown = 1.0 if not weight or rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0
        return scale * grown**2


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


class DeepseekV3DecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = nn.LatentAttention(
            d,
            config.num_attention_heads,
            plain=config.qk_nope_head_dim,
            rotated=config.qk_rope_head_dim,
            value=config.v_head_dim,
            kv_rank=config.kv_lora_rank,
            q_rank=config.q_lora_rank,
            bias=config.attention_bias,
            scale=config.scale,
            interleaved=config.rope_interleave,
        )
        self.mlp = (
            nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
            if index < config.first_k_dense_replace
            else experts(config)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


class DeepseekV3MTP(DeepseekV3DecoderLayer, nn.MultiTokenLayer):
    """One layer more, which guesses the token behind the next."""


def build(config: Config) -> nn.CausalLM:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [DeepseekV3DecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def build_mtp(config: Config) -> nn.MultiTokenLM:
    """Return the model with the layer that guesses the token behind the next."""
    lm: Any = build(config)
    with nn.default_dtype(config.dtype):
        layer = DeepseekV3MTP(config, config.num_hidden_layers)
        layer.join(lm.model.embed_tokens, lm.lm_head, config.rms_norm_eps)
    lm.model.layers.append(layer)
    return nn.MultiTokenLM(lm, kept(config))


def kept(config: Config) -> spec.Layer:
    """What a layer keeps of each token."""
    return spec.Layer(
        {"latent": spec.Tensor([1, config.kv_lora_rank + config.qk_rope_head_dim], config.dtype)}
    )


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    cache = spec.State([kept(config)] * config.num_hidden_layers)
    return nn.causal_lm_spec(cache, config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    max_position_embeddings=256,
)
