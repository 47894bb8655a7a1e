# SPDX-License-Identifier: Apache-2.0
"""StableLM.

Source: transformers' `modeling_stablelm.py` (5.x), whose attribute names are the checkpoint's. Differences from Llama: layer norms; a quarter of each head is
rotated; heads of q and k may be normalised, each by weights of its own; both parts of a layer may read the same norm.

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

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"stablelm": {}}
    lacks: ClassVar = {"stablelm": ("head_dim",)}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}

    vocab_size: int = 50304
    hidden_size: int = 2560
    intermediate_size: int = 6912
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class HeadNorms(nn.Module):
    """A layer norm for each head."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        self.norms = [nn.LayerNorm(size, eps, bias=False) for _ in range(heads)]
        self.weight_HK = op.stack([norm.weight for norm in self.norms], 0)
        self.size, self.eps = size, eps

    def forward(self, x_BSHK: nn.Tensor) -> nn.Tensor:
        return op.layer_norm(x_BSHK, (self.size,), None, None, self.eps) * self.weight_HK


class StableLmAttention(nn.Attention):
    def __init__(self, config: Config) -> None:
        h, g, k = config.num_attention_heads, config.kv_heads, config.head_size
        super().__init__(config.hidden_size, h, g, k, config.use_qkv_bias, out_bias=False)
        self.q_layernorm = HeadNorms(h, k, config.layer_norm_eps) if config.qk_layernorm else nn.Identity()
        self.k_layernorm = HeadNorms(g, k, config.layer_norm_eps) if config.qk_layernorm else nn.Identity()

    def project(self, x_BSD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor, nn.Tensor]:
        q_BSHK, k_BSGK, v_BSGK = super().project(x_BSD)
        return self.q_layernorm(q_BSHK), self.k_layernorm(k_BSGK), v_BSGK


class StableLmDecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.self_attn = StableLmAttention(config)
        self.mlp = nn.GatedMLP(d, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(d, config.layer_norm_eps)
        self.parallel = config.use_parallel_residual
        self.post_attention_layernorm = None if self.parallel else nn.LayerNorm(d, config.layer_norm_eps)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None) -> nn.Tensor:
        y_BSD = self.input_layernorm(x_BSD)
        x_BSD = x_BSD + self.self_attn(y_BSD, rope, cache)
        return x_BSD + self.mlp(y_BSD if self.parallel else self.post_attention_layernorm(x_BSD))


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = nn.Decoder(
            nn.Embedding(config.vocab_size, config.hidden_size),
            [StableLmDecoderLayer(config) for _ in range(config.num_hidden_layers)],
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps),
            nn.RotaryEmbedding(config.head_size, config.rope_parameters, config.max_position_embeddings),
        )
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


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
