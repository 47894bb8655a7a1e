# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA that work row by row. `nnfront.backends.cuda.rowwise_rules` says when each is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.cuda.rowwise_rules import activation_name
from nnfront.lower import Run


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, size] with adjacent elements in a row, a copy only where it must be one."""
    size = x.shape[-1]
    rows = x.reshape(x.numel() // max(size, 1), size)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one shape as matrices; as [tokens, heads, size] if they have heads and one of them is part of something wider."""
    x = tensors[0]
    if x.ndim < 3 or not x.numel() or all(t.is_contiguous() for t in tensors):
        return [_matrix(t) for t in tensors]
    heads = [t.reshape(-1, *x.shape[-2:]) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in heads]


def _rms_norm(run: Run) -> Callable[..., Any]:
    kernel, eps = kernel_module("rms_norm"), run.attrs.get("epsilon", 1e-5)

    def triton_rms_norm(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        (rows,) = _rows(x)
        y: torch.Tensor = kernel.launch(rows, weight.contiguous(), eps=eps)
        return y.view(x.shape)

    return triton_rms_norm


def _layer_norm(run: Run) -> Callable[..., Any]:
    kernel, eps = kernel_module("layer_norm"), run.attrs.get("eps", 1e-5)

    def triton_layer_norm(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        (rows,) = _rows(x)
        y: torch.Tensor = kernel.launch(rows, _dense(weight), _dense(bias), eps=eps)
        return y.view(x.shape)

    return triton_layer_norm


def _norm_residual(run: Run) -> Callable[..., Any]:
    """The norm of x + residual, and the sum too where others read it."""
    is_layer_norm, has_sum = "normalized_shape" in run.attrs, len(run.outputs) == 2
    kernel = kernel_module("layer_norm" if is_layer_norm else "rms_norm")
    eps = run.attrs.get("eps" if is_layer_norm else "epsilon", 1e-5)

    def triton_norm_residual(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Any:
        rows, added = _rows(x, residual)
        vectors = (_dense(weight), _dense(bias)) if is_layer_norm else (_dense(weight),)
        s, y = kernel.launch(rows, *vectors, eps=eps, residual=added)
        return (y.view(x.shape), s.view(x.shape)) if has_sum else y.view(x.shape)

    return triton_norm_residual


def _dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


def _softmax(run: Run) -> Callable[..., Any]:
    kernel = kernel_module("softmax")

    def triton_softmax(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = kernel.launch(_matrix(x))
        return y.view(x.shape)

    return triton_softmax


def _gated_activation(run: Run) -> Callable[..., Any]:
    kernel, activation = kernel_module("gated_activation"), activation_name(run.attrs)

    def triton_gated_activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = kernel.launch(_matrix(gate), _matrix(up), activation=activation)
        return y.view(gate.shape)

    return triton_gated_activation


KERNELS: dict[str, Callable[[Run], Callable[..., Any]]] = {
    "triton_rms_norm": _rms_norm,
    "triton_layer_norm": _layer_norm,
    "triton_norm_residual": _norm_residual,
    "triton_softmax": _softmax,
    "triton_gated_activation": _gated_activation,
}
