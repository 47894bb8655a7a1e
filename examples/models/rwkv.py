# SPDX-License-Identifier: Apache-2.0
"""RWKV, version 4: averages over all tokens, faded by channel, in the place of attention.

Source: transformers' `modeling_rwkv.py` (5.x), whose attribute names are the checkpoint's. Averages are a loop over tokens with carried values.

Sizes: B batch, S seq, D hidden_size, A attention_hidden_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

PREFIXES = {"head.": "lm_head."}  # `head` is what computes logits of what a model hides


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"rwkv": {}}
    aliases: ClassVar = {"context_length": "max_position_embeddings"}

    vocab_size: int = 50277
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    attention_hidden_size: int | None = None
    intermediate_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = field(default=6, metadata={"min": -1})
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1024
    dtype: str = "float32"

    @property
    def averaged(self) -> int:
        return self.attention_hidden_size or self.hidden_size

    @property
    def inner(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def halvings(self, layers: int) -> int:
        """How often what is computed has been halved behind so many layers, lest half types overflow."""
        return layers // self.rescale_every if self.rescale_every > 0 else 0


def kept(cache: nn.CacheLayer | None, name: str, like_BD: nn.Tensor, size: int, dtype: str) -> nn.Tensor:
    """What a layer keeps under a name, zeros where it keeps nothing."""
    state = op.cache_read(cache, name)
    return op.zeros((like_BD.shape[0], size), dtype) if state is None else state


def shift(x_BSD: nn.Tensor, cache: nn.CacheLayer | None, name: str) -> nn.Tensor:
    """For each token the one before it; the last one is kept."""
    _, s, d = x_BSD.shape
    before_BD = kept(cache, name, x_BSD, d, x_BSD.dtype)
    op.cache_write(cache, name, x_BSD[:, -1], s)
    return op.concat([op.unsqueeze(before_BD, 1), x_BSD[:, :-1]], 1)


def mix(x_BSD: nn.Tensor, before_BSD: nn.Tensor, share: nn.Tensor) -> nn.Tensor:
    return x_BSD * share + before_BSD * (1 - share)


class RwkvSelfAttention(nn.Module):
    def __init__(self, config: Config, scale: float) -> None:
        d, a = config.hidden_size, config.averaged
        self.time_decay, self.time_first = nn.Parameter([a]), nn.Parameter([a])
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (
            nn.Parameter([1, 1, d]) for _ in range(3)
        )
        self.key, self.value, self.receptance = (nn.Linear(d, a, bias=False) for _ in range(3))
        self.output = nn.Linear(a, d, bias=False)
        self.rates_A = -op.exp(op.astype(self.time_decay, "float32"))
        self.bonus_A = op.astype(self.time_first, "float32")
        self.weight = self.output.weight * scale

    def averages(self, k_BSA: nn.Tensor, v_BSA: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        """Averages of the values up to each token, weighted by exp(key) and how long ago they were: sums are kept divided by exp(top)."""

        def step(sums: tuple[nn.Tensor, ...], token: tuple[nn.Tensor, nn.Tensor]) -> Any:
            (above, below, top), (k, v) = sums, token
            now = op.maximum(top, k + self.bonus_A)
            old, new = op.exp(top - now), op.exp(k + self.bonus_A - now)
            y = (old * above + new * v) / (old * below + new)
            faded = top + self.rates_A
            top = op.maximum(faded, k)
            old, new = op.exp(faded - top), op.exp(k - top)
            return (old * above + new * v, old * below + new, top), y

        size, names = k_BSA.shape[-1], ("above", "below", "top")
        above, below, top = (kept(cache, name, k_BSA, size, "float32") for name in names)
        sums = above, below, op.where(below > 0.0, top, -1e38)  # of no tokens the top is below all
        tokens = op.astype(k_BSA, "float32"), op.astype(v_BSA, "float32")
        sums, y_BSA = op.scan(step, sums, tokens, axis=1)
        for name, state in zip(names, sums, strict=True):
            op.cache_write(cache, name, state, k_BSA.shape[1])
        return op.astype(y_BSA, v_BSA.dtype)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        before_BSD = shift(x_BSD, cache, "attention_token")
        k_BSA = self.key(mix(x_BSD, before_BSD, self.time_mix_key))
        v_BSA = self.value(mix(x_BSD, before_BSD, self.time_mix_value))
        gate_BSA = op.sigmoid(self.receptance(mix(x_BSD, before_BSD, self.time_mix_receptance)))
        return op.linear(gate_BSA * self.averages(k_BSA, v_BSA, cache), self.weight)


class RwkvFeedForward(nn.Module):
    def __init__(self, config: Config, scale: float) -> None:
        d, inner = config.hidden_size, config.inner
        self.time_mix_key, self.time_mix_receptance = (nn.Parameter([1, 1, d]) for _ in range(2))
        self.key = nn.Linear(d, inner, bias=False)
        self.receptance = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(inner, d, bias=False)
        self.weight = self.value.weight * scale

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        before_BSD = shift(x_BSD, cache, "feed_forward_token")
        k = op.square(op.relu(self.key(mix(x_BSD, before_BSD, self.time_mix_key))))
        gate_BSD = op.sigmoid(self.receptance(mix(x_BSD, before_BSD, self.time_mix_receptance)))
        return gate_BSD * op.linear(k, self.weight)


class RwkvBlock(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps = config.hidden_size, config.layer_norm_epsilon
        scale = 0.5 ** config.halvings(index)
        self.pre_ln = nn.LayerNorm(d, eps) if index == 0 else nn.Identity()
        self.ln1, self.ln2 = nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)
        self.attention = RwkvSelfAttention(config, scale)
        self.feed_forward = RwkvFeedForward(config, scale)

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = self.pre_ln(x_BSD)
        x_BSD = x_BSD + self.attention(self.ln1(x_BSD), cache)
        return x_BSD + self.feed_forward(self.ln2(x_BSD), cache)


class RwkvModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = [RwkvBlock(config, i) for i in range(config.num_hidden_layers)]
        self.ln_out = nn.LayerNorm(config.hidden_size)
        self.halvings = [config.halvings(i) for i in range(config.num_hidden_layers + 1)]

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        x_BSD = self.embeddings(tokens_BS)
        for i, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, cache[i])
            if self.halvings[i + 1] > self.halvings[i]:
                x_BSD = x_BSD * 0.5
        return self.ln_out(x_BSD)


class RwkvForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        self.rwkv = RwkvModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.rwkv.embeddings.weight

    def hidden(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.rwkv(tokens_BS, cache)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return RwkvForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `logits` of a whole text, `prefill` and `decode` over a state."""
    token, sums = spec.Tensor([config.hidden_size], config.dtype), spec.Tensor([config.averaged], "float32")
    tokens = {"attention_token": token, "feed_forward_token": token}
    layer = spec.Layer(per_sequence={**tokens, "above": sums, "below": sums, "top": sums})
    return nn.causal_lm_spec(spec.State([layer] * config.num_hidden_layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259, hidden_size=64, num_hidden_layers=2, rescale_every=1, max_position_embeddings=256
)
