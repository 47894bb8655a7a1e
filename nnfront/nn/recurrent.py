# SPDX-License-Identifier: Apache-2.0
"""What models are made of that keep a state of a fixed size: the short convolution, the mixer of Mamba-2, gated delta nets.

Names of parameters are those of checkpoints. Each part reads and writes what it keeps in a layer of the cache, or starts from zeros where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnfront.nn import spec
from nnfront.nn.cache import CacheLayer
from nnfront.nn.functional import op
from nnfront.nn.gated import GatedRMSNorm
from nnfront.nn.layers import Linear
from nnfront.nn.module import Module
from nnfront.nn.parameter import Parameter, joined
from nnfront.nn.tensor import Tensor


class CausalConv(Module):
    """Each channel convolved with its own taps over the last tokens; a layer of the cache keeps the tokens as "conv".

    weight [channels, 1, width] and bias [channels], as torch's convolution of as many groups has them. activation: None or "silu".
    """

    def __init__(self, channels: int, width: int, bias: bool = True, activation: str | None = "silu") -> None:
        self.weight = Parameter([channels, 1, width])
        self.bias = Parameter([channels]) if bias else None
        self.taps = op.reshape(self.weight, (channels, width))
        self.activation, self.keeps = activation, width > 1

    def forward(self, x: Tensor, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, channels] to the same."""
        before = op.cache_read(cache, "conv") if self.keeps else None
        y, last = op.causal_conv1d(x, self.taps, self.bias, before, activation=self.activation)
        if self.keeps:
            op.cache_write(cache, "conv", last, x.shape[1])
        return y


def conv_state(channels: int, width: int, dtype: str) -> dict[str, spec.Tensor]:
    """Return what a `CausalConv` keeps of each sequence: nothing, if it has one tap."""
    return {"conv": spec.Tensor([channels, width - 1], dtype)} if width > 1 else {}


@dataclass(frozen=True)
class Mamba2Sizes:
    """The sizes of a Mamba-2 mixer: heads of `head_size` features, groups of heads that share b and c, `states` for each feature, taps of the convolution."""

    heads: int
    head_size: int
    groups: int
    states: int
    width: int

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """What is convolved: the features, b and c."""
        return self.inner + 2 * self.groups * self.states

    def state(self, dtype: str) -> dict[str, spec.Tensor]:
        """Return what a mixer keeps of each sequence."""
        kept = spec.Tensor([self.heads, self.head_size, self.states], "float32")
        return {**conv_state(self.channels, self.width, dtype), "ssm": kept}


class Mamba2Mixer(Module):
    """The mixer of Mamba-2. Checkpoint names: in_proj, conv1d, dt_bias, A_log, D, norm, out_proj.

    limits: of the steps dt. A class derived from it may project or gate in its own way.
    Source: Mamba-2 (arXiv 2405.21060), figure 6.
    """

    def __init__(
        self,
        size: int,
        sizes: Mamba2Sizes,
        epsilon: float,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        self.in_proj = Linear(size, sizes.inner + sizes.channels + sizes.heads, bias)
        self.conv1d = CausalConv(sizes.channels, sizes.width, conv_bias)
        mixed = sizes.inner, sizes.groups * sizes.states, sizes.groups * sizes.states
        joined((sizes.inner, *mixed, sizes.heads), self.in_proj.weight, self.in_proj.bias)
        joined(mixed, self.conv1d.weight, self.conv1d.bias)
        self.dt_bias, self.A_log, self.D = (Parameter([sizes.heads]) for _ in range(3))
        self.norm: Module = GatedRMSNorm(sizes.inner, epsilon, sizes.groups)
        self.out_proj = Linear(sizes.inner, size, bias if out_bias is None else out_bias)
        self.rates = -op.exp(op.astype(self.A_log, "float32"))
        self.sizes, self.limits = sizes, limits

    def project(self, x: Tensor) -> Tensor:
        """[batch, seq, size] to gate, features, b, c and steps, one after the other."""
        return self.in_proj(x)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """What the heads have made, [batch, seq, inner], under the gate."""
        return self.norm(y, gate)

    def forward(self, x: Tensor, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        sizes, (batch, seq, _) = self.sizes, x.shape
        gate, mixed, dt = op.split(self.project(x), [sizes.inner, sizes.inner + sizes.channels], -1)
        of_groups = sizes.inner + sizes.groups * sizes.states
        features, b, c = op.split(self.conv1d(mixed, cache), [sizes.inner, of_groups], -1)
        dt = op.softplus(op.astype(dt, "float32") + op.astype(self.dt_bias, "float32"))
        if self.limits != (0.0, math.inf):
            dt = op.clip(dt, *self.limits)
        b, c = (op.reshape(part, (batch, seq, sizes.groups, sizes.states)) for part in (b, c))
        features = op.split_heads(features, sizes.head_size)
        y, state = op.ssm_scan(features, dt, self.rates, b, c, self.D, op.cache_read(cache, "ssm"))
        op.cache_write(cache, "ssm", state, seq)
        return self.out_proj(self.gated(op.merge_heads(y), gate))


def step_limits(value: Sequence[Any] | None) -> tuple[float, float]:
    """Return config.json's `time_step_limit`, in which infinity may be written in words."""
    low, high = (float(v["__float__"] if isinstance(v, Mapping) else v) for v in value or (0.0, math.inf))
    return low, high


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a gated delta net: heads of keys, each for as many heads of values, their features, and taps of the convolution."""

    key_heads: int
    key_size: int
    heads: int
    value_size: int
    width: int

    @property
    def keys(self) -> int:
        """Features of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.heads * self.value_size

    @property
    def channels(self) -> int:
        """What is convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    def state(self, dtype: str) -> dict[str, spec.Tensor]:
        """Return what a net keeps of each sequence."""
        kept = spec.Tensor([self.heads, self.key_size, self.value_size], "float32")
        return {**conv_state(self.channels, self.width, dtype), "delta": kept}


class GatedDeltaNet(Module):
    """A gated delta net. Checkpoint names: conv1d, dt_bias, A_log, norm, out_proj, and those of the projections of a class derived from it.

    Such a class sets `weight`: rows of queries, keys, values, gates z, rates b and fadings a, in this order.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3.4.
    """

    weight: Tensor

    def __init__(self, size: int, sizes: DeltaSizes, epsilon: float) -> None:
        self.conv1d = CausalConv(sizes.channels, sizes.width, bias=False)
        joined((sizes.keys, sizes.keys, sizes.values), self.conv1d.weight)
        self.dt_bias, self.A_log = Parameter([sizes.heads]), Parameter([sizes.heads])
        self.norm = GatedRMSNorm(sizes.value_size, epsilon, gate_first=False)
        self.out_proj = Linear(sizes.values, size, bias=False)
        self.rates = -op.exp(op.astype(self.A_log, "float32"))
        self.sizes = sizes

    def forward(self, x: Tensor, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        sizes, gates = self.sizes, self.sizes.channels + self.sizes.values
        splits = [sizes.channels, gates, gates + sizes.heads]
        mixed, z, b, a = op.split(op.linear(x, self.weight), splits, -1)
        q, k, v = op.split(self.conv1d(mixed, cache), [sizes.keys, 2 * sizes.keys], -1)
        q, k = (op.split_heads(part, sizes.key_size) for part in (q, k))
        fade = self.rates * op.softplus(op.astype(a, "float32") + op.astype(self.dt_bias, "float32"))
        before = op.cache_read(cache, "delta")
        y, state = op.gated_delta_rule(
            q, k, op.split_heads(v, sizes.value_size), fade, op.sigmoid(b), before, qk_l2norm=True
        )
        op.cache_write(cache, "delta", state, x.shape[1])
        return self.out_proj(op.merge_heads(self.norm(y, op.split_heads(z, sizes.value_size))))
