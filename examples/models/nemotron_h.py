# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: layers that are mixers of Mamba-2, attention without positions, feed-forward layers or mixtures of experts, one part each.

Source: transformers' `modeling_nemotron_h.py` (5.x); attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token, V vocab_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("mtp.*",)  # layers that guess further tokens
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
KINDS |= {"mamba": "linear_attention", "attention": "full_attention"}  # in older configurations


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = (
        *nn.USUALLY_DIVIDED,
        "mamba_num_heads",
        "n_groups",
        "moe_shared_expert_intermediate_size",
    )
    model_types: ClassVar = {"nemotron_h": {}}
    aliases: ClassVar = {
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_n_groups": "n_groups",
    }
    only: ClassVar = {
        "layers_block_type": (*KINDS, *KINDS.values()),
        "mamba_hidden_act": ("silu", "swish"),
        "mlp_hidden_act": nn.EXPERT_ACTIVATIONS,
        "tie_word_embeddings": (False,),
    }
    unused: ClassVar = {
        **dict.fromkeys(
            ("attention_bias", "expand", "residual_in_fp32", "sliding_window"),
            "transformers does not read it",
        ),
        **dict.fromkeys(
            ("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers"),
            "layers that guess further tokens",
        ),
        **dict.fromkeys(
            ("rescale_prenorm_residual", "time_step_floor", "time_step_max"), "how weights begin"
        ),
        "chunk_size": "how many tokens are computed at once, which changes their rounding alone",
        "mamba_ssm_cache_dtype": "the state is float32",
        "mamba_proj_bias": "transformers reads use_bias",
        "moe_shared_expert_overlap": "how transformers runs it",
        "n_shared_experts": "transformers reads moe_shared_expert_intermediate_size",
        "num_hidden_layers": "it is the number of layers_block_type",
        "num_logits_to_keep": "how transformers generates",
        "time_step_limit": "transformers reads time_step_min",
        "use_mamba_kernels": "how transformers runs it",
    }

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 21504
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    max_position_embeddings: int = 4096
    layer_norm_epsilon: float = 1e-5
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_min: float = 0.001
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    dtype: str = "float32"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer is."""
        default = ("linear_attention", "moe", "full_attention", "mlp")
        return tuple(
            KINDS.get(k, k) for k in self.layers_block_type or self.hybrid_override_pattern or default
        )

    @property
    def kept(self) -> list[int]:
        """The layers that keep a state, in order."""
        return [i for i, kind in enumerate(self.kinds) if kind.endswith("_attention")]

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def sizes(self) -> nn.Mamba2Sizes:
        heads, size = self.mamba_num_heads, self.mamba_head_dim
        return nn.Mamba2Sizes(heads, size, self.n_groups, self.ssm_state_size, self.conv_kernel)


class NemotronHMLP(nn.Module):
    def __init__(self, size: int, inner: int, activation: str, bias: bool) -> None:
        self.up_proj = nn.Linear(size, inner, bias)
        self.down_proj = nn.Linear(inner, size, bias)
        self.activation = nn.ACTIVATIONS[activation]

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.down_proj(self.activation(self.up_proj(x_BSD)))


class NemotronHExperts(nn.Experts):
    def __init__(self, config: Config, size: int) -> None:
        inner, act = config.moe_intermediate_size, config.mlp_hidden_act
        self.data = [NemotronHMLP(size, inner, act, False) for _ in range(config.n_routed_experts)]
        self.gate_up_weight = op.stack([each.up_proj.weight for each in self.data], 0)
        self.down_weight = op.stack([each.down_proj.weight for each in self.data], 0)
        self.activation = nn.EXPERT_ACTIVATIONS[act]

    def forward(self, x_TD: nn.Tensor, chosen_TC: nn.Tensor, weights_TC: nn.Tensor) -> nn.Tensor:
        up, down, act = self.gate_up_weight, self.down_weight, self.activation
        return op.moe_mlp(x_TD, up, down, chosen_TC, weights_TC, activation=act, gated=False)


class NemotronHMoE(nn.Module):
    """Experts of which a router chooses some, perhaps of fewer features, and one for all tokens."""

    def __init__(self, config: Config) -> None:
        d, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        inner, act = config.moe_shared_expert_intermediate_size, config.mlp_hidden_act
        self.experts = NemotronHExperts(config, latent or d)
        self.gate = nn.Router(
            d,
            config.n_routed_experts,
            config.num_experts_per_tok,
            corrected_sigmoids=True,
            wide=True,
            groups=(config.n_group, config.topk_group, 2) if config.n_group > 1 else None,
            normalized=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.shared_experts = NemotronHMLP(d, inner, act, bias)
        self.fc1_latent_proj = nn.Linear(d, latent, bias) if latent else nn.Identity()
        self.fc2_latent_proj = nn.Linear(latent, d, bias) if latent else nn.Identity()

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        y_TD = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x_TD), *self.gate(x_TD)))
        return op.reshape(y_TD, x_BSD.shape) + self.shared_experts(x_BSD)


def mixer(config: Config, kind: str) -> nn.Module:
    """The one part of a layer."""
    d, bias = config.hidden_size, config.use_bias
    if kind == "moe":
        return NemotronHMoE(config)
    if kind == "mlp":
        return NemotronHMLP(d, config.intermediate_size, config.mlp_hidden_act, config.mlp_bias)
    if kind == "full_attention":
        heads, kv_heads = config.num_attention_heads, config.kv_heads
        return nn.Attention(d, heads, kv_heads, config.head_dim, rotated=False)
    eps, limits, conv_bias = config.layer_norm_epsilon, (config.time_step_min, math.inf), config.use_conv_bias
    return nn.Mamba2Mixer(d, config.sizes, eps, bias=bias, conv_bias=conv_bias, limits=limits)


class NemotronHBlock(nn.Module):
    def __init__(self, config: Config, kind: str) -> None:
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.layer_norm_epsilon, bias=False)
        self.mixer = mixer(config, kind)
        self.kind = kind

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.norm(x_BSD)
        if self.kind == "full_attention":
            return x_BSD + self.mixer(y_BSD, None, cache)
        return x_BSD + (self.mixer(y_BSD, cache) if self.kind == "linear_attention" else self.mixer(y_BSD))


class NemotronHModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [NemotronHBlock(config, kind) for kind in config.kinds]
        self.norm_f = nn.RMSNorm(config.hidden_size, -1, config.layer_norm_epsilon, bias=False)
        self.places = {layer: i for i, layer in enumerate(config.kept)}

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.embeddings(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cache[self.places[i]] if i in self.places else None)
        return self.norm_f(x_BSD)


class NemotronHForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.backbone = NemotronHModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.backbone(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return NemotronHForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    linear = spec.Layer(per_sequence=config.sizes.state(config.dtype))
    full = spec.KV(config.kv_heads, config.head_dim, config.dtype)
    layers = [full if config.kinds[i] == "full_attention" else linear for i in config.kept]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=8,
    n_routed_experts=4,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=40,
    max_position_embeddings=256,
)
