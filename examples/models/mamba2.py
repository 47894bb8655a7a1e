# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a state space model without attention, whose heads share their rates.

Source: transformers' `modeling_mamba2.py` (5.x), whose attribute names are the checkpoint's. Rates are derived of A_log, in float32.

Sizes: B batch, S seq, D hidden_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("num_heads", "n_groups", "vocab_size")
    model_types: ClassVar = {"mamba2": {}}
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    unused: ClassVar = {
        "chunk_size": "how many tokens are computed at once, which changes their rounding alone",
        "expand": "it is num_heads * head_dim over hidden_size",
        "rescale_prenorm_residual": "how weights begin",
        "time_step_floor": "how weights begin",
        "time_step_max": "how weights begin",
        "time_step_min": "how weights begin",
        "time_step_rank": "transformers does not read it",
    }

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_heads: int = 128
    head_dim: int = 64
    n_groups: int = 8
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    residual_in_fp32: bool = True
    time_step_limit: Any = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = (
        1 << 20
    )  # of a text, which config.json does not say; the state is of one size whatever its length
    dtype: str = "float32"

    @property
    def limits(self) -> tuple[float, float]:
        """Of the steps."""
        return nn.step_limits(self.time_step_limit)

    @property
    def sizes(self) -> nn.Mamba2Sizes:
        return nn.Mamba2Sizes(self.num_heads, self.head_dim, self.n_groups, self.state_size, self.conv_kernel)


class Mamba2Block(nn.Module):
    def __init__(self, config: Config) -> None:
        d, eps, limits = config.hidden_size, config.layer_norm_epsilon, config.limits
        self.norm = nn.RMSNorm(d, -1, eps, bias=False)
        self.mixer = nn.Mamba2Mixer(
            d, config.sizes, eps, bias=config.use_bias, conv_bias=config.use_conv_bias, limits=limits
        )

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        return x_BSD + self.mixer(self.norm(op.astype(x_BSD, self.norm.weight.dtype)), cache)


class Mamba2Model(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Mamba2Block(config) for _ in range(config.num_hidden_layers)]
        self.norm_f = nn.RMSNorm(config.hidden_size, -1, config.layer_norm_epsilon, bias=False)
        self.residual_dtype = "float32" if config.residual_in_fp32 else config.dtype

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = op.astype(self.embeddings(tokens_BS), self.residual_dtype)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cache[i])
        return op.astype(self.norm_f(x_BSD), self.embeddings.weight.dtype)


class Mamba2ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.backbone = Mamba2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.backbone.embeddings.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.backbone(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return Mamba2ForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    layers = [spec.Layer(per_sequence=config.sizes.state(config.dtype))] * config.num_hidden_layers
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    num_heads=8,
    head_dim=16,
    n_groups=2,
    state_size=8,
    num_hidden_layers=2,
)
