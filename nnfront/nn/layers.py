# SPDX-License-Identifier: Apache-2.0
"""The usual layers. Signatures follow TVM's `relax.frontend.nn`; parameter names and layouts are torch's, as in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfront.dims import Dim, Size, to_size
from nnfront.nn.functional import op
from nnfront.nn.module import Module
from nnfront.nn.parameter import Parameter
from nnfront.nn.tensor import Tensor
from nnfront.ops.rules import dtype_name

SizeLike = int | str | Dim


class Identity(Module):
    """Returns its argument."""

    def forward(self, x: Any) -> Any:
        """x."""
        return x


class Dropout(Identity):
    """Returns its argument: dropping is for training. `p` is kept so that configurations carry over."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return op.relu(x)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return op.silu(x)


class GELU(Module):
    """x * Phi(x); `approximate="tanh"` for the tanh form."""

    def __init__(self, approximate: str | None = None) -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return op.gelu(x, self.approximate)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return op.sigmoid(x)


class Tanh(Module):
    """tanh(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return op.tanh(x)


class Softmax(Module):
    """exp(x) over its sum along `axis`."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Along one axis."""
        return op.softmax(x, self.axis)


class Linear(Module):
    """x @ weight^T + bias. weight [out_features, in_features], bias [out_features].

    `out_dtype`: dtype of the result, in which the product is summed; that of x if None.
    """

    def __init__(
        self,
        in_features: SizeLike,
        out_features: SizeLike,
        bias: bool = True,
        dtype: str | None = None,
        out_dtype: str | None = None,
    ) -> None:
        self.in_features = to_size(in_features)
        self.out_features = to_size(out_features)
        self.out_dtype = None if out_dtype is None else dtype_name(out_dtype)
        self.weight = Parameter((self.out_features, self.in_features), dtype)
        self.bias = Parameter((self.out_features,), self.out_dtype or dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.out_dtype is None:
            return op.linear(x, self.weight, self.bias)
        y = op.matmul(x, op.permute_dims(self.weight), self.out_dtype)
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """Rows of a table. weight [num, dim]."""

    def __init__(self, num: SizeLike, dim: SizeLike, dtype: str | None = None) -> None:
        self.num = to_size(num)
        self.dim = to_size(dim)
        self.weight = Parameter((self.num, self.dim), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Integers [...] to [..., dim]."""
        return op.take(self.weight, x, 0)


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) over the last axes. weight and bias [normalized_shape] if `elementwise_affine`."""

    def __init__(
        self,
        normalized_shape: SizeLike | Sequence[SizeLike],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        dtype: str | None = None,
        bias: bool = True,
    ) -> None:
        sizes = [normalized_shape] if isinstance(normalized_shape, (int, str, Dim)) else normalized_shape
        self.normalized_shape: tuple[Size, ...] = tuple(to_size(s) for s in sizes)
        self.eps = 1e-5 if eps is None else eps
        self.elementwise_affine = elementwise_affine
        self.weight = Parameter(self.normalized_shape, dtype) if elementwise_affine else None
        self.bias = Parameter(self.normalized_shape, dtype) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays."""
        return op.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + epsilon) * (offset + weight) + bias over `axes`. weight and bias [hidden_size].

    With an offset what x is multiplied by is derived of the weight, in float32.
    """

    def __init__(
        self,
        hidden_size: SizeLike,
        axes: int | Sequence[int] = -1,
        epsilon: float = 1e-5,
        bias: bool = True,
        dtype: str | None = None,
        offset: float = 0.0,
    ) -> None:
        self.axes = axes if isinstance(axes, int) else tuple(axes)
        self.epsilon = epsilon
        self.weight = Parameter((hidden_size,), dtype)
        self.factor = op.astype(self.weight, "float32") + offset if offset else None
        self.bias = Parameter((hidden_size,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays."""
        weight = self.weight if self.factor is None else self.factor
        return op.rms_norm(x, weight, self.axes, self.epsilon, self.bias)


class GroupNorm(Module):
    """Normalise groups of channels of [batch, channels, ...]. weight and bias [channels] if `affine`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: SizeLike,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: str | None = None,
    ) -> None:
        self.num_groups = num_groups
        self.num_channels = to_size(num_channels)
        self.eps = eps
        self.weight = Parameter((self.num_channels,), dtype) if affine else None
        self.bias = Parameter((self.num_channels,), dtype) if affine else None

    def forward(self, x: Tensor, channel_axis: int = 1, axes: Sequence[int] | None = None) -> Tensor:
        """The shape stays. `axes` defaults to all after the channels."""
        return op.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, channel_axis, axes)
