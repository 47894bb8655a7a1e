# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: delta nets that fade each channel at its own rate, every few layers latent attention without positions, and mixtures of experts.

Source: transformers' `modeling_kimi_linear.py` (5.x); attribute names are the checkpoint's. Queries, keys and values are multiplied and convolved as one; experts, stored
one by one, are stacked (derived tensors); attention is computed on latents, not on keys and values.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, K features of a head, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

PREFIXES = {
    f"model.layers.{i}.block_sparse_moe.{part}_proj.": f"model.layers.{i}.mlp.{part}_proj."
    for i in range(8)
    for part in ("gate", "up", "down")
}
"""transformers writes dense layers, which are the first ones, under the name of those of experts."""


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_attention_heads", "intermediate_size", "vocab_size", "moe_intermediate_size")
    model_types: ClassVar = {"kimi_linear": {}}
    aliases: ClassVar = {
        "model_max_length": "max_position_embeddings",
        "n_group": "num_expert_group",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
    }
    only: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "layer_types": ("linear_attention", "full_attention"),
        "mla_use_nope": (True,),
        "mlp_layer_types": ("dense", "sparse"),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "tie_word_embeddings": (False,),
    }
    unused: ClassVar = {
        "head_dim": "transformers does not read it",
        "num_key_value_heads": "every head has keys and values of its own",
        "num_nextn_predict_layers": "layers that guess further tokens",
        "pretraining_tp": "how products were split in training, which changes their rounding alone",
        "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
        **dict.fromkeys(("rope_scaling", "rope_theta"), "nothing is rotated"),
        "use_grouped_topk": "one group is no group",
    }

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    linear_attn_config: dict[str, Any] = field(default_factory=dict)
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    first_k_dense_replace: int = field(default=1, metadata={"min": 0})
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    dtype: str = "float32"

    @property
    def sizes(self) -> nn.DeltaSizes:
        own, given = self.linear_head_dim, self.linear_attn_config
        heads, size = given.get("num_heads", self.linear_num_heads), given.get("head_dim", own)
        width = given.get("short_conv_kernel_size", self.linear_conv_kernel_dim)
        return nn.DeltaSizes(heads, size, heads, size, width)

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is a delta net."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "linear_attention"
        full = self.linear_attn_config.get("full_attn_layers")  # counted from 1
        return layer + 1 not in full if full else layer == 0 or layer % 4 != 0

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "sparse"
        return layer >= self.first_k_dense_replace


class KimiDeltaAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d, sizes = config.hidden_size, config.sizes
        inner, k, width = sizes.values, sizes.key_size, sizes.width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, inner, bias=False) for _ in range(3))
        convs = [nn.CausalConv(inner, width, bias=False) for _ in range(3)]
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convs
        self.f_a_proj, self.f_b_proj = nn.Linear(d, k, bias=False), nn.Linear(k, inner, bias=False)
        self.g_a_proj, self.g_b_proj = nn.Linear(d, k, bias=False), nn.Linear(k, inner, bias=False)
        self.b_proj = nn.Linear(d, sizes.heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter([1, 1, sizes.heads, 1]), nn.Parameter([inner])
        self.o_norm = nn.GatedRMSNorm(k, config.rms_norm_eps, gate_first=False, activation="sigmoid")
        self.o_proj = nn.Linear(inner, d, bias=False)
        qkv, others = (self.q_proj, self.k_proj, self.v_proj), (self.f_a_proj, self.g_a_proj, self.b_proj)
        self.projected = nn.Fused(*qkv, *others)
        self.taps = op.concat([each.taps for each in convs], 0)
        self.rates = -op.exp(op.astype(self.A_log, "float32"))
        self.key_size = k

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        s, k = x_BSD.shape[1], self.key_size
        *qkv, fade, gate, rate_BSH = self.projected(x_BSD)
        before = op.cache_read(cache, "conv")
        mixed, last = op.causal_conv1d(op.concat(qkv, -1), self.taps, None, before, activation="silu")
        op.cache_write(cache, "conv", last, s)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, k) for part in op.split(mixed, 3, -1))
        fade = op.astype(self.f_b_proj(fade), "float32") + op.astype(self.dt_bias, "float32")
        fade_BSHK = self.rates * op.softplus(op.split_heads(fade, k))
        before, rate_BSH = op.cache_read(cache, "delta"), op.sigmoid(rate_BSH)
        tokens = q_BSHK, k_BSHK, v_BSHK, fade_BSHK, rate_BSH
        y_BSHK, state = op.gated_delta_rule(*tokens, before, qk_l2norm=True)
        op.cache_write(cache, "delta", state, s)
        y_BSHK = self.o_norm(y_BSHK, op.split_heads(self.g_b_proj(gate), k))
        return self.o_proj(op.merge_heads(y_BSHK))


def experts(config: Config) -> nn.MixtureOfExperts:
    """Sigmoids as scores, which a bias corrects where they are compared; the best experts of the best groups."""
    d, inner, act = config.hidden_size, config.moe_intermediate_size, config.hidden_act
    groups = config.num_expert_group
    gate = nn.Router(
        d,
        config.num_experts,
        config.num_experts_per_token,
        corrected_sigmoids=True,
        wide=True,
        groups=(groups, config.topk_group, 2) if groups > 1 else None,
        normalized=config.moe_renormalize,
        scale=config.routed_scaling_factor,
    )
    stacks = nn.Experts(config.num_experts, d, inner, act, names=("w1", "w3", "w2"))
    return nn.MixtureOfExperts(gate, stacks, nn.GatedMLP(d, inner * config.num_shared_experts, act))


class KimiDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear, self.is_sparse = config.is_linear(index), config.is_sparse(index)
        plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.self_attn = (
            KimiDeltaAttention(config)
            if self.is_linear
            else nn.LatentAttention(
                d,
                config.num_attention_heads,
                plain=plain,
                rotated=rotated,
                value=config.v_head_dim,
                kv_rank=config.kv_lora_rank,
                q_rank=config.q_lora_rank,
                bias=config.attention_bias,
                scale=(plain + rotated) ** -0.5,
                interleaved=False,
            )
        )
        if self.is_sparse:
            self.block_sparse_moe = experts(config)
        else:
            self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        given = (cache,) if self.is_linear else (None, cache)  # no rotation
        x_BSD = x_BSD + self.self_attn(y_BSD, *given)
        y_BSD = self.post_attention_layernorm(x_BSD)
        return x_BSD + (self.block_sparse_moe(y_BSD) if self.is_sparse else self.mlp(y_BSD))


class KimiModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cache[i])
        return self.norm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = KimiModel(config)
        return nn.CausalLM(model, model.embed_tokens)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    latent = spec.Tensor([1, config.kv_lora_rank + config.qk_rope_head_dim], config.dtype)
    full = spec.Layer(per_token={"latent": latent})
    linear = spec.Layer(per_sequence=config.sizes.state(config.dtype))
    layers = [linear if config.is_linear(i) else full for i in range(config.num_hidden_layers)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    linear_head_dim=8,
    layer_types=("linear_attention", "full_attention"),
    num_experts=4,
    num_experts_per_token=2,
)
