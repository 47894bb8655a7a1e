# SPDX-License-Identifier: Apache-2.0
"""StarCoder 1 and SantaCoder.

Source: transformers' `modeling_gpt_bigcode.py` (5.x), whose attribute names are the checkpoint's. Differences from GPT-2: all heads share one key and value,
matrices are stored as usual.

Sizes: B batch, S seq, D n_embd, H heads, G kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"gpt_bigcode": {}}
    aliases: ClassVar = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    lacks: ClassVar = {"gpt_bigcode": (*nn.ROPE_KEYS, "head_dim")}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS}
    unused: ClassVar = {
        **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), "rounding"),
        **dict.fromkeys(
            (
                "inference_runner",
                "max_batch_size",
                "max_sequence_length",
                "pad_key_length",
                "pre_allocate_kv_cache",
                "n_ctx",
                "validate_runner_input",
            ),
            "how it was run",
        ),
        **dict.fromkeys(
            (
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
            "classification",
        ),
        "num_key_value_heads": "multi_query says it",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    activation_function: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    multi_query: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)

    @property
    def kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


class BigCodeAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        d, h, k = config.hidden_size, config.num_attention_heads, config.head_size
        inner, kv = h * k, config.kv_heads * k
        self.c_attn = nn.Linear(d, inner + 2 * kv)
        self.c_proj = nn.Linear(inner, d)
        if config.multi_query:
            nn.joined((inner, kv, kv), self.c_attn.weight, self.c_attn.bias)
        self.ordered = None
        if not config.multi_query:  # stored head by head: q, k and v of the first, of the second ...
            self.ordered = [nn.part_by_part(x, h) for x in (self.c_attn.weight, self.c_attn.bias)]
        self.head_size, self.splits = k, (inner, inner + kv)
        self.scale = k**-0.5 if config.scale_attn_weights else 1.0

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        qkv = self.c_attn(x_BSD) if self.ordered is None else op.linear(x_BSD, *self.ordered)
        parts = op.split(qkv, self.splits, -1)
        q_BSHK, k_BSGK, v_BSGK = (op.split_heads(part, self.head_size) for part in parts)
        return q_BSHK, k_BSGK, v_BSGK

    def forward(self, x_BSD: nn.Tensor, rope: None, cache: nn.CacheLayer | None) -> nn.Tensor:
        return self.c_proj(self.attend(x_BSD, rope, cache))


class BigCodeBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = BigCodeAttention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = nn.MLP(
            config.hidden_size, config.intermediate_size, config.activation_function, names=("c_fc", "c_proj")
        )

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), None, cache)
        return x_BSD + self.mlp(self.ln_2(x_BSD))


class BigCodeModel(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.wte = nn.Embedding(config.vocab_size, d)
        self.wpe = nn.Embedding(config.max_position_embeddings, d)
        self.h = [BigCodeBlock(config) for _ in range(config.num_hidden_layers)]
        self.ln_f = nn.LayerNorm(d, eps)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.wte(tokens_BS) + self.wpe(op.positions(tokens_BS, cache))
        for i, block in enumerate(self.h):
            x_BSD = block(x_BSD, cache[i])
        return self.ln_f(x_BSD)


class BigCodeForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.transformer = BigCodeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.transformer(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return BigCodeForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
)
