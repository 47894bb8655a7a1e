# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU, and what comes before and after them in fusions.

Rows of bfloat16 go to a kernel in C, other dtypes to oneDNN. Results are those of the ops' references, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu.activations import GATES, activation, activation_name, activation_number
from nnfront.backends.cpu.extension import TILES
from nnfront.backends.cpu.in_c import by_types, kernel
from nnfront.backends.cpu.tape_builder import Operand, Refused, TapeBuilder, Value, demand, demand_bfloat16
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
    kernels = (k.name for k in PRODUCTS if not k.accepts(product, context))
    return replace(run, attrs={**run.attrs, "product": next(kernels, PLAIN.name)})


def _gates_linear(run: Run, context: Context) -> str:
    x, weight, _ = run.inputs
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    return ACCEPTED if context.tensor(weight).dtype == context.tensor(x).dtype else "operands differ in dtype"


# Elements of a weight that are widened at a time: 4 MiB of float32.
PIECE = 1 << 20


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
    """A float32 result from half operands: the weight is widened in pieces that stay in the caches, never as a whole."""

    def linear_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, columns = weight.shape
        y = torch.empty((*x.shape[:-1], rows))
        wide, step = x.float(), max(PIECE // max(columns, 1), 1)
        for first in range(0, rows, step):
            part = weight.narrow(0, first, min(step, rows - first))
            y.narrow(-1, first, part.shape[0]).copy_(F.linear(wide, part.float()))
        return y if bias is None else y.add_(bias)

    return linear_wide


def _finished_product(run: Run) -> Callable[..., Any]:
    """activation(x @ weight.T + bias) + residual, as float32 if it is cast, rounded after each."""
    dtype: torch.dtype = getattr(torch, run.attrs.get("dtype", "bfloat16"))
    activate = activation(run) if "activation" in run.attrs else None

    def finished_product(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        y = y if activate is None else activate(y)
        return (y if residual is None else y.add_(residual)).to(dtype)

    return finished_product


def _gated_product(run: Run) -> Callable[..., Any]:
    """A gated product by the kernel that a linear of its operands gets."""
    product = next(k for k in (*PRODUCTS, PLAIN) if k.name == run.attrs["product"])
    return gated(product.bind(replace(run, op="linear", attrs={})), activation(run))


def gated(
    multiply: Callable[..., torch.Tensor], activate: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """activation(x @ gate.T) * (x @ up.T), gate and up the halves of one weight, of its scales, and of all else that is stored of it.

    Rows are multiplied with one half after the other: elementwise calls on halves of one result take 1.4 times as long. One row is multiplied with both at once.
    """

    def multiply_gated(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        half = len(weight) // 2
        if x.numel() == x.shape[-1]:
            both = multiply(x, weight, *others)
            return activate(both.narrow(-1, 0, half)).mul_(both.narrow(-1, half, half))

        def part(of: slice) -> torch.Tensor:
            return multiply(x, weight[of], *(None if t is None else t[of] for t in others))

        return activate(part(slice(half))).mul_(part(slice(half, None)))

    return multiply_gated


def count_rows(builder: TapeBuilder, x: Value, columns: int, most: int | None = None) -> int:
    """The rows of x, if there are no more than `most`."""
    rows = prod(x.shape) // max(columns, 1)
    builder.limit_count(rows if prod(x.shape) == rows * columns else 0, most, "rows")
    return rows


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    bias: Value | None,
    scale: Value | float | None = None,
    residual: Value | None = None,
) -> Sequence[Operand]:
    """A product in bfloat16, and nothing but an activation, a residual of its shape and a cast to float32 after it."""
    number, dtype = activation_number(run), run.attrs.get("out_dtype") or run.attrs.get("dtype", "bfloat16")
    demand_bfloat16(weight=weight, x=x, bias=bias, residual=residual)
    outputs, columns = weight.shape
    rows = count_rows(builder, x, columns)
    shape = (*x.shape[:-1], outputs)
    is_all = scale is None and "scale" not in run.attrs and "product_dtype" not in run.attrs
    demand(is_all, "more than an activation, a residual and a cast comes after it")
    demand(dtype in ("bfloat16", "float32"), f"the result is {dtype}")
    demand(residual is None or residual.shape == shape, "the residual is broadcast")
    if number is None:
        raise Refused(f"there is no {run.attrs['activation']} in the kernel")
    y = builder.make(run.outputs[0], shape, getattr(torch, dtype))
    kind = dtype == "float32", number, TILES, builder.threads
    builder.call("multiply", rows, columns, outputs, *kind, weight, x, bias, residual, y)
    return (y,)


def _write_gated(
    builder: TapeBuilder, run: Run, x: Value, weight: Value, bias: Value | None
) -> Sequence[Operand]:
    name = activation_name(run)
    demand_bfloat16(weight=weight, x=x, bias=bias)
    demand(name in GATES, f"there is no {name} in the kernel")
    outputs, columns = weight.shape[0] // 2, weight.shape[1]
    rows = count_rows(builder, x, columns)
    kind = GATES.index(name), TILES, builder.threads
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs))
    builder.call("multiply_gated", rows, columns, outputs, *kind, weight, x, bias, y)
    return (y,)


def write_gate(builder: TapeBuilder, run: Run, both: Value, y: Value) -> None:
    """y is the gate of a gated product: of gates, and behind them what these are multiplied with, a piece of the tape's memory that is released."""
    kind = GATES.index(activation_name(run)), builder.threads
    builder.call("gate", prod(y.shape[:-1]), y.shape[-1], *kind, both, y)
    builder.release(both.place)


def _plain_in_c(run: Run, context: Context) -> str:
    return _plain(run, context) or by_types(_write)(run, context)


def _finished_in_c(run: Run, context: Context) -> str:
    is_plain = run.attrs["kind"] == "linear" and "product_dtype" not in run.attrs
    return by_types(_write)(run, context) if is_plain else "it is not a plain linear"


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


def gated_product_bytes(run: Run, x: Layout, weight: Layout, *others: Layout | None) -> int:
    """One of gate and up; of one row both."""
    half = x.count // x.shape[-1] * weight.shape[0] // 2 * x.item if x.count else 0
    return 2 * half if x.count == x.shape[-1] else half


PLAIN = Kernel(
    "linear_plain",
    "",
    lambda run: F.linear,
    "the weight as it is stored, no transpose",
    _plain,
    workspace=NOTHING,
    in_rows=True,
)
PRODUCTS = (
    kernel(
        "linear_bfloat16",
        "linear",
        _write,
        lambda run: F.linear,
        "a kernel that reads the weight at memory speed, of few rows and many",
        _plain_in_c,
        held=NOTHING.held,
    ),
    Kernel(
        "linear_float32",
        "linear",
        _linear_float32,
        "oneDNN's inner product instead of the BLAS: 1.2 to 3 times as fast for small batches",
        _large_float32,
        workspace=NOTHING,
        in_rows=True,
    ),
    kernel(
        "linear_wide",
        "linear",
        _write,
        _linear_wide,
        "the weight widened piece by piece, not as a whole",
        _widened,
        held=_linear_wide_bytes,
    ),
)
"""Linear layers by themselves; a gated product uses the first that takes it."""
BFLOAT16 = PRODUCTS[0]
GATED = kernel(
    "gated_product",
    "gated_product",
    _write_gated,
    _gated_product,
    "gate and up in tensors of their own, multiplied in place",
    _gates_linear,
    _as_gated,
    held=gated_product_bytes,
)
FINISHED = kernel(
    "finished_product",
    "product",
    _write,
    _finished_product,
    "what comes after it in the kernel of the product",
    _finished_in_c,
    held=_finished_product_bytes,
)
KERNELS = (
    GATED,
    FINISHED,
    *PRODUCTS,
    *(product.of("matmul", as_linear) for product in (*PRODUCTS[:2], PLAIN, PRODUCTS[2])),
)
