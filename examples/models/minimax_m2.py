# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: norms over all heads of q and of k, a part of each head rotated, and a mixture of experts in each layer.

Source: transformers' `modeling_minimax_m2.py` (5.x), whose checkpoint names these are (w1 is gate, w3 up, w2 down). Experts, stored one by one, are
stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_attention_heads", "num_key_value_heads", "vocab_size")
    model_types: ClassVar = {"minimax_m2": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {
        "hidden_act": nn.EXPERT_ACTIVATIONS,
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "attn_type_list": (1,),
    }
    unused: ClassVar = {
        "router_jitter_noise": "noise in training",
        "use_mtp": "layers that predict further tokens are not run",
        "num_mtp_modules": "it takes use_mtp",
        "mtp_transformer_layers": "it takes use_mtp",
    }
    rope_defaults: ClassVar = {"rope_theta": 5e6}

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    rotary_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 196608
    rms_norm_eps: float = 1e-6
    num_local_experts: int = 256
    num_experts_per_tok: int = 8

    @property
    def rotation(self) -> dict[str, Any]:
        """The rotary parameters, with the part of a head that turns as the released checkpoints say it."""
        part = {} if self.rotary_dim is None else {"partial_rotary_factor": self.rotary_dim / self.head_size}
        return {**part, **self.rope_parameters}


class MiniMaxM2Attention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, kv_heads, k = config.num_attention_heads, config.kv_heads, config.head_size
        super().__init__(config.hidden_size, heads, kv_heads, k)
        self.q_norm = nn.RMSNorm(heads * k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(kv_heads * k, -1, config.rms_norm_eps, bias=False)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q, k, v = self.qkv(x_BSD)
        parts = self.q_norm(q), self.k_norm(k), v
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSGK, v_BSGK


class MiniMaxM2SparseMoeBlock(nn.Module):
    """Sigmoids as scores, which a bias corrects where they are compared."""

    def __init__(self, config: Config) -> None:
        d, e, names = config.hidden_size, config.num_local_experts, ("w1", "w3", "w2")
        self.gate = nn.Linear(d, e, bias=False)
        self.e_score_correction_bias = nn.Parameter([e], "float32")
        self.experts = nn.Experts(e, d, config.intermediate_size, config.hidden_act, names)
        self.chosen = config.num_experts_per_tok

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD, bias = op.reshape(x_BSD, (-1, x_BSD.shape[-1])), self.e_score_correction_bias
        scores_TE = op.sigmoid(op.astype(self.gate(x_TD), "float32"))
        chosen_TC, weights_TC = nn.top_experts(scores_TE, self.chosen, bias=bias, normalized=True)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC), x_BSD.shape)


class MiniMaxM2DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = MiniMaxM2Attention(config)
        self.block_sparse_moe = MiniMaxM2SparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, cache)
        return x_BSD + self.block_sparse_moe(self.post_attention_layernorm(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [MiniMaxM2DecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rotation, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
