# SPDX-License-Identifier: Apache-2.0
"""The kernel table of CUDA for what is done row by row: norms, with a sum before them or not, softmax, gated activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.backends.select import ACCEPTED, Context, Rule
from nnfront.dims import same
from nnfront.ir import TensorType
from nnfront.lower.instructions import Run


def _is_like(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and a.ndim == b.ndim and all(map(same, a.shape, b.shape))


def _rows(run: Run, context: Context, x: TensorType, vectors: Mapping[str, int]) -> str:
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
    shape = kernel_module("rms_norm").NormShape(1, size)
    reason: str | None = module.accepts(shape, x.dtype, arch_of(context.target))
    return reason or ACCEPTED


def _rms_norm(run: Run, context: Context) -> str:
    x, weight, bias = run.inputs
    if context.is_none(weight):
        return "it has no weight"
    if not context.is_none(bias):
        return "it has a bias"
    return _rows(run, context, context.tensor(x), {"weight": weight})


def _layer_norm(run: Run, context: Context) -> str:
    x, weight, bias = run.inputs
    return _rows(run, context, context.tensor(x), {"weight": weight, "bias": bias})


def _norm_of_sum(run: Run, context: Context) -> str:
    x, residual, weight, bias = run.inputs
    if context.is_none(x) or context.is_none(residual):
        return "it is no sum of two tensors"
    y, *operands = (context.tensor(slot) for slot in (run.outputs[0], x, residual))
    if not all(_is_like(operand, y) for operand in operands):
        return "an operand of the sum is broadcast or converted"
    if "normalized_shape" not in run.attrs:
        if context.is_none(weight):
            return "the norm has no weight"
        if not context.is_none(bias):
            return "the norm has a bias"
    return _rows(run, context, y, {"weight": weight, "bias": bias})


def _softmax(run: Run, context: Context) -> str:
    x = context.tensor(run.inputs[0])
    if run.attrs.get("axis") != x.ndim - 1:
        return "it is not over the last axis"
    module = kernel_module("softmax")
    size = x.shape[-1]
    shape = module.SoftmaxShape(1, size if isinstance(size, int) else 1)
    reason: str | None = module.accepts(shape, x.dtype, arch_of(context.target))
    return reason or ACCEPTED


def activation_name(attrs: Mapping[str, Any]) -> str:
    """What kernels call the activation that a region's attributes name."""
    activation: str = attrs["activation"]
    return f"{activation}_{attrs['approximate']}" if attrs.get("approximate") else activation


def _gated(run: Run, context: Context) -> str:
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
    reason: str | None = module.accepts(shape, y.dtype, arch_of(context.target))
    return reason or ACCEPTED


_ONE_PASS = "each row in one pass, statistics in float32"
_SUM = "the sum is read once: it is written and normalised in one pass"
_GATED = "gate and up read once, no intermediate"

RULES: tuple[Rule, ...] = (
    Rule("norm_residual", "triton_norm_residual", _SUM, _norm_of_sum),
    Rule("rms_norm", "triton_rms_norm", _ONE_PASS, _rms_norm),
    Rule("layer_norm", "triton_layer_norm", _ONE_PASS, _layer_norm),
    Rule("softmax", "triton_softmax", _ONE_PASS, _softmax),
    Rule("gated_activation", "triton_gated_activation", _GATED, _gated),
)
"""Rules for rows on CUDA."""
