# SPDX-License-Identifier: Apache-2.0
"""Products of integers on a CPU (`c/int8_product.c`): weights in 8 or 4 bits with activations that are rounded to 8 bits, of any number of rows.

Shapes: x [..., columns], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups], bias [outputs].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from nnfront.backends.cpu.activations import activation, activation_number
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import by_reference, in_c, kernel
from nnfront.backends.cpu.linear import gated, gated_product_bytes
from nnfront.backends.cpu.quantized_gemv import SCALE_KINDS, stored_as
from nnfront.backends.cpu.tape_builder import (
    Operand,
    Refused,
    TapeBuilder,
    Value,
    demand,
    demand_bfloat16,
)
from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.ir import OPS, TensorType
from nnfront.lower import Run
from nnfront.lower.reference import reference
from nnfront.memory.layout import Layout
from nnfront.quant_format import FORMATS, QuantFormat


def refusal(format: QuantFormat, dtype: str) -> str:
    """Why there is no kernel for weights in a format, in integers, and x in a dtype; "" if there is one."""
    if dtype != "bfloat16":
        return f"activations are {dtype}, the kernel takes bfloat16"
    if NATIVE is None:
        return "the kernels in C are not there"
    return ACCEPTED if stored_as(format) is not None else f"no kernel for {format}"


def _product(run: Run) -> Run:
    """The product of a region, as the op by itself."""
    usual = OPS["linear_int8"].attributes
    return replace(run, op="linear_int8", attrs={name: run.attrs.get(name, usual[name]) for name in usual})


def _format(run: Run) -> QuantFormat:
    attrs = _product(run).attrs
    return replace(FORMATS[attrs["format"]], group_size=attrs["group_size"])


def _accepts(run: Run, context: Context) -> str:
    x = context.tensor(run.inputs[0])
    assert isinstance(x, TensorType)
    return refusal(_format(run), x.dtype)


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    scales: Value,
    zeros: Value | None,
    bias: Value | None,
    residual: Value | None = None,
    *,
    is_gated: bool = False,
) -> Sequence[Operand]:
    format = _format(run)
    stored, group = stored_as(format), format.group_size
    if stored is None:
        raise Refused(f"there is no kernel for {format}")
    columns, outputs = x.shape[-1], weight.shape[0] // (1 + is_gated)
    rows, groups = prod(x.shape[:-1]), columns // group if group else 1
    demand(rows > 0 and columns > 0, "there are no rows")
    demand_bfloat16(x=x, bias=bias, residual=residual)
    demand(scales.dtype in (torch.bfloat16, torch.float32), f"scales are {scales.dtype}")
    shape = (*x.shape[:-1], outputs)
    demand(residual is None or residual.shape == shape, "the residual is broadcast")
    gate = activation_number(run)
    if gate is None:
        raise Refused(f"there is no {run.attrs['activation']} in the kernel")
    y = builder.make(run.outputs[0], shape)
    sizes = stored, rows, columns, outputs, groups, SCALE_KINDS[scales.dtype], gate, builder.threads
    builder.call("multiply_int8", *sizes, weight, scales, zeros, x, bias, residual, y)
    return (y,)


def _with_gate(run: Run) -> Callable[..., Any]:
    return gated(in_c(_write, reference)(_product(run)), activation(run))


def _with_gate_bytes(run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    return by_reference(_product(run), x, weight, *others) + gated_product_bytes(run, x, weight)


def _with_residual(run: Run) -> Callable[..., Any]:
    multiply = in_c(_write, reference)(_product(run))
    return lambda *operands: multiply(*operands[:-1]) + operands[-1]


def _with_residual_bytes(run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    product = x.count // max(x.shape[-1], 1) * weight.shape[0] * x.item
    return by_reference(_product(run), x, weight, *others[:-1]) + product


_WHY = "activations are rounded to 8 bits, a scale for each row; sums of integers, which scales multiply"
KERNELS = tuple(
    kernel(f"int8_activations{behind}", op, write, bind, _WHY, _accepts, held=held)
    for behind, op, write, bind, held in (
        ("", "linear_int8", _write, reference, by_reference),
        ("_gated", "int8_gated_product", partial(_write, is_gated=True), _with_gate, _with_gate_bytes),
        ("_residual", "int8_product", _write, _with_residual, _with_residual_bytes),
    )
)
