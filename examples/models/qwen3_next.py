# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets, every few layers gated attention, and mixtures of experts.

Source: transformers' `modeling_qwen3_next.py` (5.x), whose attribute names are the checkpoint's. What a delta net projects is stored by heads of keys, and multiplied in
the order in which it is used (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

IGNORED = ("mtp.*",)  # a head that guesses further tokens, where that is asked for


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"qwen3_next": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "layer_types": ("linear_attention", "full_attention"),
    }
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}
    divided: ClassVar = (
        *nn.USUALLY_DIVIDED,
        "linear_num_key_heads",
        "linear_num_value_heads",
        "shared_expert_intermediate_size",
    )

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 128
    linear_num_value_heads: int = 32
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None
    num_experts: int = field(default=512, metadata={"min": 0})
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is a delta net."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "linear_attention"
        return (layer + 1) % self.full_attention_interval != 0

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        is_step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return is_step and layer not in self.mlp_only_layers

    @property
    def sizes(self) -> nn.DeltaSizes:
        return nn.DeltaSizes(
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )


class Qwen3NextGatedDeltaNet(nn.GatedDeltaNet):
    def __init__(self, config: Config) -> None:
        d, sizes = config.hidden_size, config.sizes
        super().__init__(d, sizes, config.rms_norm_eps)
        self.in_proj_qkvz = nn.Linear(d, sizes.channels + sizes.values, bias=False)
        self.in_proj_ba = nn.Linear(d, 2 * sizes.heads, bias=False)
        k, each = sizes.key_size, sizes.heads // sizes.key_heads  # heads of values for one of keys
        v = each * sizes.value_size
        qkvz = op.reshape(self.in_proj_qkvz.weight, (sizes.key_heads, 2 * k + 2 * v, d))
        ba = op.reshape(self.in_proj_ba.weight, (sizes.key_heads, 2 * each, d))
        parts = [*op.split(qkvz, [k, 2 * k, 2 * k + v], 1), *op.split(ba, 2, 1)]
        self.weight = op.concat([op.reshape(part, (-1, d)) for part in parts], 0)


class Qwen3NextSparseMoeBlock(nn.MixtureOfExperts):
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


class Qwen3NextDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear = config.is_linear(index)
        if self.is_linear:
            self.linear_attn = Qwen3NextGatedDeltaNet(config)
        else:
            heads, kv_heads, k = config.num_attention_heads, config.kv_heads, config.head_size
            self.self_attn = nn.GatedAttention(d, heads, kv_heads, k, eps, config.attention_bias)
        self.mlp = (
            Qwen3NextSparseMoeBlock(config)
            if config.is_sparse(index)
            else nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False, offset=1.0)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False, offset=1.0)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        y_BSD = self.linear_attn(y_BSD, cache) if self.is_linear else self.self_attn(y_BSD, rope, cache)
        x_BSD = x_BSD + y_BSD
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Qwen3NextMTP(nn.Module):
    """A layer with attention, which guesses the token behind the next; the model's embedding and head are its too."""

    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            nn.RMSNorm(d, -1, eps, bias=False, offset=1.0) for _ in range(3)
        )
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = [Qwen3NextDecoderLayer(replace(config, layer_types=("full_attention",)), 0)]

    def draft(
        self, embedded_BSD: nn.Tensor, hidden_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer
    ) -> nn.Tensor:
        both = [self.pre_fc_norm_embedding(embedded_BSD), self.pre_fc_norm_hidden(hidden_BSD)]
        return self.norm(self.layers[0](self.fc(op.concat(both, -1)), rope, cache))

    def read(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return x_BSD


class Qwen3NextMultiTokenLM(nn.MultiTokenLM):
    def __init__(self, lm: nn.CausalLM, config: Config) -> None:
        super().__init__(lm, spec.KV(config.kv_heads, config.head_size, config.dtype))
        self.mtp = Qwen3NextMTP(config)

    def mtp_head(self) -> Qwen3NextMTP:
        return self.mtp


def build(config: Config) -> nn.CausalLM:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [Qwen3NextDecoderLayer(config, i) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False, offset=1.0),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


def build_mtp(config: Config) -> nn.MultiTokenLM:
    """Return the model with the head that guesses the token behind the next."""
    with nn.default_dtype(config.dtype):
        return Qwen3NextMultiTokenLM(build(config), config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    linear = spec.Layer(per_sequence=config.sizes.state(config.dtype))
    full = spec.KV(config.kv_heads, config.head_size, config.dtype)
    layers = [linear if config.is_linear(i) else full for i in range(config.num_hidden_layers)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_num_value_heads=4,
    linear_value_head_dim=8,
    full_attention_interval=2,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
