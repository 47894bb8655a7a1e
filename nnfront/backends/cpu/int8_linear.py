# SPDX-License-Identifier: Apache-2.0
"""Products of integers on a CPU (`c/int8_product.c`): weights in 8 or 4 bits, or in blocks, with activations that are rounded to 8 bits, of any number of rows. What reads packed
weights is shared with products whose activations are not (`quantized_linear`).

Shapes: x [..., columns], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups], or blocks [outputs, bytes] without these; bias [outputs].
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
from nnfront.backends.kernel import ACCEPTED, Bind, Context
from nnfront.ir import OPS, TensorType
from nnfront.lower import Run
from nnfront.lower.reference import reference
from nnfront.memory.layout import Layout
from nnfront.passes.weight_layouts import LAYOUTS, PANEL, WORD
from nnfront.quant_format import FORMATS, QuantFormat

_RESULTS = "bfloat16", "float32"


def refusal(format: QuantFormat, dtype: str) -> str:
    """Why there is no kernel for weights in a format, in integers, and x in a dtype; "" if there is one."""
    return _unlike(format, dtype) or ("the kernels in C are not there" if NATIVE is None else ACCEPTED)


def _unlike(format: QuantFormat, dtype: str) -> str:
    """The same wherever the kernels in C are: how weights are stored does not depend on the machine."""
    if dtype != "bfloat16":
        return f"activations are {dtype}, the kernel takes bfloat16"
    return ACCEPTED if stored_as(format) is not None else f"no kernel for {format}"


def _product(run: Run) -> Run:
    """The product of a region, as the op by itself."""
    usual = OPS["linear_int8"].attributes
    return replace(run, op="linear_int8", attrs={name: run.attrs.get(name, usual[name]) for name in usual})


def _format(run: Run) -> QuantFormat:
    attrs = _product(run).attrs
    known = FORMATS[attrs["format"]]
    return known if known.block else replace(known, group_size=attrs["group_size"])


def _accepts(refuses: Callable[[QuantFormat, str], str], run: Run, context: Context) -> str:
    x = context.tensor(run.inputs[0])
    assert isinstance(x, TensorType)
    return refuses(_format(run), x.dtype)


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    *others: Value | None,
    is_gated: bool = False,
    is_packed: bool = False,
) -> Sequence[Operand]:
    format = _format(run)
    return write_product(
        builder, run, format, x, weight, *others, is_gated=is_gated, is_packed=is_packed, is_rounded=True
    )


def write_product(
    builder: TapeBuilder,
    run: Run,
    format: QuantFormat,
    x: Value,
    weight: Value,
    scales: Value | None,
    zeros: Value | None,
    bias: Value | None,
    residual: Value | None = None,
    *,
    is_gated: bool,
    is_packed: bool,
    is_rounded: bool,
) -> Sequence[Operand]:
    """A product with integers, of rows that are rounded to 8 bits or, if the weight is packed, as they are; a gated one, or what is added to it or cast, in the same call."""
    stored, group = stored_as(format), format.group_size
    if stored is None:
        raise Refused(f"there is no kernel for {format}")
    columns, outputs = x.shape[-1], weight.shape[0] // (1 + is_gated)
    rows, groups = prod(x.shape[:-1]), columns // group if group else 1
    demand(rows > 0 and columns > 0, "there are no rows")
    demand_bfloat16(x=x, bias=bias, residual=residual)
    scale_dtype = torch.bfloat16 if scales is None else scales.dtype
    demand(scale_dtype in (torch.bfloat16, torch.float32), f"scales are {scale_dtype}")
    shape = (*x.shape[:-1], outputs)
    demand(residual is None or residual.shape == shape, "the residual is broadcast")
    gate = activation_number(run)
    if gate is None:
        raise Refused(f"there is no {run.attrs['activation']} in the kernel")
    dtype = run.attrs.get("dtype", "bfloat16")
    demand(dtype in _RESULTS, f"the result is {dtype}")
    y = builder.make(run.outputs[0], shape, getattr(torch, dtype))
    sizes = stored, rows, columns, outputs, groups, SCALE_KINDS[scale_dtype], gate, is_packed, is_rounded
    builder.call(
        "multiply_integers",
        *sizes,
        dtype == "float32",
        builder.threads,
        weight,
        scales,
        zeros,
        x,
        bias,
        residual,
        y,
    )
    return (y,)


def _unpacked(weight: torch.Tensor, word: int) -> torch.Tensor:
    """A weight, scales or zero points of which words of PANEL outputs follow one another, in the order of outputs."""
    rows, size = weight.shape
    whole = rows // PANEL * PANEL
    panels = weight[:whole].view(-1, size // word, PANEL, word)
    apart = panels.transpose(1, 2).reshape(whole, size)
    return apart if whole == rows else torch.cat([apart, weight[whole:]])


def of_packed(multiply: Bind, run: Run) -> Callable[..., Any]:
    """What multiplies with a packed weight when its order is undone."""
    bound = multiply(run)

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: Any, *others: Any) -> Any:
        if scales.shape[1] > 1:
            scales, zeros = _unpacked(scales, 1), None if zeros is None else _unpacked(zeros, 1)
        return bound(x, _unpacked(weight, WORD), scales, zeros, *others)

    return product


def of_packed_bytes(
    held: Callable[..., int], run: Run, x: Layout, weight: Layout, *others: Layout | None
) -> int:
    return held(run, x, weight, *others) + sum(x.size_bytes for x in (weight, *others[:2]) if x is not None)


def _with_gate(run: Run) -> Callable[..., Any]:
    return gated(in_c(_write, reference)(_product(run)), activation(run))


def _with_gate_bytes(run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    return by_reference(_product(run), x, weight, *others) + gated_product_bytes(run, x, weight)


def _finished(run: Run) -> Callable[..., Any]:
    """The product with a residual, or a cast."""
    multiply, dtype = in_c(_write, reference)(_product(run)), run.attrs.get("dtype")

    def product(*operands: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = multiply(*operands[:-1])
        y = y if operands[-1] is None else y + operands[-1]
        return y if dtype is None else y.to(getattr(torch, dtype))

    return product


def _finished_bytes(run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    product = x.count // max(x.shape[-1], 1) * weight.shape[0] * x.item
    is_finished = others[-1] is not None or "dtype" in run.attrs
    return by_reference(_product(run), x, weight, *others[:-1]) + is_finished * product


_WHY = "activations are rounded to 8 bits, a scale for each row; sums of integers, which scales multiply"
_TAKEN = partial(_accepts, refusal)
_REGIONS = (
    ("int8_activations_product", _write, _finished, _finished_bytes),
    ("int8_activations_gated_product", partial(_write, is_gated=True), _with_gate, _with_gate_bytes),
)
KERNELS = (
    kernel("int8_activations", "linear_int8", _write, reference, _WHY, _TAKEN, held=by_reference),
    *(
        kernel(region, region, write, otherwise, _WHY, _TAKEN, held=held)
        for region, write, otherwise, held in _REGIONS
    ),
    *(
        replace(
            kernel(
                f"packed_{region}",
                f"packed_{region}",
                partial(write, is_packed=True),
                partial(of_packed, otherwise),
                f"{_WHY}; weights lie in panels of {PANEL} outputs",
                partial(_accepts, _unlike),
                held=partial(of_packed_bytes, held),
            ),
            layout=LAYOUTS[f"packed_{region}"],
        )
        for region, write, otherwise, held in _REGIONS
    ),
)
