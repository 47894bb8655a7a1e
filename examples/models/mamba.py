# SPDX-License-Identifier: Apache-2.0
"""Mamba: a state space model without attention.

Source: transformers' `modeling_mamba.py` (5.x), whose attribute names are the checkpoint's. Rates are derived of A_log, in float32.

Sizes: B batch, S seq, D hidden_size, I inner features, N state_size, R time_step_rank, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = ("vocab_size",)
    model_types: ClassVar = {"mamba": {}}
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    unused: ClassVar = {
        "intermediate_size": "it is hidden_size times expand",
        "rescale_prenorm_residual": "how weights begin",
        "time_step_floor": "how weights begin",
        "time_step_init_scheme": "how weights begin",
        "time_step_max": "how weights begin",
        "time_step_min": "how weights begin",
        "time_step_scale": "how weights begin",
        "use_associative_scan": "how transformers runs it",
        "use_mambapy": "how transformers runs it",
    }

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: int = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    residual_in_fp32: bool = True
    time_step_rank: int | str = "auto"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = (
        1 << 20
    )  # of a text, which config.json does not say; the state is of one size whatever its length
    dtype: str = "float32"

    @property
    def inner(self) -> int:
        return self.expand * self.hidden_size

    @property
    def rank(self) -> int:
        return -(-self.hidden_size // 16) if isinstance(self.time_step_rank, str) else self.time_step_rank


class MambaMixer(nn.Module):
    def __init__(self, config: Config) -> None:
        d, inner, n, rank = config.hidden_size, config.inner, config.state_size, config.rank
        self.in_proj = nn.Linear(d, 2 * inner, config.use_bias)
        self.conv1d = nn.CausalConv(inner, config.conv_kernel, config.use_conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter([inner, n])
        self.D = nn.Parameter([inner])
        self.out_proj = nn.Linear(inner, d, config.use_bias)
        self.rates_IN = -op.exp(op.astype(self.A_log, "float32"))
        self.splits = [rank, rank + n]

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSI, gate_BSI = op.split(self.in_proj(x_BSD), 2, -1)
        x_BSI = self.conv1d(x_BSI, cache)
        step_BSR, b_BSN, c_BSN = op.split(self.x_proj(x_BSI), self.splits, -1)
        step_BSI = op.softplus(op.astype(self.dt_proj(step_BSR), "float32"))
        before_BIN = op.cache_read(cache, "ssm")
        y_BSI, last_BIN = op.selective_scan(x_BSI, step_BSI, self.rates_IN, b_BSN, c_BSN, self.D, before_BIN)
        op.cache_write(cache, "ssm", last_BIN, x_BSD.shape[1])
        return self.out_proj(y_BSI * op.silu(gate_BSI))


class MambaBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.layer_norm_epsilon, bias=False)
        self.mixer = MambaMixer(config)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        return x_BSD + self.mixer(self.norm(op.astype(x_BSD, self.norm.weight.dtype)), cache)


class MambaModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [MambaBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm_f = nn.RMSNorm(config.hidden_size, -1, config.layer_norm_epsilon, bias=False)
        self.residual_dtype = "float32" if config.residual_in_fp32 else config.dtype

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = op.astype(self.embeddings(tokens_BS), self.residual_dtype)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cache[i])
        return op.astype(self.norm_f(x_BSD), self.embeddings.weight.dtype)


class MambaForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.backbone = MambaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.backbone.embeddings.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.backbone(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return MambaForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    kept = nn.conv_state(config.inner, config.conv_kernel, config.dtype)
    kept["ssm"] = spec.Tensor([config.inner, config.state_size], "float32")
    layers = [spec.Layer(per_sequence=kept)] * config.num_hidden_layers
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(vocab_size=259, hidden_size=64, state_size=8, num_hidden_layers=2)
