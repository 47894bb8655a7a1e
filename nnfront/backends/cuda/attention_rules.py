# SPDX-License-Identifier: Apache-2.0
"""The kernel table of CUDA for attention: rope and the append to the cache in one kernel, then one for a single query or for many.

Lengths and tables of pages are read on the device, so what is launched does not depend on how many tokens a cache holds.
"""

from __future__ import annotations

from dataclasses import replace

from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.backends.select import ACCEPTED, Context, Rule
from nnfront.dims import same
from nnfront.ir import CacheLayerType, TensorType
from nnfront.lower.instructions import Run


def _takes(context: Context, q: TensorType, k: TensorType, v: TensorType) -> str:
    """What the kernels' own `accepts` say: q [batch, seq, heads, size], k and v [batch, seq, kv_heads, ...]."""
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    if not all(isinstance(size, int) for size in sizes):
        return "the number of heads is no constant"
    heads, kv_heads, size, value_size = sizes
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        return "operands differ in dtype"
    decode, prefill = kernel_module("attention_decode"), kernel_module("attention_prefill")
    arch = arch_of(context.target)
    few = decode.DecodeShape(1, heads, kv_heads, size, 1, value_size=value_size)
    many = prefill.PrefillShape(1, 2, heads, kv_heads, size, value_size=value_size)
    reasons = decode.accepts(few, q.dtype, arch), prefill.accepts(many, q.dtype, arch)
    return next((reason for reason in reasons if reason), ACCEPTED)


def _as_heads(run: Run, context: Context) -> Run | str:
    """Attention over a fused projection, its heads as attributes."""
    width, y = context.tensor(run.inputs[0]).shape[-1], context.tensor(run.outputs[0])
    heads, size = y.shape[2:]
    if not (isinstance(width, int) and isinstance(heads, int) and isinstance(size, int)):
        return "the number of heads is no constant"
    return replace(run, attrs={**run.attrs, "heads": heads, "groups": (width // size - heads) // 2})


def _reason(run: Run, context: Context, cache: int, q: TensorType, k: TensorType, v: TensorType) -> str:
    layer = context.type(cache)
    if isinstance(layer, CacheLayerType):
        if layer.dtype != q.dtype:
            return f"the cache holds {layer.dtype}, q is {q.dtype}"
    elif not same(q.shape[1], k.shape[1]):
        return "there are not as many keys as queries"
    elif "window" in run.attrs and not run.attrs.get("is_causal", True):
        return "there is a window that looks ahead"
    return _takes(context, q, k, v)


def _qkv(run: Run, context: Context) -> str:
    y = context.tensor(run.outputs[0])
    q = TensorType(y.shape, y.dtype)
    k = TensorType((*y.shape[:2], run.attrs["groups"], y.shape[3]), y.dtype)
    return _reason(run, context, run.inputs[3], q, k, k)


def _rotated(run: Run, context: Context) -> str:
    q, _, _, k, v, cache, _ = run.inputs
    return _reason(run, context, cache, *map(context.tensor, (q, k, v)))


def _plain(run: Run, context: Context) -> str:
    q, k, v, cache, _ = run.inputs
    return _reason(run, context, cache, *map(context.tensor, (q, k, v)))


_FUSED = "rope and append in one pass over the projection; keys and values read once for the heads of a group"
_PLAIN = "no matrix of scores; keys and values read once for the heads of a group"

RULES: tuple[Rule, ...] = (
    Rule("qkv_attention", "triton_qkv_attention", _FUSED, _qkv, _as_heads),
    Rule("rope_attention", "triton_rope_attention", _FUSED, _rotated),
    Rule("attention", "triton_attention", _PLAIN, _plain),
)
"""Rules for attention on CUDA, asked before those of torch."""
