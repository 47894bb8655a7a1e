# SPDX-License-Identifier: Apache-2.0
"""The kernel table of the CPU. The kernels are in `nnfront.runtime`; their docstrings have the numbers behind the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from nnfront.backends.select import ACCEPTED, Context, Rule
from nnfront.ir import TensorType, TupleType
from nnfront.lower.instructions import Run

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


def _as_rotated(run: Run, context: Context) -> Run | str:
    """Rope by tables of the whole head, which are the same for all layers."""
    if run.attrs.get("interleaved", False):
        return "neighbours are pairs, not halves"
    x, cos, sin = run.inputs
    return replace(run, inputs=(x, *_tables(run, x, cos, sin, context)))


def _as_rotated_attention(run: Run, context: Context) -> Run | str:
    """Attention after rope by such tables, its heads as attributes."""
    if run.attrs.get("interleaved", False):
        return "neighbours are pairs, not halves"
    qkv, cos, sin, *rest = run.inputs
    width, y = context.tensor(qkv).shape[-1], context.tensor(run.outputs[0])
    heads, size = y.shape[2:]
    if not (isinstance(width, int) and isinstance(heads, int) and isinstance(size, int)):
        return "the number of heads is no constant"
    attrs = {**run.attrs, "heads": heads, "groups": (width // size - heads) // 2}
    return replace(run, inputs=(qkv, *_tables(run, qkv, cos, sin, context), *rest), attrs=attrs)


def _tables(run: Run, x: int, cos: int, sin: int, context: Context) -> tuple[int, ...]:
    """The tables by which `x` is rotated, made where the first of their readers is."""
    dtype = "float64" if context.tensor(x).dtype == "float64" else "float32"
    made = context.shared.get(("rope_tables", cos, sin, dtype))
    if made is None:
        *outer, pairs = context.tensor(cos).shape
        type = TensorType((*outer, 1, 2 * pairs), dtype)
        made = context.emit(
            run, "rope", (cos, sin), {"dtype": dtype}, TupleType((type, type)), kernel="rope_tables"
        )
        context.shared["rope_tables", cos, sin, dtype] = made
    return made


def _always(run: Run, context: Context) -> str:
    return ACCEPTED


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


def _over_last_axis(run: Run, context: Context) -> str:
    x, weight, bias = run.inputs
    if run.attrs.get("axes") != (context.tensor(x).ndim - 1,):
        return "it is not over the last axis alone"
    if not context.is_none(bias):
        return "it has a bias"
    same = context.is_none(weight) or context.tensor(weight).dtype == context.tensor(x).dtype
    return ACCEPTED if same else "weight and rows differ in dtype"


def _norm_of_sum(run: Run, context: Context) -> str:
    x, residual, *vectors = run.inputs
    if context.is_none(x) or context.is_none(residual):
        return "it is no sum of two tensors"
    if "normalized_shape" in run.attrs:
        return "it is a layer norm"
    y, *operands = (context.tensor(slot) for slot in (run.outputs[0], x, residual))
    if y.dtype != "bfloat16" or any(operand != y for operand in operands):
        return "the sum is not of two tensors in bfloat16 of one shape"
    return _over_last_axis(replace(run, inputs=(x, *vectors)), context)


def _with_cache(run: Run, context: Context) -> str:
    return "there is no cache" if context.is_none(run.inputs[3]) else _softmax_only(run, context)


def _without_cache(run: Run, context: Context) -> str:
    return _softmax_only(run, context) if context.is_none(run.inputs[3]) else "there is a cache"


def _softmax_only(run: Run, context: Context) -> str:
    if not context.is_none(run.inputs[4]):
        return "it has sinks"
    return "it has a softcap" if "softcap" in run.attrs else ACCEPTED


def _no_scale_dtype(run: Run, context: Context) -> str:
    return "it computes scores in another dtype" if "scale_dtype" in run.attrs else ACCEPTED


def _as_gated(run: Run, context: Context) -> Run:
    """The product that the kernel is to use as an attribute: the one that a linear of these operands gets."""
    x, weight, bias = run.inputs
    product = replace(run, op="linear", inputs=(x, weight, bias), attrs={})
    kernels = (rule.kernel for rule in CPU if rule.op == "linear" and not rule.accepts(product, context))
    return replace(run, attrs={**run.attrs, "product": next(kernels, "linear_plain")})


def _gated(run: Run, context: Context) -> str:
    x, weight, _ = run.inputs
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    return ACCEPTED if context.tensor(weight).dtype == context.tensor(x).dtype else "operands differ in dtype"


def _per_channel(stored: str, scale: str | None = None) -> Callable[[Run, Context], str]:
    """Weights in `stored` with one scale for each output, in `scale` or, if None, in the dtype of x."""

    def accepts(run: Run, context: Context) -> str:
        x, weight, scales, zeros, *_ = run.inputs
        attrs = run.attrs
        if context.tensor(weight).dtype != stored:
            return f"the weight is {context.tensor(weight).dtype}"
        if attrs["kind"] != "linear" or "product_dtype" in attrs:
            return "it is not a plain linear"
        if (
            "packed_axis" in attrs
            or "group_size" in attrs
            or attrs["axis"] != 1
            or not context.is_none(zeros)
        ):
            return "the weight has no single scale for each output"
        dtype = context.tensor(x).dtype
        if dtype not in ("float32", "float16", "bfloat16"):
            return f"x is {dtype}"
        if context.tensor(scales).dtype != (scale or dtype):
            return f"scales are {context.tensor(scales).dtype}, not {scale or dtype}"
        return ACCEPTED

    return accepts


def _grouped(stored: str) -> Callable[[Run, Context], str]:
    """Weights in `stored`, 4 bits if it is uint8, with scales for groups along the input axis, in the dtype of x."""

    def accepts(run: Run, context: Context) -> str:
        x, weight, scales, *_ = run.inputs
        attrs = run.attrs
        if context.tensor(weight).dtype != stored or (stored == "uint8") != ("packed_axis" in attrs):
            return f"the weight is {context.tensor(weight).dtype}, and not in {4 if stored == 'uint8' else 8} bits"
        if attrs["kind"] != "linear" or "product_dtype" in attrs:
            return "it is not a plain linear"
        if attrs["axis"] != 1 or attrs.get("packed_axis", 1) != 1:
            return "groups or pairs are not along the input axis"
        dtype = context.tensor(x).dtype
        if dtype not in ("float32", "float16", "bfloat16"):
            return f"x is {dtype}"
        if context.tensor(scales).dtype != dtype:
            return f"scales are {context.tensor(scales).dtype}, not {dtype}"
        return ACCEPTED

    return accepts


def _rotated_heads(run: Run, context: Context) -> str:
    cos, sinks = run.inputs[1], run.inputs[4]
    if not context.is_none(sinks):
        return "it has sinks"
    if "softcap" in run.attrs:
        return "it has a softcap"
    size, rotated = context.tensor(run.outputs[0]).shape[3], context.tensor(cos).shape[-1]
    return ACCEPTED if rotated == size else f"{rotated} of {size} features are rotated"


def _finished(run: Run, context: Context) -> str:
    """A product in bfloat16, and nothing but a residual of its shape and a cast to float32 after it."""
    x, weight, _, scale, residual = run.inputs
    if run.attrs["kind"] != "linear" or "product_dtype" in run.attrs:
        return "it is not a plain linear"
    if "activation" in run.attrs or "scale" in run.attrs or not context.is_none(scale):
        return "more than a residual and a cast comes after it"
    if run.attrs.get("dtype", "float32") != "float32":
        return f"the result is {run.attrs['dtype']}"
    operands = (x, weight) if context.is_none(residual) else (x, weight, residual)
    if any(context.tensor(slot).dtype != "bfloat16" for slot in operands):
        return "operands are not all bfloat16"
    is_like = (
        context.is_none(residual) or context.tensor(residual).shape == context.tensor(run.outputs[0]).shape
    )
    return ACCEPTED if is_like else "the residual is broadcast"


_FEW_ROWS = "few rows: a kernel that reads the weight at memory speed; more rows: oneDNN"
_END = (
    "few rows: residual and cast in the kernel of the product; more rows: the sum in the product's own memory"
)
_ONEDNN = "oneDNN's inner product instead of the BLAS: 1.2 to 3 times as fast for few rows"
_PIECES = "the weight widened piece by piece, not as a whole"
_TRANSPOSED = "the weight as it is stored, no transpose"
_BYTES = "few rows: a kernel that reads a byte for each weight; more rows: decoded piece by piece, scales on the result"
_DECODED = "few rows: a kernel that reads codes; more rows: decoded piece by piece, by moving bits; activations are not rounded"
_GROUPS = "few rows: a kernel that reads codes, and scales the sums of groups; more rows: dequantised piece by piece"
_FLASH = "torch's flash attention: no matrix of scores"

CPU: tuple[Rule, ...] = (
    Rule("qkv_attention", "qkv_attention", "q and k rotated at once", _rotated_heads, _as_rotated_attention),
    Rule(
        "gated_product",
        "gated_product",
        "gate and up in tensors of their own, multiplied in place",
        _gated,
        _as_gated,
    ),
    Rule("product", "finished_product", _END, _finished),
    Rule("quantized_product", "int8_product", _BYTES, _per_channel("int8")),
    Rule("quantized_product", "int8_groups_product", _GROUPS, _grouped("int8")),
    Rule("quantized_product", "int4_product", _GROUPS, _grouped("uint8")),
    Rule("quantized_product", "fp8_product", _DECODED, _per_channel("float8_e4m3fn", "float32")),
    Rule("quantized_gated_product", "int8_gated_product", _BYTES, _per_channel("int8")),
    Rule("quantized_gated_product", "int8_groups_gated_product", _GROUPS, _grouped("int8")),
    Rule("quantized_gated_product", "int4_gated_product", _GROUPS, _grouped("uint8")),
    Rule("quantized_gated_product", "fp8_gated_product", _DECODED, _per_channel("float8_e4m3fn", "float32")),
    Rule("moe_mlp", "moe_mlp_sorted", "the experts that were chosen, each with its tokens at once", _always),
    Rule("linear", "linear_bfloat16", _FEW_ROWS, _bfloat16),
    Rule("linear", "linear_float32", _ONEDNN, _large_float32),
    Rule("linear", "linear_wide", _PIECES, _widened),
    Rule("matmul", "linear_bfloat16", _FEW_ROWS, _bfloat16, as_linear),
    Rule("matmul", "linear_float32", _ONEDNN, _large_float32, as_linear),
    Rule("matmul", "linear_plain", _TRANSPOSED, _plain, as_linear),
    Rule("matmul", "linear_wide", _PIECES, _widened, as_linear),
    Rule("rms_norm", "rms_norm_last", "half the passes over the rows, rounded once", _over_last_axis),
    Rule("norm_residual", "rms_norm_of_sum", "few rows: the sum in the kernel of the norm", _norm_of_sum),
    Rule("rope", "rope_rotated", "tables made once for all layers, then three calls", _always, _as_rotated),
    Rule(
        "attention",
        "attention_cached",
        "one query for each group of heads: no copies of keys and values",
        _with_cache,
    ),
    Rule("attention", "attention_fused", _FLASH, _without_cache),
    Rule("scaled_dot_product_attention", "sdpa_fused", _FLASH, _no_scale_dtype),
)
