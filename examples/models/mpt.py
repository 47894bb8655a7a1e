# SPDX-License-Identifier: Apache-2.0
"""MPT.

Source: transformers' `modeling_mpt.py` (5.x), whose attribute names are the checkpoint's. Layer norms without biases, no biases at all; positions are what ALiBi adds to
scores; q, k and v are stored as one, and may be clipped.

Sizes: B batch, S seq, D d_model, H heads, K head size, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op

_ATTENTION = {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"mpt": {}}
    aliases: ClassVar = {
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    }
    lacks: ClassVar = {"mpt": (*nn.ROPE_KEYS, "head_dim", "num_key_value_heads", "intermediate_size")}
    only: ClassVar = {"expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (None,)}
    unused: ClassVar = {
        **dict.fromkeys(
            ("emb_pdrop", "init_device", "init_config", "embedding_fraction", "tokenizer_name", "verbose"),
            "training",
        ),
        "learned_pos_emb": "positions are ALiBi's",
        "norm_type": "its norms differ in rounding",
    }

    vocab_size: int = 50368
    hidden_size: int = 2048
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    attn_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        for key, value in _ATTENTION.items():
            if self.attn_config.get(key, value) != value:
                raise nn.errors.LoadError(
                    f"attn_config has {key} {self.attn_config[key]!r}, expected {value!r}"
                )


class MptAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, inner = config.hidden_size, config.num_attention_heads * config.head_size
        self.Wqkv = nn.Linear(d, 3 * inner, bias=False)
        nn.joined((inner, inner, inner), self.Wqkv.weight)
        self.out_proj = nn.Linear(inner, d, bias=False)
        self.clip, self.scale = config.attn_config.get("clip_qkv"), config.attn_config.get("softmax_scale")
        self.head_size, self.splits = config.head_size, (inner, 2 * inner)

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        qkv = self.Wqkv(x_BSD)
        parts = op.split(op.clip(qkv, -self.clip, self.clip) if self.clip else qkv, self.splits, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSHK, v_BSHK

    def forward(self, x_BSD: nn.Tensor, alibi_1H1T: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.out_proj(self.attend(x_BSD, None, cache, alibi_1H1T))


class MptBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm_1 = nn.LayerNorm(d, eps, bias=False)
        self.attn = MptAttention(config)
        self.norm_2 = nn.LayerNorm(d, eps, bias=False)
        self.ffn = nn.MLP(d, config.intermediate_size, "gelu", bias=False)

    def forward(self, x_BSD: nn.Tensor, alibi_1H1T: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.attn(self.norm_1(x_BSD), alibi_1H1T, cache)
        return x_BSD + self.ffn(self.norm_2(x_BSD))


class MptModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = [MptBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon, bias=False)
        self.alibi = nn.ALiBi(config.num_attention_heads)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        alibi_1H1T = self.alibi(tokens_BS, cache)
        x_BSD = self.wte(tokens_BS)
        for i, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, alibi_1H1T, cache[i])
        return self.norm_f(x_BSD)


class MptForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = MptModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return MptForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
)
