# SPDX-License-Identifier: Apache-2.0
"""What CUDA does row by row: norms, with a sum before them or not, softmax, gated activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.kernel import Context, Kernel
from nnfront.dims import same
from nnfront.ir import TensorType
from nnfront.lower import Run


def _is_like(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and a.ndim == b.ndim and all(map(same, a.shape, b.shape))


def _norm_accepts(run: Run, context: Context, x: TensorType, vectors: Mapping[str, int]) -> str:
    """Why the kernel of a norm cannot take rows of x with these weights; "" if it can."""
    attrs = run.attrs
    last = attrs.get("axes") == (x.ndim - 1,) or attrs.get("normalized_shape") == x.shape[-1:]
    size = x.shape[-1]
    if not last or not isinstance(size, int):
        return "it is not over the last axis alone, of a known size"
    module = kernel_module("layer_norm" if "normalized_shape" in attrs else "rms_norm")
    for name, slot in vectors.items():
        if not context.is_none(slot) and context.tensor(slot).dtype not in module.DTYPES:
            return f"the {name} is {context.tensor(slot).dtype}"
    return asked("rms_norm", kernel_module("rms_norm").NormShape(1, size), x.dtype, context)


def rms_norm_accepts(run: Run, context: Context) -> str:
    """Why the kernel of an RMS norm cannot run a call; "" if it can."""
    x, weight, bias = run.inputs
    if not context.is_none(bias):
        return "it has a bias"
    return _norm_accepts(run, context, context.tensor(x), {"weight": weight})


def _layer_norm_accepts(run: Run, context: Context) -> str:
    x, weight, bias = run.inputs
    return _norm_accepts(run, context, context.tensor(x), {"weight": weight, "bias": bias})


def _norm_of_sum(run: Run, context: Context) -> str:
    x, residual, weight, bias = run.inputs
    if context.is_none(x) or context.is_none(residual):
        return "it is no sum of two tensors"
    y, *operands = (context.tensor(slot) for slot in (run.outputs[0], x, residual))
    if not all(_is_like(operand, y) for operand in operands):
        return "an operand of the sum is broadcast or converted"
    if "normalized_shape" not in run.attrs and not context.is_none(bias):
        return "the norm has a bias"
    return _norm_accepts(run, context, y, {"weight": weight, "bias": bias})


def _softmax_accepts(run: Run, context: Context) -> str:
    x = context.tensor(run.inputs[0])
    if run.attrs.get("axis") != x.ndim - 1:
        return "it is not over the last axis"
    size = x.shape[-1]
    shape = kernel_module("softmax").SoftmaxShape(1, size if isinstance(size, int) else 1)
    return asked("softmax", shape, x.dtype, context)


def activation_name(attrs: Mapping[str, Any]) -> str:
    """What kernels call the activation that a region's attributes name."""
    activation: str = attrs["activation"]
    return f"{activation}_{attrs['approximate']}" if attrs.get("approximate") else activation


def _gated_accepts(run: Run, context: Context) -> str:
    gate, up = run.inputs
    y = context.tensor(gate)
    if not _is_like(context.tensor(up), y):
        return "an operand is broadcast or converted"
    module = kernel_module("gated_activation")
    if activation_name(run.attrs) not in module.ACTIVATIONS:
        return f"there is no {activation_name(run.attrs)} in the kernel"
    if not y.ndim:
        return "it has no rows"
    size = y.shape[-1]
    shape = module.GatedShape(1, size if isinstance(size, int) else 1)
    return asked("gated_activation", shape, y.dtype, context)


_ONE_PASS = "each row in one pass, statistics in float32"
_SUM = "the sum is read once: it is written and normalised in one pass"
_ONE_READ = "gate and up read once, no intermediate"


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


def _launching(run: Run) -> Callable[..., Any]:
    """The kernel of a norm with its epsilon, for rows, a weight and a bias, which only a layer norm has."""
    is_layer_norm = "normalized_shape" in run.attrs
    kernel = kernel_module("layer_norm" if is_layer_norm else "rms_norm")
    eps = run.attrs.get("eps" if is_layer_norm else "epsilon", 1e-5)

    def launch(rows: torch.Tensor, *vectors: torch.Tensor | None, **options: Any) -> Any:
        dense = [None if vector is None else vector.contiguous() for vector in vectors]
        return kernel.launch(rows, *dense[: 1 + is_layer_norm], eps=eps, **options)

    return launch


def _norm(run: Run) -> Callable[..., Any]:
    launch = _launching(run)

    def triton_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        (rows,) = _rows(x)
        y: torch.Tensor = launch(rows, weight, bias)
        return y.view(x.shape)

    return triton_norm


def _norm_residual(run: Run) -> Callable[..., Any]:
    """The norm of x + residual, and the sum too where others read it."""
    launch, has_sum = _launching(run), len(run.outputs) == 2

    def triton_norm_residual(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Any:
        rows, added = _rows(x, residual)
        s, y = launch(rows, weight, bias, residual=added)
        return (y.view(x.shape), s.view(x.shape)) if has_sum else y.view(x.shape)

    return triton_norm_residual


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


KERNELS = (
    Kernel("triton_norm_residual", "norm_residual", _norm_residual, _SUM, _norm_of_sum),
    Kernel("triton_rms_norm", "rms_norm", _norm, _ONE_PASS, rms_norm_accepts),
    Kernel("triton_layer_norm", "layer_norm", _norm, _ONE_PASS, _layer_norm_accepts),
    Kernel("triton_softmax", "softmax", _softmax, _ONE_PASS, _softmax_accepts),
    Kernel("triton_gated_activation", "gated_activation", _gated_activation, _ONE_READ, _gated_accepts),
)
