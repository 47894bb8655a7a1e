# SPDX-License-Identifier: Apache-2.0
"""Activations by the names that Hugging Face's configurations use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nnfront.nn.functional import op
from nnfront.nn.tensor import Tensor


def _tanh_gelu(x: Tensor) -> Tensor:
    return op.gelu(x, "tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return op.square(op.relu(x))


def _quick_gelu(x: Tensor) -> Tensor:
    return op.multiply(x, op.sigmoid(op.multiply(x, 1.702)))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": op.silu,
    "swish": op.silu,
    "relu": op.relu,
    "relu2": _squared_relu,
    "relu6": op.relu6,
    "gelu": op.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "mish": op.mish,
    "sigmoid": op.sigmoid,
    "tanh": op.tanh,
}
"""config.json's `hidden_act` to a function of a tensor."""
