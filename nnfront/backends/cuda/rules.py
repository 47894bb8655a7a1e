# SPDX-License-Identifier: Apache-2.0
"""The kernel table of CUDA: products on the Triton kernels of `nnfront_kernels`, all else in torch on the device.

Whether a kernel takes a call is the kernel's own `accepts`, asked for the weight's sizes and the target's architecture. How many rows there
are is known on a call only: then `nnfront.backends.cuda.linear` takes the kernel for few rows or that for many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nnfront.backends.cpu import rules as cpu
from nnfront.backends.cuda import attention_rules as cuda_attention
from nnfront.backends.cuda import rowwise_rules as cuda_rows
from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.backends.select import ACCEPTED, Context, Rule
from nnfront.ir import TensorType
from nnfront.lower.instructions import Run

ACTIVATIONS = {
    ("silu", None): "silu",
    ("gelu", "none"): "gelu",
    ("gelu", None): "gelu",
    ("gelu", "tanh"): "gelu_tanh",
}
OUT_DTYPES = ("float16", "bfloat16", "float32")
FLOAT8 = "float8_e4m3fn"
_TURNED = "something else reads the weight as [in, out], and it is not kept twice"


def _as_product(run: Run, context: Context) -> Run | str:
    """A plain product as one without an end."""
    if run.op == "matmul" and context.is_bound_at_load(run.inputs[1]):
        return _TURNED
    seen = cpu.as_linear(run, context) if run.op == "matmul" else run
    if isinstance(seen, str):
        return seen
    absent = context.frame.constant(None)
    attrs = {"kind": "linear", **({"dtype": run.attrs["out_dtype"]} if "out_dtype" in run.attrs else {})}
    return replace(seen, op="product", inputs=(*seen.inputs, absent, absent), attrs=attrs)


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


def _asked(module: str, x: TensorType, weight: TensorType, context: Context, **facts: Any) -> str:
    """What a kernel's own `accepts` says to one row of x."""
    n, k = weight.shape[0], x.shape[-1]
    if not isinstance(n, int) or not isinstance(k, int):
        return "the weight's sizes are not known"
    shape = kernel_module("tiles").MatmulShape(1, n, k, aligned=k % 16 == 0, **facts)
    reason: str | None = kernel_module(module).accepts(shape, x.dtype, arch_of(context.target))
    return reason or ACCEPTED


def _dense(run: Run, context: Context) -> str:
    x, weight, bias, scale, residual = run.inputs
    types = context.tensor(x), context.tensor(weight)
    if types[0].dtype != types[1].dtype:
        return "operands differ in dtype"
    return (
        _ends(run, context, residual)
        or _scale(run, context, bias, scale)
        or _asked("matmul", *types, context)
    )


def _gated(run: Run, context: Context) -> str:
    x, weight, _ = run.inputs
    types = context.tensor(x), context.tensor(weight)
    if types[0].dtype != types[1].dtype:
        return "operands differ in dtype"
    return _ends(run, context, None) or _asked("matmul", *types, context, gated=True)


def _unpacked(run: Run, context: Context) -> str:
    """Why gate and up do not alternate in the weight."""
    if run.attrs.get("kind") != "linear":
        return "the weight is not [out, in]"
    if not context.is_bound_at_load(run.inputs[1]):
        return "the weight is not known before the call"
    return "something else reads the weight as it is, and it is not kept twice"


def _unpacked_quantized(run: Run, context: Context) -> str:
    """The same for a weight in few bits, or that it is in no form that a kernel reads."""
    attrs, form = run.attrs, context.tensor(run.inputs[1]).dtype
    group = f"groups of {attrs['group_size']}" if "group_size" in attrs else "one scale for each output"
    return _unpacked(run, context) + f", or no kernel reads {form} with {group}"


def _quantized(kernel: str, *, gated: bool = False) -> Any:
    def accepts(run: Run, context: Context) -> str:
        x, weight, scales, zeros, bias, *ends = run.inputs
        groups, depth = context.tensor(scales).shape[0], context.tensor(x).shape[-1]
        if not isinstance(groups, int) or not isinstance(depth, int):
            return "the weight's sizes are not known"
        group = 0 if groups == 1 and kernel == "matmul_int8" else depth // groups
        facts = {"group": group, "zero_points": not context.is_none(zeros), "gated": gated}
        scale, residual = ends or (None, None)
        return (
            _ends(run, context, residual)
            or (ACCEPTED if scale is None else _scale(run, context, bias, scale))
            or _asked(kernel, context.tensor(x), context.tensor(weight), context, **facts)
        )

    return accepts


def _fp8(*, native: bool) -> Any:
    """Float8 weights with a scale for each output, where the tensor cores multiply float8 themselves, or do not."""

    def accepts(run: Run, context: Context) -> str:
        x, weight, scales, _, bias, *ends = run.inputs
        types, attrs, arch = (
            (context.tensor(x), context.tensor(weight)),
            run.attrs,
            arch_of(context.target),
        )
        if types[1].dtype != FLOAT8:
            return f"the weight is {types[1].dtype}"
        if attrs["axis"] != 1 or "group_size" in attrs or context.tensor(scales).dtype != "float32":
            return "the weight has no single float32 scale for each output"
        if native and arch not in kernel_module("matmul_fp8").NATIVE:
            return f"{arch} has no tensor cores for float8"
        rounding, k = kernel_module("quantize_fp8"), types[0].shape[-1]
        refusal = rounding.accepts(rounding.QuantizeShape(1, k), types[0].dtype, arch)
        if refusal:
            return f"activations cannot be rounded: {refusal}"
        scale, residual = ends or (None, None)
        codes = TensorType(types[0].shape, FLOAT8)
        return (
            _ends(run, context, residual)
            or (ACCEPTED if scale is None else _scale(run, context, bias, scale))
            or _asked("matmul_fp8", codes, types[1], context, gated=scale is None)
        )

    return accepts


def _experts(run: Run, context: Context) -> str:
    x, gate_up, down, experts, _ = run.inputs
    hidden, top_k = context.tensor(x).shape[1], context.tensor(experts).shape[1]
    count, size, _ = context.tensor(gate_up).shape
    if not all(isinstance(n, int) for n in (hidden, count, size, top_k)):
        return "sizes of the experts are not known"
    if (run.attrs["activation"], None) not in ACTIVATIONS and run.attrs["activation"] != "gelu_tanh":
        return f"there is no {run.attrs['activation']} in the kernel"
    module, arch, dtype = kernel_module("grouped_matmul"), arch_of(context.target), context.tensor(x).dtype
    routing = kernel_module("moe_routing")
    shapes = (
        module.GroupedShape(1, top_k, count, size, hidden, gated=True, gather=True),
        module.GroupedShape(1, top_k, count, hidden, context.tensor(down).shape[2], gather=False),
    )
    reasons = [module.accepts(shape, dtype, arch) for shape in shapes]
    reasons.append(routing.accepts(routing.RoutingShape(1, top_k, count), "int32", arch))
    return next((reason for reason in reasons if reason), ACCEPTED)


_SEGMENTS = "tokens sorted by expert on the device, one launch for all experts, shares added in order"
_ROWS = "few rows: K split over all SMs, summed in order; more: cuBLAS, or tiles with the end of the product in registers"
_TILES = "gate and its partner in one tile: one pass, no intermediate"
_NIBBLES = "weights stay packed in memory and are unpacked in registers, scaled after the dot"
_FLOAT8 = "activations rounded to float8 on the device, a scale for each row; scales are applied to the sums"
_DECODED = "activations rounded to float8, a scale for each row; codes decoded in registers and multiplied as float16"

CUDA: tuple[Rule, ...] = (
    Rule("interleaved_product", "triton_gated", _TILES, _gated),
    Rule("gated_product", "triton_gated", _TILES, _unpacked),
    Rule("quantized_gated_product", "triton_gated", _TILES, _unpacked_quantized),
    Rule("int4_product", "triton_int4", _NIBBLES, _quantized("matmul_int4")),
    Rule("int8_product", "triton_int8", _NIBBLES, _quantized("matmul_int8")),
    Rule("int4_gated_product", "triton_int4", _NIBBLES, _quantized("matmul_int4", gated=True)),
    Rule("int8_gated_product", "triton_int8", _NIBBLES, _quantized("matmul_int8", gated=True)),
    Rule("quantized_product", "triton_fp8", _FLOAT8, _fp8(native=True)),
    Rule("quantized_product", "triton_fp8", _DECODED, _fp8(native=False)),
    Rule("fp8_gated_product", "triton_fp8", _FLOAT8, _fp8(native=True)),
    Rule("fp8_gated_product", "triton_fp8", _DECODED, _fp8(native=False)),
    Rule("interleaved_experts", "triton_experts", _SEGMENTS, _experts),
    Rule("product", "triton_product", _ROWS, _dense),
    Rule("linear", "triton_product", _ROWS, _dense, _as_product),
    Rule("matmul", "triton_product", _ROWS, _dense, _as_product),
    *cuda_attention.RULES,
    *cuda_rows.RULES,
    *(rule for rule in cpu.CPU if rule.op in ("attention", "scaled_dot_product_attention", "rope")),
)
