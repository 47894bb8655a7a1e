# SPDX-License-Identifier: Apache-2.0
"""Products of integers on a CPU (`c/int8_product.c`): weights in 8 or 4 bits with activations that are rounded to 8 bits, of any number of rows.

Shapes: x [..., columns], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups], bias [outputs].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import by_reference, kernel
from nnfront.backends.cpu.quantized_gemv import SCALE_KINDS, stored_as
from nnfront.backends.cpu.tape_builder import (
    Operand,
    Refused,
    TapeBuilder,
    Value,
    attribute,
    demand,
    demand_bfloat16,
)
from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.ir import TensorType
from nnfront.lower import Run
from nnfront.lower.reference import reference
from nnfront.quant_format import FORMATS, QuantFormat


def refusal(format: QuantFormat, dtype: str) -> str:
    """Why there is no kernel for weights in a format, in integers, and x in a dtype; "" if there is one."""
    if dtype != "bfloat16":
        return f"activations are {dtype}, the kernel takes bfloat16"
    if NATIVE is None:
        return "the kernels in C are not there"
    return ACCEPTED if stored_as(format) is not None else f"no kernel for {format}"


def _format(run: Run) -> QuantFormat:
    return replace(FORMATS[attribute(run, "format")], group_size=attribute(run, "group_size"))


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
) -> Sequence[Operand]:
    format = _format(run)
    stored, group = stored_as(format), format.group_size
    if stored is None:
        raise Refused(f"there is no kernel for {format}")
    columns, outputs = x.shape[-1], weight.shape[0]
    rows, groups = prod(x.shape[:-1]), columns // group if group else 1
    demand(rows > 0 and columns > 0, "there are no rows")
    demand_bfloat16(x=x, bias=bias)
    demand(scales.dtype in (torch.bfloat16, torch.float32), f"scales are {scales.dtype}")
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs))
    sizes = stored, rows, columns, outputs, groups, SCALE_KINDS[scales.dtype], builder.threads
    builder.call("multiply_int8", *sizes, weight, scales, zeros, x, bias, None, y)
    return (y,)


KERNELS = (
    kernel(
        "int8_activations",
        "linear_int8",
        _write,
        reference,
        "activations are rounded to 8 bits, a scale for each row; sums of integers, which scales multiply",
        _accepts,
        held=by_reference,
    ),
)
