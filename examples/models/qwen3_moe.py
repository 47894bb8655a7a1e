# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: a decoder whose feed-forward layers are mixtures of experts.

Source: transformers' `modeling_qwen3_moe.py` (5.x), whose attribute names are the checkpoint's. Differences: q, k, v are stored apart and
multiplied as one; the experts' matrices, stored one by one, are stacked (derived tensors); rotary tables are computed once for all layers.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"qwen3_moe": {}}
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    only: ClassVar = {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)}
    unused: ClassVar = {
        "sliding_window": "it takes use_sliding_window",
        "max_window_layers": "it takes use_sliding_window",
    }

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=lambda: nn.rope_parameters({}))
    dtype: str = "float32"

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class QwenAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        self.heads, self.kv_heads, self.head_size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
        )
        d, q, kv = config.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        bias, eps, dtype = config.attention_bias, config.rms_norm_eps, config.dtype
        self.q_proj = nn.Linear(d, q, bias, dtype)
        self.k_proj = nn.Linear(d, kv, bias, dtype)
        self.v_proj = nn.Linear(d, kv, bias, dtype)
        self.o_proj = nn.Linear(q, d, bias, dtype)
        self.q_norm = nn.RMSNorm(self.head_size, -1, eps, bias=False, dtype=dtype)
        self.k_norm = nn.RMSNorm(self.head_size, -1, eps, bias=False, dtype=dtype)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self.qkv_weight = op.concat([p.weight for p in parts], 0)
        self.qkv_bias = op.concat([p.bias for p in parts], 0) if bias else None

    def forward(self, x_BSD: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache: Any = None) -> nn.Tensor:
        b, s, _ = x_BSD.shape
        h, g, k = self.heads, self.kv_heads, self.head_size
        qkv = op.linear(x_BSD, self.qkv_weight, self.qkv_bias)
        q, key, value = op.split(qkv, [h * k, (h + g) * k], -1)
        q_BSHK = op.rope(self.q_norm(op.reshape(q, (b, s, h, k))), cos, sin)
        key_BSGK = op.rope(self.k_norm(op.reshape(key, (b, s, g, k))), cos, sin)
        y_BSHK = op.attention(q_BSHK, key_BSGK, op.reshape(value, (b, s, g, k)), cache=cache)
        return self.o_proj(op.reshape(y_BSHK, (b, s, h * k)))


class QwenMLP(nn.Module):
    def __init__(self, config: Config, size: int) -> None:
        self.gate_proj = nn.Linear(config.hidden_size, size, False, config.dtype)
        self.up_proj = nn.Linear(config.hidden_size, size, False, config.dtype)
        self.down_proj = nn.Linear(size, config.hidden_size, False, config.dtype)
        self.gate_up_weight = op.concat([self.gate_proj.weight, self.up_proj.weight], 0)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.linear(x_BSD, self.gate_up_weight), 2, -1)
        return self.down_proj(op.silu(gate) * up)


class QwenSparseMoeBlock(nn.Module):
    """A router, and experts of which it chooses some for each token."""

    def __init__(self, config: Config) -> None:
        self.gate = nn.Linear(config.hidden_size, config.num_experts, False, config.dtype)
        self.experts = [QwenMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts)]
        self.chosen, self.normalized = config.num_experts_per_tok, config.norm_topk_prob
        self.gate_up_weight = op.stack([e.gate_up_weight for e in self.experts], 0)
        self.down_weight = op.stack([e.down_proj.weight for e in self.experts], 0)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        b, s, d = x_BSD.shape
        x_TD = op.reshape(x_BSD, (b * s, d))
        share_TE = op.softmax(op.astype(self.gate(x_TD), "float32"), -1)
        share_TC, expert_TC = op.topk(share_TE, self.chosen)
        if self.normalized:
            share_TC = share_TC / op.sum(share_TC, -1, keepdims=True)
        share_TC = op.astype(share_TC, x_TD.dtype)
        return op.reshape(
            op.moe_mlp(x_TD, self.gate_up_weight, self.down_weight, expert_TC, share_TC), (b, s, d)
        )


class QwenDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.self_attn = QwenAttention(config)
        self.mlp = (
            QwenSparseMoeBlock(config)
            if config.is_sparse(index)
            else QwenMLP(config, config.intermediate_size)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False, dtype=dtype)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False, dtype=dtype)

    def forward(self, x_BSD: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache: Any = None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos, sin, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class QwenModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)
        self.layers = [QwenDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False, dtype=config.dtype)
        self.rotary_emb = nn.RotaryEmbedding(
            config.head_size, config.rope_parameters, max_positions=config.max_position_embeddings
        )

    def forward(self, tokens_BS: nn.Tensor, cache: Any = None) -> nn.Tensor:
        _, s = tokens_BS.shape
        positions = op.reshape(op.arange(s), (1, s)) if cache is None else op.cache_positions(cache[0], s)
        cos, sin = self.rotary_emb(positions)
        x_BSD = self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cos, sin, None if cache is None else cache[i])
        return self.norm(x_BSD)


class QwenForCausalLM(nn.Module):
    def __init__(self, config: Config) -> None:
        self.model = QwenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def logits(self, tokens: nn.Tensor) -> nn.Tensor:
        """Logits of every position: [B, S] to float32 [B, S, V]."""
        return op.astype(self.lm_head(self.model(tokens)), "float32")

    def prefill(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """Append a prompt and give the logits of its last position: [B, S] to float32 [B, 1, V]."""
        return op.astype(self.lm_head(self.model(tokens, cache)[:, -1:]), "float32")

    def decode(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """Append one token to each sequence: [B, 1] to float32 [B, 1, V]."""
        return op.astype(self.lm_head(self.model(tokens, cache)), "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    return QwenForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a cache."""
    batch = nn.Dim("batch", min=1)
    seq = nn.Dim("seq", min=1, max=config.max_position_embeddings)
    cache = spec.Cache(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_size,
        config.dtype,
        batch,
        nn.Dim("max_seq", min=1, max=config.max_position_embeddings),
    )
    return {
        "logits": {"tokens": spec.Tensor([batch, seq], "int64")},
        "prefill": {"tokens": spec.Tensor([batch, seq], "int64"), "cache": cache},
        "decode": {"tokens": spec.Tensor([batch, 1], "int64"), "cache": cache},
    }


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
