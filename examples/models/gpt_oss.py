# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention with sinks, every other layer in a window, and a mixture of experts with biases and clamped gates in each layer.

Source: transformers' `modeling_gpt_oss.py` (5.x), whose attribute names are the checkpoint's. Experts are stored as stacks that are multiplied from the right, rows of gate
and up alternating.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_attention_heads", "num_key_value_heads", "vocab_size")
    model_types: ClassVar = {"gpt_oss": {}}
    aliases: ClassVar = {
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    only: ClassVar = {"hidden_act": ("silu",)}
    unused: ClassVar = {
        "initial_context_length": "rope_parameters have it as original_max_position_embeddings"
    }
    rope_defaults: ClassVar = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


class GptOssAttention(nn.Attention):
    """Each head has a score that takes its share of the softmax and gives no value."""

    def __init__(self, config: Config, window: int | None) -> None:
        heads = config.num_attention_heads, config.kv_heads
        super().__init__(config.hidden_size, *heads, config.head_size, config.attention_bias, window=window)
        self.sinks = nn.Parameter([config.num_attention_heads])


class GptOssExperts(nn.StackedExperts):
    def __init__(self, config: Config) -> None:
        e, d, i = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj, self.gate_up_proj_bias = nn.Parameter([e, d, 2 * i]), nn.Parameter([e, 2 * i])
        self.down_proj, self.down_proj_bias = nn.Parameter([e, i, d]), nn.Parameter([e, d])
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, x_TD: nn.Tensor, chosen_TC: nn.Tensor, weights_TC: nn.Tensor) -> nn.Tensor:
        gate_up, down = (op.permute_dims(w, (0, 2, 1)) for w in (self.gate_up_proj, self.down_proj))
        return op.moe_mlp(
            x_TD,
            gate_up,
            down,
            chosen_TC,
            weights_TC,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            interleaved=True,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=1.0,
        )


class GptOssMLP(nn.Module):
    """Experts whose weights are a softmax over the logits of those that were chosen."""

    def __init__(self, config: Config) -> None:
        self.router = nn.Linear(config.hidden_size, config.num_local_experts)
        self.experts = GptOssExperts(config)
        self.chosen = config.num_experts_per_tok

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        logits_TC, chosen_TC = op.topk(self.router(x_TD), self.chosen)
        y_TD = self.experts(x_TD, chosen_TC, op.softmax(logits_TC, -1))
        return op.reshape(y_TD, x_BSD.shape)


class GptOssDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config, window: int | None) -> None:
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = GptOssAttention(config, window)
        self.mlp = GptOssMLP(config)
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [GptOssDecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)],
            nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
