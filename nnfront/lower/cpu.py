# SPDX-License-Identifier: Apache-2.0
"""The kernel table of the CPU. The kernels are in `nnfront.runtime`; their docstrings have the numbers behind the reasons."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from nnfront.ir import TensorType, TupleType
from nnfront.lower.instructions import Run
from nnfront.lower.select import Context, Rule

# Below this many elements a weight stays in the caches, and the time of a product is that of the call.
LARGE = 1 << 20


def _as_linear(run: Run, context: Context) -> Run | None:
    """A product with a matrix that is a transpose, or a weight, as `linear`, which has the weight the other way around."""
    x, right = run.inputs
    if not isinstance(context.type(right), TensorType) or context.tensor(right).ndim != 2:
        return None
    maker = context.makers.get(right)
    if maker is not None and maker.op == "permute_dims" and maker.attrs["axes"] == (1, 0):
        weight = maker.inputs[0]
    elif context.is_bound_at_load(right):
        type = context.tensor(right)
        (weight,) = context.emit(
            run, "permute_dims", (right,), {"axes": (1, 0)}, TensorType(type.shape[::-1], type.dtype)
        )
    else:
        return None
    return replace(run, op="linear", inputs=(x, weight, context.frame.constant(None)))


def _as_rotated(run: Run, context: Context) -> Run | None:
    """Rope by tables of the whole head, which are the same for all layers."""
    if run.attrs.get("interleaved", False):
        return None
    x, cos, sin = run.inputs
    dtype = "float64" if context.tensor(x).dtype == "float64" else "float32"
    made = context.shared.get(("rope_tables", cos, sin, dtype))
    if made is None:
        *outer, pairs = context.tensor(cos).shape
        type = TensorType((*outer, 1, 2 * pairs), dtype)
        made = context.emit(
            run, "rope", (cos, sin), {"dtype": dtype}, TupleType((type, type)), kernel="rope_tables"
        )
        context.shared["rope_tables", cos, sin, dtype] = made
    return replace(run, inputs=(x, *made))


def _is_always(run: Run, context: Context) -> bool:
    return True


def _is_plain(run: Run, context: Context) -> bool:
    return not run.attrs


def _is_widened(run: Run, context: Context) -> bool:
    return run.attrs == {"out_dtype": "float32"} and context.tensor(run.inputs[1]).dtype in (
        "float16",
        "bfloat16",
    )


def _is_bfloat16(run: Run, context: Context) -> bool:
    return not run.attrs and context.tensor(run.inputs[1]).dtype == "bfloat16"


def _is_large_float32(run: Run, context: Context) -> bool:
    weight = context.tensor(run.inputs[1])
    sizes = [size for size in weight.shape if isinstance(size, int)]
    return not run.attrs and weight.dtype == "float32" and len(sizes) == 2 and prod(sizes) >= LARGE


def _is_over_last_axis(run: Run, context: Context) -> bool:
    x, weight, bias = run.inputs
    same = context.is_none(weight) or context.tensor(weight).dtype == context.tensor(x).dtype
    return run.attrs.get("axes") == (context.tensor(x).ndim - 1,) and context.is_none(bias) and same


def _has_cache(run: Run, context: Context) -> bool:
    return not context.is_none(run.inputs[3]) and _is_softmax_only(run, context)


def _has_no_cache(run: Run, context: Context) -> bool:
    return context.is_none(run.inputs[3]) and _is_softmax_only(run, context)


def _is_softmax_only(run: Run, context: Context) -> bool:
    return context.is_none(run.inputs[4]) and "softcap" not in run.attrs


def _has_no_scale_dtype(run: Run, context: Context) -> bool:
    return "scale_dtype" not in run.attrs


_GEMV = "one row: torch's own gemv, which reads at memory speed; more rows: oneDNN"
_ONEDNN = "oneDNN's inner product instead of the BLAS: 1.2 to 3 times as fast for few rows"
_PIECES = "the weight widened piece by piece, not as a whole"
_TRANSPOSED = "the weight as it is stored, no transpose"

CPU: tuple[Rule, ...] = (
    Rule("linear", "linear_bfloat16", _GEMV, _is_bfloat16),
    Rule("linear", "linear_float32", _ONEDNN, _is_large_float32),
    Rule("linear", "linear_wide", _PIECES, _is_widened),
    Rule("matmul", "linear_bfloat16", _GEMV, _is_bfloat16, _as_linear),
    Rule("matmul", "linear_float32", _ONEDNN, _is_large_float32, _as_linear),
    Rule("matmul", "linear_plain", _TRANSPOSED, _is_plain, _as_linear),
    Rule("matmul", "linear_wide", _PIECES, _is_widened, _as_linear),
    Rule("rms_norm", "rms_norm_last", "half the passes over the rows, rounded once", _is_over_last_axis),
    Rule(
        "rope", "rope_rotated", "tables made once for all layers, then three calls", _is_always, _as_rotated
    ),
    Rule(
        "attention",
        "attention_cached",
        "one query for each group of heads: no copies of keys and values",
        _has_cache,
    ),
    Rule("attention", "attention_fused", "torch's flash attention: no matrix of scores", _has_no_cache),
    Rule(
        "scaled_dot_product_attention",
        "sdpa_fused",
        "torch's flash attention: no matrix of scores",
        _has_no_scale_dtype,
    ),
)
