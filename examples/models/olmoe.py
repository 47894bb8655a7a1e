# SPDX-License-Identifier: Apache-2.0
"""OLMoE: a decoder whose feed-forward layers are mixtures of experts, with norms over all heads of q and of k.

Source: transformers' `modeling_olmoe.py` (5.x), whose attribute names are the checkpoint's. Experts, stored one by one, are stacked (derived tensors).

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_attention_heads", "num_key_value_heads", "vocab_size")
    model_types: ClassVar = {"olmoe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {"hidden_act": nn.EXPERT_ACTIVATIONS}

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class OlmoeAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, kv_heads, k = config.num_attention_heads, config.kv_heads, config.head_size
        super().__init__(config.hidden_size, heads, kv_heads, k, config.attention_bias)
        self.q_norm = nn.RMSNorm(heads * k, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(kv_heads * k, -1, config.rms_norm_eps, bias=False)
        self.limit = config.clip_qkv

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q, k, v = self.qkv(x_BSD)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.limit is not None:
            q, k, v = (op.clip(part, -self.limit, self.limit) for part in (q, k, v))
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in (q, k, v))
        return q_BSHK, k_BSGK, v_BSGK


class OlmoeSparseMoeBlock(nn.MixtureOfExperts):
    """A router, and experts of which it chooses some for each token."""

    def __init__(self, config: Config) -> None:
        d, e, inner = config.hidden_size, config.num_experts, config.intermediate_size
        gate = nn.Router(d, e, config.num_experts_per_tok, normalized=config.norm_topk_prob)
        super().__init__(gate, nn.Experts(e, d, inner, config.hidden_act))


class OlmoeDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = OlmoeAttention(config)
        self.mlp = OlmoeSparseMoeBlock(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [OlmoeDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
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
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
