# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU, and what comes before and after them in fusions.

Few rows of bfloat16 go to a kernel that reads the weight at the speed of memory (`gemv`), more rows to oneDNN. Results are those of the ops'
references, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu.activations import (
    GATES,
    NO_ACTIVATION,
    activation,
    activation_name,
    activation_number,
)
from nnfront.backends.cpu.gemv import SMALL_BATCH, TILES, SmallBatchLinear
from nnfront.backends.cpu.in_c import besides, in_c
from nnfront.backends.cpu.tape_builder import Operand, Refused, TapeBuilder, Value, demand, place_of
from nnfront.backends.kernel import ACCEPTED, NOTHING, Context, Kernel
from nnfront.ir import TensorType
from nnfront.lower import Run
from nnfront.memory.layout import Layout

# Below this many elements a weight stays in the caches, and the time of a product is that of the call.
LARGE = 1 << 20


def as_linear(run: Run, context: Context) -> Run | str:
    """A product with a matrix that is a transpose, or a weight, as `linear`, which has the weight the other way around."""
    x, right = run.inputs
    if not isinstance(context.type(right), TensorType) or context.tensor(right).ndim != 2:
        return "the right operand is no single matrix"
    maker = context.makers.get(right)
    if maker is not None and maker.op == "permute_dims" and maker.attrs["axes"] == (1, 0):
        weight = maker.inputs[0]
    elif context.is_bound_at_load(right):
        type = context.tensor(right)
        (weight,) = context.emit(
            run, "permute_dims", (right,), {"axes": (1, 0)}, TensorType(type.shape[::-1], type.dtype)
        )
    else:
        return "the right operand is neither a transpose nor a weight"
    return replace(run, op="linear", inputs=(x, weight, context.frame.constant(None)))


def _plain(run: Run, context: Context) -> str:
    return f"it has {', '.join(run.attrs)}" if run.attrs else ACCEPTED


def _widened(run: Run, context: Context) -> str:
    if run.attrs != {"out_dtype": "float32"}:
        return "the result is not widened to float32"
    dtype = context.tensor(run.inputs[1]).dtype
    return ACCEPTED if dtype in ("float16", "bfloat16") else f"the weight is {dtype}"


def _bfloat16(run: Run, context: Context) -> str:
    dtype = context.tensor(run.inputs[1]).dtype
    return _plain(run, context) or (ACCEPTED if dtype == "bfloat16" else f"the weight is {dtype}")


def _large_float32(run: Run, context: Context) -> str:
    weight = context.tensor(run.inputs[1])
    sizes = [size for size in weight.shape if isinstance(size, int)]
    if run.attrs or weight.dtype != "float32":
        return _plain(run, context) or f"the weight is {weight.dtype}"
    return (
        ACCEPTED
        if len(sizes) == 2 and prod(sizes) >= LARGE
        else f"the weight has fewer than {LARGE} elements"
    )


def _as_gated(run: Run, context: Context) -> Run:
    """The product that the kernel is to use as an attribute: the one that a linear of these operands gets."""
    x, weight, bias = run.inputs
    product = replace(run, op="linear", inputs=(x, weight, bias), attrs={})
    kernels = (kernel.name for kernel in PRODUCTS if not kernel.accepts(product, context))
    return replace(run, attrs={**run.attrs, "product": next(kernels, PLAIN.name)})


def _gates_linear(run: Run, context: Context) -> str:
    x, weight, _ = run.inputs
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    return ACCEPTED if context.tensor(weight).dtype == context.tensor(x).dtype else "operands differ in dtype"


def _ends_in_bfloat16(run: Run, context: Context) -> str:
    """A product in bfloat16, and nothing but an activation, a residual of its shape and a cast to float32 after it."""
    x, weight, _, scale, residual = run.inputs
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    if "scale" in run.attrs or not context.is_none(scale):
        return "more than an activation, a residual and a cast comes after it"
    if run.attrs.get("dtype", "float32") != "float32":
        return f"the result is {run.attrs['dtype']}"
    operands = (x, weight) if context.is_none(residual) else (x, weight, residual)
    if any(context.tensor(slot).dtype != "bfloat16" for slot in operands):
        return "operands are not all bfloat16"
    is_like = (
        context.is_none(residual) or context.tensor(residual).shape == context.tensor(run.outputs[0]).shape
    )
    return ACCEPTED if is_like else "the residual is broadcast"


# Elements of a weight that are widened at a time: 4 MiB of float32.
PIECE = 1 << 20


def _linear(run: Run) -> Callable[..., Any]:
    return F.linear


def linear_bfloat16(run: Run) -> Callable[..., Any]:
    """Few rows go to a kernel for them; more rows to oneDNN, which is the faster one then."""
    if SMALL_BATCH is None:
        return F.linear
    takes, multiply = SMALL_BATCH.takes, SMALL_BATCH.multiply

    def multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weight, bias) if takes(x, weight, bias) else F.linear(x, weight, bias)

    return multiply_rows


def _linear_float32(run: Run) -> Callable[..., Any]:
    """oneDNN's inner product; the BLAS that `F.linear` calls is tuned for other processors.

    2048 x 3072, one thread: 1 row 1.3 ms against 1.5, 4 rows 2.1 against 2.9, 16 rows 3.7 against 11, 256 rows 116 against 179.
    """
    try:
        pointwise = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return F.linear

    def linear_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not weight.is_contiguous() or not x.numel():
            return F.linear(x, weight, bias)
        y: torch.Tensor = pointwise(x, weight, bias, "none", [], "")
        return y

    return linear_float32


def _linear_wide(run: Run) -> Callable[..., Any]:
    """A float32 result from half operands: the weight is widened in pieces that stay in the caches, never as a whole.

    Few rows of bfloat16 go to a kernel that widens in registers, if there is one.
    """
    few = SMALL_BATCH if SMALL_BATCH and torch.float32 in SMALL_BATCH.results else None

    def linear_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if few and x.dtype == weight.dtype == torch.bfloat16 and few.takes(x, weight, None):
            y = few.multiply(x, weight, None, None, torch.float32)
            return y if bias is None else y.add_(bias)
        rows, columns = weight.shape
        y = torch.empty((*x.shape[:-1], rows))
        wide, step = x.float(), max(PIECE // max(columns, 1), 1)
        for first in range(0, rows, step):
            part = weight.narrow(0, first, min(step, rows - first))
            y.narrow(-1, first, part.shape[0]).copy_(F.linear(wide, part.float()))
        return y if bias is None else y.add_(bias)

    return linear_wide


def finishing_small_batch(run: Run) -> SmallBatchLinear | None:
    """Return the kernel that computes a product of few rows and all that comes after it, if there is one."""
    dtype, number = getattr(torch, run.attrs.get("dtype", "bfloat16")), activation_number(run)
    if SMALL_BATCH is None or dtype not in SMALL_BATCH.results or number is None:
        return None
    return SMALL_BATCH if SMALL_BATCH.activates or number == NO_ACTIVATION else None


def _finished_product(run: Run) -> Callable[..., Any]:
    """activation(x @ weight.T + bias) + residual, as float32 if it is cast: few rows are rounded once at the end, more rows after each."""
    dtype: torch.dtype = getattr(torch, run.attrs.get("dtype", "bfloat16"))
    few, number = finishing_small_batch(run), activation_number(run)
    options = () if number == NO_ACTIVATION else (number,)
    activate = activation(run) if "activation" in run.attrs else None

    def finished_product(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        if few and few.takes(x, weight, bias) and (residual is None or residual.is_contiguous()):
            return few.multiply(x, weight, bias, residual, dtype, *options)
        y = F.linear(x, weight, bias)
        y = y if activate is None else activate(y)
        return (y if residual is None else y.add_(residual)).to(dtype)

    return finished_product


def gated_small_batch(run: Run) -> Callable[..., torch.Tensor] | None:
    """Return the kernel that computes a gated product of few rows, if there is one."""
    if SMALL_BATCH is None or run.attrs["product"] != "linear_bfloat16":
        return None
    return SMALL_BATCH.gated.get(activation_name(run))


def gated_product(run: Run) -> Callable[..., Any]:
    """activation(x @ gate.T) * (x @ up.T), gate and up the halves of one weight.

    Few rows go to a kernel that does all of it, if there is one. Else rows are multiplied with one half after the other: elementwise calls on
    halves of one result take 1.4 times as long.
    """
    product = next(k for k in (*PRODUCTS, PLAIN) if k.name == run.attrs["product"])
    multiply, activate = product.bind(replace(run, op="linear", attrs={})), activation(run)
    few, gated = SMALL_BATCH, gated_small_batch(run)

    def multiply_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if few and gated and few.takes(x, weight, bias):
            return gated(x, weight, bias)
        half = weight.shape[0] // 2
        if x.numel() == x.shape[-1]:
            both = multiply(x, weight, bias)
            return activate(both.narrow(-1, 0, half)).mul_(both.narrow(-1, half, half))
        gate_bias, up_bias = (None, None) if bias is None else (bias[:half], bias[half:])
        return activate(multiply(x, weight[:half], gate_bias)).mul_(multiply(x, weight[half:], up_bias))

    return multiply_gated


def small_rows(x: Value, columns: int, most: int) -> int:
    """The rows of x, if they are few and in bfloat16."""
    rows = prod(x.shape) // max(columns, 1)
    demand(x.dtype == torch.bfloat16, f"x is {x.dtype}")
    demand(0 < rows <= most and prod(x.shape) == rows * columns, f"there are more than {most} rows, or none")
    return rows


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    bias: Value | None,
    scale: None = None,
    added: Value | None = None,
) -> Sequence[Operand]:
    if SMALL_BATCH is None:
        raise Refused("there is no kernel for few rows")
    outputs, columns = weight.shape
    rows, number = small_rows(x, columns, SMALL_BATCH.most), activation_number(run)
    if number is None:
        raise Refused(f"there is no {run.attrs['activation']} in the kernel")
    is_wide = "float32" in (run.attrs.get("out_dtype"), run.attrs.get("dtype"))
    are_alike = all(t is None or t.dtype == torch.bfloat16 for t in (weight, bias, added))
    demand(are_alike, "operands are not all bfloat16")
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs), torch.float32 if is_wide else torch.bfloat16)
    operands = (weight.place, x.place, place_of(bias), place_of(added), y.place)
    kind = is_wide, number, TILES, builder.threads
    builder.call("multiply", rows, columns, outputs, *kind, *operands)
    return (y,)


def _write_gated(
    builder: TapeBuilder, run: Run, x: Value, weight: Value, bias: Value | None
) -> Sequence[Operand]:
    if SMALL_BATCH is None or gated_small_batch(run) is None:
        raise Refused(f"it is no product of bfloat16, or there is no {activation_name(run)} in the kernel")
    outputs, columns = weight.shape[0] // 2, weight.shape[1]
    rows, gate = small_rows(x, columns, SMALL_BATCH.most), GATES.index(activation_name(run))
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs))
    operands = (weight.place, x.place, place_of(bias), y.place)
    kind = gate, TILES, builder.threads
    builder.call("multiply_gated", rows, columns, outputs, *kind, *operands)
    return (y,)


def _linear_wide_bytes(run: Run, x: Layout, weight: Layout, bias: Layout | None) -> int:
    """x in float32, a piece of the weight in float32, and the product with it."""
    rows, columns = weight.shape
    piece = min(max(PIECE // max(columns, 1), 1), rows)
    widened = sum(
        count for count, like in ((x.count, x), (piece * columns, weight)) if like.dtype != "float32"
    )
    return 4 * (widened + x.count // max(columns, 1) * piece)


def _finished_product_bytes(
    run: Run, x: Layout, weight: Layout, bias: Layout | None, scale: None, residual: Layout | None
) -> int:
    """The product, if it is cast or its activation is made anew."""
    is_new = "activation" in run.attrs and activation_name(run).startswith("gelu")
    if not ("dtype" in run.attrs or is_new):
        return 0
    return x.count // max(x.shape[-1], 1) * weight.shape[0] * x.item


def _gated_product_bytes(run: Run, x: Layout, weight: Layout, bias: Layout | None) -> int:
    """One of gate and up; of one row both."""
    half = x.count // x.shape[-1] * weight.shape[0] // 2 * x.item if x.count else 0
    return 2 * half if x.count == x.shape[-1] else half


PLAIN = Kernel(
    "linear_plain", "", _linear, "the weight as it is stored, no transpose", _plain, workspace=NOTHING
)
PRODUCTS = (
    Kernel(
        "linear_bfloat16",
        "linear",
        in_c(_write, linear_bfloat16),
        "few rows: a kernel that reads the weight at memory speed; more rows: oneDNN",
        _bfloat16,
        workspace=NOTHING,
        write=_write,
    ),
    Kernel(
        "linear_float32",
        "linear",
        _linear_float32,
        "oneDNN's inner product instead of the BLAS: 1.2 to 3 times as fast for few rows",
        _large_float32,
        workspace=NOTHING,
    ),
    Kernel(
        "linear_wide",
        "linear",
        in_c(_write, _linear_wide),
        "the weight widened piece by piece, not as a whole",
        _widened,
        workspace=besides(_write, _linear_wide_bytes),
        write=_write,
    ),
)
"""Linear layers by themselves; a gated product uses the first that takes it."""

KERNELS = (
    Kernel(
        "gated_product",
        "gated_product",
        in_c(_write_gated, gated_product),
        "gate and up in tensors of their own, multiplied in place",
        _gates_linear,
        _as_gated,
        workspace=besides(_write_gated, _gated_product_bytes),
        write=_write_gated,
    ),
    Kernel(
        "finished_product",
        "product",
        in_c(_write, _finished_product),
        "few rows: what comes after it in the kernel of the product; more rows: the sum in the product's own memory",
        _ends_in_bfloat16,
        workspace=besides(_write, _finished_product_bytes),
        write=_write,
    ),
    *PRODUCTS,
    *(kernel.of("matmul", as_linear) for kernel in (*PRODUCTS[:2], PLAIN, PRODUCTS[2])),
)
