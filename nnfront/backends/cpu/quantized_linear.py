# SPDX-License-Identifier: Apache-2.0
"""Products with weights in 8 or 4 bits, on a CPU, and what comes after them in their regions.

Rows of bfloat16 go to a kernel in C that reads quantised values at the speed of memory, and has the same sums for a row whatever is beside it. It scales sums, so it takes more time
for many rows than a product with what the weight stands for does: of many tokens of a sequence, and of what it does not take, pieces of the weight are decoded as they are multiplied
(`quantized_pieces`), never the weight as a whole.

Where vectors multiply bfloat16 in pairs, weights in integers lie in panels instead, and a kernel multiplies any number of rows with them there (`PACKED`).

Shapes: x [..., columns], weight [outputs, columns] or, in 4 bits, [outputs, columns / 2], scales and zeros [outputs, groups] or, where scales are float8, factors [outputs, 1] in the
place of zeros, bias [outputs].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nnfront import dtypes
from nnfront.backends.cpu.activations import GATES, activation, activation_name
from nnfront.backends.cpu.extension import TILES
from nnfront.backends.cpu.in_c import besides, in_c, kernel, refusal
from nnfront.backends.cpu.int8_linear import of_packed, of_packed_bytes, write_product
from nnfront.backends.cpu.linear import count_rows, gated, write_gate
from nnfront.backends.cpu.quantized_gemv import MOST_ROWS, SCALE_KINDS, stored_as, table_of, takes_scales
from nnfront.backends.cpu.quantized_pieces import DECODINGS, Decoding, Multiply
from nnfront.backends.cpu.tape_builder import (
    Operand,
    Refused,
    TapeBuilder,
    Value,
    Write,
    demand,
    demand_bfloat16,
)
from nnfront.backends.kernel import ACCEPTED, Accepts, Bind, Context
from nnfront.ir import TensorType
from nnfront.lower import Run
from nnfront.memory.layout import Layout, contiguous
from nnfront.passes.weight_layouts import INTEGERS, LAYOUTS, PANEL
from nnfront.quant_format import QuantFormat


def product(run: Run, format: QuantFormat, otherwise: Multiply) -> Multiply:
    """The product with a weight and nothing after it: in C for what that takes, `otherwise` for the rest."""
    return in_c(_write, lambda plain: otherwise)(_plain(run, format))


def product_held(run: Run, decoding: Decoding, format: QuantFormat, *operands: Layout | None) -> int:
    """The most that `product` of x, weight, scales, zeros and bias holds besides its result, if the rest is decoded so."""

    def otherwise(run: Run, x: Layout, weight: Layout, scales: Layout | None, *_: Layout | None) -> int:
        return decoding.most_held(format, x, scales, weight.shape[0])

    return besides(_write, otherwise).held(_plain(run, format), *operands)


def _plain(run: Run, format: QuantFormat) -> Run:
    """An instruction of a product alone."""
    return replace(run, op="quantized_product", attrs=format.attrs)


def _product(decoding: Decoding) -> Bind:
    """A kernel that multiplies so, and does what comes after it."""

    def make(run: Run) -> Callable[..., Any]:
        format, finish = QuantFormat.of(run.attrs), _finish(run)
        multiply = product(run, format, decoding.multiply(format))

        def quantized_product(x: torch.Tensor, *operands: torch.Tensor | None) -> torch.Tensor:
            *stored, scale, residual = operands
            return finish(multiply(x, *stored), scale, residual)

        return quantized_product

    return make


def _finish(run: Run) -> Callable[..., torch.Tensor]:
    """What comes after a product, in the order in which regions have it: activation, scale, residual, cast."""
    attrs = run.attrs
    activate = activation(run) if "activation" in attrs else None
    factor = attrs.get("scale")
    dtype: torch.dtype | None = getattr(torch, attrs["dtype"]) if "dtype" in attrs else None

    def finish(y: torch.Tensor, scale: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        y = y if activate is None else activate(y)
        by = factor if scale is None else scale
        y = y if by is None else y * by
        y = y if residual is None else y + residual
        return y if dtype is None else y.to(dtype)

    return finish


def _gated_product(decoding: Decoding) -> Bind:
    """A kernel for activation(gate) * up by such products."""

    def make(run: Run) -> Callable[..., Any]:
        format = QuantFormat.of(run.attrs)
        return gated(product(run, format, decoding.multiply(format)), activation(run))

    return make


def _accepts(decoding: Decoding) -> Accepts:
    """Plain products with weights in formats that are decoded so."""

    def accepts(run: Run, context: Context) -> str:
        format = QuantFormat.of(run.attrs)
        if refusal := decoding.refusal(format):
            return refusal
        if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
            return "it is not a plain linear"
        x, _, scales, *_ = run.inputs
        dtype = context.tensor(x).dtype
        if dtype not in ("float32", "float16", "bfloat16"):
            return f"x is {dtype}"
        if format.block is not None:
            return ACCEPTED
        wanted, found = format.read_scales or dtype, context.tensor(scales).dtype
        is_known = found in (wanted, "float32") or (format.has_factor and found == format.scale_dtype)
        return ACCEPTED if is_known else f"scales are {found}, not {wanted}"

    return accepts


def with_factors(run: Run, context: Context, formats: Mapping[int, QuantFormat]) -> Run:
    """See scales that are float8 times a factor of each output as these two, so that nothing multiplies them ahead of each call. `formats` of weights, by the places of their scales."""
    inputs = list(run.inputs)
    for place, format in formats.items():
        product = context.makers.get(inputs[place])
        cast = None if product is None else context.makers.get(product.inputs[0])
        if product is None or cast is None or (product.op, cast.op) != ("multiply", "astype"):
            continue
        stored, factors = cast.inputs[0], product.inputs[1]
        types = context.tensor(stored), context.tensor(factors)
        is_known = types[0].dtype == format.scale_dtype == "float8_e4m3fn"
        if is_known and types[1] == TensorType((*types[0].shape[:-1], 1), "float32"):
            inputs[place : place + 2] = stored, factors
    return replace(run, inputs=tuple(inputs))


def _with_factors(run: Run, context: Context) -> Run:
    return with_factors(run, context, {2: QuantFormat.of(run.attrs)})


def _product_bytes(decoding: Decoding, run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    """The pieces; the whole product, unless it is the result because nothing comes after it that takes new memory."""
    attrs, (*stored, scale, residual) = run.attrs, others
    pieces = product_held(run, decoding, QuantFormat.of(attrs), x, weight, *stored)
    is_new = attrs.get("activation", "silu").startswith("gelu") or "scale" in attrs or "dtype" in attrs
    if scale is None and not is_new and residual is None:
        return pieces
    count = x.count // max(x.shape[-1], 1) * weight.shape[0]
    product, result = count * x.item, count * dtypes.size_bytes(attrs.get("dtype", x.dtype))
    return max(pieces + product - result, product)


def _gated_product_bytes(decoding: Decoding, run: Run, x: Layout, *stored: Any) -> int:
    """The pieces and one of gate and up; of one row pieces of both."""
    format = QuantFormat.of(run.attrs)
    half: int = x.count // max(x.shape[-1], 1) * (stored[0].shape[0] // 2) * x.item
    if x.count != x.shape[-1]:
        halves = (t and contiguous((t.shape[0] // 2, *t.shape[1:]), t.dtype) for t in stored)
        return product_held(run, decoding, format, x, *halves) + half
    pieces = product_held(run, decoding, format, x, *stored) + half
    is_new = "approximate" in run.attrs or run.attrs["activation"].startswith("gelu")
    return max(pieces, 2 * half) if is_new else pieces


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    scales: Value | None,
    zeros: Value | None,
    bias: Value | None,
    scale: Value | None = None,
    added: Value | None = None,
    *,
    is_gated: bool = False,
    is_packed: bool = False,
) -> Sequence[Operand]:
    """A product with quantised values; in a gated one gate and up next to each other, then what they give."""
    format = QuantFormat.of(run.attrs)
    stored, group = stored_as(format), format.group_size
    is_all = scale is None and (is_gated or not {"activation", "scale"}.intersection(run.attrs))
    demand(is_all, "more than a residual and a cast comes after it")
    if is_packed:
        given = x, weight, scales, zeros, bias, added
        return write_product(
            builder, run, format, *given, is_gated=is_gated, is_packed=True, is_rounded=False
        )
    dtype = getattr(torch, run.attrs.get("dtype", "bfloat16"))
    demand(dtype in (torch.bfloat16, torch.float32), f"the result is {dtype}")
    is_known = not is_gated or activation_name(run) in GATES
    demand(is_known, f"there is no {run.attrs.get('activation')} in the kernel")
    if stored is None:
        raise Refused(f"there is no kernel for {format}")
    columns, outputs = x.shape[-1], weight.shape[0]
    rows = count_rows(builder, x, columns, MOST_ROWS if TILES else None)
    builder.limit(
        len(x.shape) < 2 or x.shape[-2] <= MOST_ROWS, f"there are more than {MOST_ROWS} tokens of a sequence"
    )
    scale_dtype = None if scales is None else scales.dtype
    demand(takes_scales(format, scale_dtype), f"scales are {scale_dtype}")
    has_zeros = not (format.symmetric or format.block) or scale_dtype == torch.float8_e4m3fn
    demand((zeros is not None) == has_zeros, "it has zero points that the format has not, or has none")
    demand_bfloat16(x=x, bias=bias, residual=added)
    demand(added is None or added.shape == (*x.shape[:-1], outputs), "the residual is broadcast")
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs // 2 if is_gated else outputs), dtype)
    product = Value(builder.take(rows * outputs * x.dtype.itemsize), (rows, outputs)) if is_gated else y
    operands = weight, scales, zeros, x, bias, added, product
    kind = 0 if scale_dtype is None else SCALE_KINDS[scale_dtype]
    values, unit = table_of(format)
    sizes = rows, columns, outputs, columns // group if group else 1, kind, *values
    builder.call(
        "multiply_quantized", stored, *sizes, dtype == torch.float32, TILES, builder.threads, unit, *operands
    )
    if is_gated:
        write_gate(builder, run, product, y)
    return (y,)


def _accepts_packed(decoding: Decoding, write: Write, run: Run, context: Context) -> str:
    """What C multiplies: the order would have to be undone for all else. The same on all machines, as a weight may have been packed on another one."""
    return _accepts(decoding)(run, context) or refusal(write, run, context.frame.slots, any_size=True)


_FUSIONS = (
    ("product", _product, _product_bytes, _write),
    ("gated_product", _gated_product, _gated_product_bytes, partial(_write, is_gated=True)),
)
KERNELS = tuple(
    kernel(
        f"{decoding.name}_{fusion}",
        f"quantized_{fusion}",
        write,
        bind(decoding),
        decoding.why,
        _accepts(decoding),
        _with_factors,
        held=partial(held, decoding),
    )
    for fusion, bind, held, write in _FUSIONS
    for decoding in DECODINGS
)
PACKED = tuple(
    replace(
        kernel(
            f"packed_{decoding.name}_{fusion}",
            f"packed_quantized_{fusion}",
            partial(write, is_packed=True),
            partial(of_packed, bind(decoding)),
            f"weights lie in panels of {PANEL} outputs and become bfloat16 in registers, for any number of rows; activations are as they are",
            partial(_accepts_packed, decoding, partial(write, is_packed=True)),
            held=partial(of_packed_bytes, partial(held, decoding)),
        ),
        layout=LAYOUTS[f"packed_quantized_{fusion}"],
    )
    for fusion, bind, held, write in _FUSIONS
    for decoding in DECODINGS
    if INTEGERS.issuperset(decoding.formats)
)
