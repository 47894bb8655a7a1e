# SPDX-License-Identifier: Apache-2.0
"""nanochat.

Source: transformers' `modeling_nanochat.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: norms have no weights, and one more is of the
embeddings; heads are normalised after they are rotated, the other way around; the feed-forward part has no gate; logits are capped.

Sizes: B batch, S seq, D hidden_size, H heads, G kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"nanochat": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    divided: ClassVar = nn.USUALLY_DIVIDED

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int = 8192
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0


class Norm(nn.Module):
    def __init__(self, config: Config) -> None:
        self.eps = config.rms_norm_eps

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.rms_norm(x, None, -1, self.eps)


class NanoChatAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        heads, k, bias = config.num_attention_heads, config.head_size, config.attention_bias
        super().__init__(config.hidden_size, heads, config.kv_heads, k, bias)
        self.norm = Norm(config)

    def rotate(self, q_BSHK: nn.Tensor, k_BSGK: nn.Tensor, rope: nn.Rotation) -> tuple[nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK = super().rotate(q_BSHK, k_BSGK, rope)
        return self.norm(q_BSHK), self.norm(k_BSGK)


class NanoChatDecoderLayer(nn.DecoderLayer):
    def __init__(self, config: Config) -> None:
        self.self_attn = NanoChatAttention(config)
        self.mlp = nn.MLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, False, ("fc1", "fc2")
        )
        self.input_layernorm = Norm(config)
        self.post_attention_layernorm = Norm(config)


class NanoChatModel(nn.Module):
    def __init__(self, config: Config) -> None:
        length = config.max_position_embeddings
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [NanoChatDecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = Norm(config)
        self.rotary_emb = nn.RotaryEmbedding(config.head_size, config.rope_parameters, length)

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        cos, sin = self.rotary_emb(op.positions(tokens_BS, cache))
        x_BSD, rope = self.norm(self.embed_tokens(tokens_BS)), (cos, -sin)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, rope, cache[i])
        return self.norm(x_BSD)


class NanoChatForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = NanoChatModel(config)
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.softcap = config.final_logit_softcapping

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        logits = super().head(x_BSD)
        return logits if self.softcap is None else op.tanh(logits / self.softcap) * self.softcap


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return NanoChatForCausalLM(config)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
