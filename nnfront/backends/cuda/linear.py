# SPDX-License-Identifier: Apache-2.0
"""Linear layers on CUDA: launches of `nnfront_kernels`.

Whether a kernel takes a call is the kernel's own `accepts`, asked for the weight's sizes and the target's architecture. How many rows there
are is known on a call only: `many_rows` takes the kernel for few rows, one for many, or cuBLAS. All of them run in Triton's interpreter as well
(TRITON_INTERPRET=1), on tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cpu.linear import as_linear
from nnfront.backends.cuda import many_rows
from nnfront.backends.cuda.kernel_package import arch_of, asked, kernel_module
from nnfront.backends.cuda.row_norm import RowNorm, is_inside, of_norm
from nnfront.backends.kernel import ACCEPTED, Accepts, Bind, Context, Kernel
from nnfront.ir import TensorType
from nnfront.lower import Run
from nnfront.passes.weight_layouts import LAYOUTS
from nnfront.quant_format import FORMATS, QuantFormat

ACTIVATIONS = {
    ("silu", None): "silu",
    ("gelu", "none"): "gelu",
    ("gelu", None): "gelu",
    ("gelu", "tanh"): "gelu_tanh",
}
OUT_DTYPES = ("float16", "bfloat16", "float32")
FORMATS_READ = ("int4", "uint4", "int8", "fp8")
# Fusions whose gate and up rows alternate in the weight; the same kernels run plain products.
GATED = frozenset({"interleaved_product", "int4_gated_product", "int8_gated_product", "fp8_gated_product"})
CONSTANT = "constant_weights"  # a note on an instruction, and the kernels' option
_TURNED = "something else reads the weight as [in, out], and it is not kept twice"


def _noting(run: Run, context: Context) -> Run:
    """The call, with a note that its weight does not change between launches: kernels fetch that while the launch before theirs ends."""
    if not context.is_bound_at_load(run.inputs[1]):
        return run
    return replace(run, attrs={**run.attrs, CONSTANT: True})


def _as_product(run: Run, context: Context) -> Run | str:
    """A plain product as one without an end."""
    if run.op == "matmul" and context.is_bound_at_load(run.inputs[1]):
        return _TURNED
    seen = as_linear(run, context) if run.op == "matmul" else run
    if isinstance(seen, str):
        return seen
    absent = context.frame.constant(None)
    attrs = {"kind": "linear", **({"dtype": run.attrs["out_dtype"]} if "out_dtype" in run.attrs else {})}
    return _noting(replace(seen, op="product", inputs=(*seen.inputs, absent, absent), attrs=attrs), context)


def _ends(run: Run, context: Context, residual: int | None) -> str:
    """Why the kernels cannot do what comes after the product; "" if they can."""
    attrs, weight = run.attrs, run.inputs[1]
    if attrs.get("kind") != "linear":
        return "the weight is not [out, in]"
    maker = context.makers.get(weight)
    if maker is not None and maker.op == "permute_dims":
        return (
            _TURNED if context.is_bound_at_load(weight) else "the weight is a view, its rows are not adjacent"
        )
    if "product_dtype" in attrs:
        return "the product has a dtype of its own"
    if "activation" in attrs and (attrs["activation"], attrs.get("approximate")) not in ACTIVATIONS:
        return f"there is no {attrs['activation']} in the kernel"
    if attrs.get("dtype", "float32") not in OUT_DTYPES:
        return f"the result is {attrs['dtype']}"
    if residual is not None and not context.is_none(residual):
        if context.tensor(residual).shape != context.tensor(run.outputs[0]).shape:
            return "the residual is broadcast"
    return ACCEPTED


def _scale(run: Run, context: Context, bias: int, scale: int) -> str:
    if not context.is_none(scale):
        return "the scale is a tensor"
    if "scale" in run.attrs and ("activation" in run.attrs or not context.is_none(bias)):
        return "the scale comes after bias and activation"
    return ACCEPTED


def _refusal(kernel: str, run: Run, context: Context, x: TensorType, *ends: int, **facts: Any) -> str:
    """Why a kernel cannot take a product with one row of x, `ends` being bias, scale and residual; "" if it can."""
    bias, scale, residual = (*ends, None, None)[:3]
    n, k = context.tensor(run.inputs[1]).shape[0], x.shape[-1]
    if not isinstance(n, int) or not isinstance(k, int):
        return "the weight's sizes are not known"
    shape = kernel_module("tiles").MatmulShape(1, n, k, aligned=k % 16 == 0, gated=run.op in GATED, **facts)
    return (
        _ends(run, context, residual)
        or (ACCEPTED if scale is None or bias is None else _scale(run, context, bias, scale))
        or asked(kernel, shape, x.dtype, context)
    )


def _dense(run: Run, context: Context) -> str:
    x, weight, *ends = run.inputs
    if context.tensor(x).dtype != context.tensor(weight).dtype:
        return "operands differ in dtype"
    return _refusal("matmul", run, context, context.tensor(x), *ends)


def _unpacked(run: Run, context: Context) -> str:
    """Why gate and up do not alternate in the weight."""
    if refusal := _ends(run, context, None):
        return refusal
    if not context.is_bound_at_load(run.inputs[1]):
        return "the weight is not known before the call"
    return "something else reads the weight as it is, and it is not kept twice"


def _unpacked_quantized(run: Run, context: Context) -> str:
    """The same for a quantised weight, or that it is in no format that a kernel reads."""
    format = QuantFormat.of(run.attrs)
    if format.name not in FORMATS_READ:
        return f"the format is {format}, it takes {', '.join(FORMATS_READ)}"
    return _unpacked(run, context) + f", or no kernel reads {format}"


def reads(format: QuantFormat) -> bool:
    """Whether a kernel reads a format, in groups of this size."""
    known = FORMATS[format.name]
    if format.name not in FORMATS_READ or not format.is_like(known) or format.symmetric != known.symmetric:
        return False
    if known.group_size is None and format.group_size is None:
        return True
    return not known.fixed_groups and format.group_size in kernel_module("quantized").GROUPS


def _quantized_accepts(kernel: str) -> Accepts:
    def accepts(run: Run, context: Context) -> str:
        x, _, scales, zeros, *ends = run.inputs
        groups, depth = context.tensor(scales).shape[0], context.tensor(x).shape[-1]
        if not isinstance(groups, int) or not isinstance(depth, int):
            return "the weight's sizes are not known"
        group = 0 if groups == 1 and kernel == "matmul_int8" else depth // groups
        facts = {"group": group, "zero_points": not context.is_none(zeros)}
        return _refusal(kernel, run, context, context.tensor(x), *ends, **facts)

    return accepts


def _fp8_accepts(*, native: bool) -> Accepts:
    """Float8 weights with a scale for each output, where the tensor cores multiply float8 themselves, or do not."""

    def accepts(run: Run, context: Context) -> str:
        rows, _, scales, _, *ends = run.inputs
        x, arch, format = context.tensor(rows), arch_of(context.target), QuantFormat.of(run.attrs)
        if format != FORMATS["fp8"]:
            return f"the format is {format}, it takes fp8"
        if (found := context.tensor(scales).dtype) != format.scale_dtype:
            return f"scales are {found}, not {format.scale_dtype}"
        if native and arch not in kernel_module("matmul_fp8").NATIVE:
            return f"{arch} has no tensor cores for float8"
        rounded = kernel_module("quantize_fp8").QuantizeShape(1, x.shape[-1])
        if refusal := asked("quantize_fp8", rounded, x.dtype, context):
            return f"activations cannot be rounded: {refusal}"
        codes = TensorType(x.shape, format.dtype)
        return _refusal("matmul_fp8", run, context, codes, *ends)

    return accepts


_ROWS = "small batches: K split over all SMs, summed in order; larger ones: cuBLAS, or tiles with the end of the product in registers"
_TILES = "gate and its partner in one tile: one pass, no intermediate"
_NIBBLES = "weights stay packed in memory and are unpacked in registers, scaled after the dot"
_FLOAT8 = "activations rounded to float8 on the device, a scale for each row; scales are applied to the sums"
_DECODED = "activations rounded to float8, a scale for each row; quantised values decoded in registers and multiplied as float16"


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows have adjacent elements."""
    return _adjacent(x.reshape(-1, x.shape[-1]))


def _adjacent(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with adjacent elements in a row: weights have them, what a caller passes in the place of one may not."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _epilogue(run: Run) -> dict[str, Any]:
    """What the kernel does to a finished tile, from the region's attributes."""
    attrs = run.attrs
    options: dict[str, Any] = {}
    if "activation" in attrs:
        options["activation"] = ACTIVATIONS[attrs["activation"], attrs.get("approximate")]
    if "scale" in attrs:
        options["scale"] = float(attrs["scale"])
    if "dtype" in attrs:
        options["out_dtype"] = getattr(torch, attrs["dtype"])
    return options


def _like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A result in rows with the leading axes of x."""
    return y.view(*x.shape[:-1], y.shape[-1])


def _product(run: Run) -> Callable[..., Any]:
    options = {**_epilogue(run), "constant": run.attrs.get(CONSTANT, False), "gated": run.op in GATED}

    def triton_product(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: None = None,
        residual: torch.Tensor | None = None,
        norm: RowNorm | None = None,
    ) -> torch.Tensor:
        added = None if residual is None else in_rows(residual)
        y = many_rows.product(in_rows(x), _adjacent(weight), bias=bias, residual=added, norm=norm, **options)
        return _like(x, y)

    return triton_product


def _quantized(name: str) -> Bind:
    def make(run: Run) -> Callable[..., Any]:
        kernel, unpack = kernel_module(name), kernel_module("unpack_weight")
        options, gated = _epilogue(run), run.op in GATED

        def triton_quantized(
            x: torch.Tensor,
            weight: torch.Tensor,
            scales: torch.Tensor,
            zeros: torch.Tensor | None,
            bias: torch.Tensor | None,
            scale: None = None,
            residual: torch.Tensor | None = None,
            norm: RowNorm | None = None,
        ) -> torch.Tensor:
            rows, added = in_rows(x), None if residual is None else in_rows(residual)
            if norm is not None and not is_inside(norm, rows):
                rows, norm = norm.of(rows), None
            if many_rows.unpacks(rows):
                dense = unpack.launch(weight, scales, zeros, dtype=x.dtype)
                return _like(
                    x, many_rows.product(rows, dense, bias=bias, residual=added, gated=gated, **options)
                )
            stored = (weight, scales) if zeros is None else (weight, scales, zeros)
            more = {**many_rows.added(x, added, options), CONSTANT: run.attrs.get(CONSTANT, False)}
            more |= {} if norm is None else norm.options
            return _like(x, kernel.launch(rows, *stored, bias=bias, gated=gated, **more))

        return triton_quantized

    return make


def _fp8(run: Run) -> Callable[..., Any]:
    kernel, rounding, options = kernel_module("matmul_fp8"), kernel_module("quantize_fp8"), _epilogue(run)
    plain = not options and run.op not in GATED
    options["gated"] = run.op in GATED

    def triton_fp8(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: None,
        bias: torch.Tensor | None,
        scale: None = None,
        residual: torch.Tensor | None = None,
        norm: RowNorm | None = None,
    ) -> torch.Tensor:
        codes, x_scales = rounding.launch(in_rows(x), **({} if norm is None else norm.options))
        if plain and many_rows.takes_scaled(x, codes, weight, bias):
            y = _like(x, many_rows.scaled(codes, weight, x_scales, scales, bias))
            return y if residual is None else y + residual
        added = None if residual is None else in_rows(residual)
        more = {**many_rows.added(x, added, options), CONSTANT: run.attrs.get(CONSTANT, False)}
        more.setdefault("out_dtype", x.dtype)
        return _like(x, kernel.launch(codes, weight, x_scales, scales, bias=bias, **more))

    return triton_fp8


_PRODUCT = Kernel("triton_product", "product", _product, _ROWS, _dense, _noting)
_GATED = Kernel(
    "triton_gated",
    "interleaved_product",
    _product,
    _TILES,
    _dense,
    _noting,
    layout=LAYOUTS["interleaved_product"],
)


def _quantized_kernels(name: str) -> tuple[Kernel, Kernel]:
    """One kernel for a product and for a gated one."""
    module = f"matmul_{name}"
    plain = Kernel(
        f"triton_{name}",
        f"{name}_product",
        _quantized(module),
        _NIBBLES,
        _quantized_accepts(module),
        _noting,
        layout=LAYOUTS[f"{name}_product"],
    )
    gated = f"{name}_gated_product"
    return plain, replace(plain, op=gated, layout=LAYOUTS[gated])


_PRODUCTS = (
    _GATED,
    replace(_GATED, op="gated_product", accepts=_unpacked, layout=None),
    replace(_GATED, op="quantized_gated_product", accepts=_unpacked_quantized, layout=None),
    *_quantized_kernels("int4"),
    *_quantized_kernels("int8"),
    *(
        Kernel("triton_fp8", op, _fp8, why, _fp8_accepts(native=native), _noting, layout=LAYOUTS.get(op))
        for op in ("quantized_product", "fp8_gated_product")
        for why, native in ((_FLOAT8, True), (_DECODED, False))
    ),
    _PRODUCT,
)
KERNELS = (
    *map(of_norm, _PRODUCTS),
    *_PRODUCTS,
    _PRODUCT.of("linear", _as_product),
    _PRODUCT.of("matmul", _as_product),
)
