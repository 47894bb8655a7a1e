# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA: one kernel that rotates, appends and attends for a token of each sequence, two for many tokens.

The host reserves room for the new tokens; where they go, how many came before and tables of pages are read on the device, so what is launched
does not depend on how many tokens a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.cuda.rope_angles import with_angles
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.dims import same
from nnfront.ir import StateLayerType, TensorType
from nnfront.lower import Run
from nnfront.state.layer import CacheLayer
from nnfront.state.lengths import SequenceLengths


def _takes(context: Context, q: TensorType, k: TensorType, v: TensorType) -> str:
    """What the kernels' own `accepts` say: q [batch, seq, heads, size], k and v [batch, seq, kv_heads, ...]."""
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    if not all(isinstance(size, int) for size in sizes):
        return "the number of heads is no constant"
    heads, kv_heads, size, value_size = sizes
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        return "operands differ in dtype"
    decode, prefill = kernel_module("attention_decode"), kernel_module("attention_prefill")
    few = decode.DecodeShape(1, heads, kv_heads, size, 1, value_size=value_size)
    many = prefill.PrefillShape(1, 2, heads, kv_heads, size, value_size=value_size)
    return asked("attention_decode", few, q.dtype, context) or asked(
        "attention_prefill", many, q.dtype, context
    )


def _as_heads(run: Run, context: Context) -> Run | str:
    """Attention over a fused projection, its heads as attributes."""
    width, y = context.tensor(run.inputs[0]).shape[-1], context.tensor(run.outputs[0])
    heads, size = y.shape[2:]
    if not (isinstance(width, int) and isinstance(heads, int) and isinstance(size, int)):
        return "the number of heads is no constant"
    qkv, cos, sin, cache, *others = run.inputs
    turn = with_angles(run, cos, sin, cache, context)
    attrs = {**run.attrs, "heads": heads, "groups": (width // size - heads) // 2}
    return replace(run, inputs=(qkv, *turn, cache, *others), attrs=attrs)


def _turned(run: Run, context: Context) -> Run:
    """Attention to what is rotated by angles of positions that are found on the device."""
    q, cos, sin, k, v, cache, *others = run.inputs
    turn = with_angles(run, cos, sin, cache, context)
    return replace(run, inputs=(q, k, v, *turn, cache, *others))


def _unturned(run: Run, context: Context) -> Run:
    """Attention as it is, with nothing to rotate by."""
    q, k, v, cache, *others = run.inputs
    absent = context.frame.constant(None)
    return replace(run, inputs=(q, k, v, absent, absent, cache, *others))


def _reason(run: Run, context: Context, cache: int, q: TensorType, k: TensorType, v: TensorType) -> str:
    layer = context.type(cache)
    if isinstance(layer, StateLayerType):
        if layer.dtype != q.dtype:
            return f"the cache holds {layer.dtype}, q is {q.dtype}"
        # There is no later token than the last one, so a single query sees all that is stored either way.
        if not run.attrs.get("is_causal", True) and not same(q.shape[1], 1):
            return "it sees later tokens too"
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
    q, k, v, _, _, cache, _ = run.inputs
    return _reason(run, context, cache, *map(context.tensor, (q, k, v)))


def why_not_bias(context: Context, q: int, *bias: int) -> str:
    """Why kernels cannot add a bias to scores; ACCEPTED if they can, or if there is none."""
    if not bias or context.is_none(bias[0]):
        return ACCEPTED
    dtype, kinds = context.tensor(bias[0]).dtype, (context.tensor(q).dtype, "float32", "bool")
    return ACCEPTED if dtype in kinds else f"the bias is {dtype}"


def _plain(run: Run, context: Context) -> str:
    q_slot, k, v, _, _, cache, _, *bias = run.inputs
    q, layer = context.tensor(q_slot), context.type(cache)
    if "value_size" in run.attrs:
        return "values are parts of keys"
    if reason := why_not_bias(context, q_slot, *bias):
        return reason
    if not context.is_none(k):
        return _reason(run, context, cache, q, context.tensor(k), context.tensor(v))
    assert isinstance(layer, StateLayerType)
    kept = (TensorType((*q.shape[:2], *buffer.shape), buffer.dtype) for buffer in layer.per_token)
    return _reason(run, context, cache, q, *kept)


_FUSED = "rope and append in one pass over the projection; keys and values read once for the heads of a group"
_PLAIN = "no matrix of scores; keys and values read once for the heads of a group"


# SequenceLengths up to this are all alike.
MIN_BUCKET = 128


def length_bucket(longest: int) -> int:
    """The power of two up to which lengths are alike: how many blocks share a sequence depends on it alone."""
    return max(1 << max(longest - 1, 0).bit_length(), MIN_BUCKET)


def options_of(run: Run) -> dict[str, Any]:
    """What the kernels take besides tensors, but for the window."""
    names = {"scale": "scale", "softcap": "soft_cap"}
    return {names[name]: value for name, value in run.attrs.items() if name in names}


def spread(bias: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A bias [batch or 1, heads or 1, seq or 1, positions] for all of q [batch, seq, heads, size]."""
    if bias is None:
        return None
    bias = bias if bias.stride(3) == 1 else bias.contiguous()
    return bias.expand(len(q), q.shape[2], q.shape[1], bias.shape[3])


def window_of(*windows: int | None) -> int | None:
    """The narrowest of windows, None for none."""
    return min((window for window in windows if window is not None), default=None)


def _with_cache(run: Run) -> Callable[..., tuple[torch.Tensor, CacheLayer]]:
    """Rotate q and k, if there is anything to rotate by, append k and v, attend: one launch for a token of each sequence."""
    append, decode, prefill = map(kernel_module, ("rope_append", "attention_decode", "attention_prefill"))
    options, interleaved = options_of(run), run.attrs.get("interleaved", False)
    own_window = run.attrs.get("window")

    def attend(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        layer: CacheLayer,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, CacheLayer]:
        batch, seq, heads, _ = q.shape
        before = layer.lengths.back(seq) if k is None else layer.lengths
        earlier = before.counts() if seq > 1 else None
        stored = layer.storage if k is None else layer.reserve(seq)
        where = stored.buffers
        window = window_of(own_window, layer.window)
        key_scales, value_scales = stored.scales or (None, None)
        there = {
            "pages": stored.pages,
            "base": stored.base,
            "key_scales": key_scales,
            "value_scales": value_scales,
        }
        given = {**options, **there, "window": window, "sinks": sinks, "bias": spread(bias, q)}
        turn = {"cos": cos, "sin": sin, "interleaved": interleaved}
        if seq == 1:
            now = layer.lengths
            longest = min(length_bucket(now.longest), layer.max_seq)
            new = {} if k is None or v is None else {"new_keys": k[:, 0], "new_values": v[:, 0], **turn}
            y = decode.launch(q[:, 0], *where, now.counts(), longest=longest, **new, **given)
        else:
            if k is not None:
                q = append.launch(q, k, v, cos, sin, earlier, *where, **there, interleaved=interleaved)
            tokens = q.reshape(batch * seq, heads, q.shape[3])
            y = prefill.launch(tokens, *where, before.starts(seq), longest=seq, before=earlier, **given)
        return y.view(batch, seq, heads, y.shape[-1]), layer

    return attend


def _without_cache(run: Run) -> Callable[..., torch.Tensor]:
    """Rotate q and k, if there is anything to rotate by, and attend."""
    rope, prefill = map(kernel_module, ("rope", "attention_prefill"))
    interleaved = run.attrs.get("interleaved", False)
    options = {
        **options_of(run),
        "window": run.attrs.get("window"),
        "causal": run.attrs.get("is_causal", True),
    }

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        cache: None,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, seq = q.shape[:2]
        if cos is not None:
            q, k = rope.launch(q, k, cos, sin, interleaved=interleaved)
        tokens = (part.reshape(batch * seq, *part.shape[2:]) for part in (q, k, v))
        y = prefill.launch(
            *tokens,
            SequenceLengths((0,) * batch, q.device).starts(seq),
            longest=seq,
            sinks=sinks,
            bias=spread(bias, q),
            **options,
        )
        result: torch.Tensor = y.view(batch, seq, *y.shape[1:])
        return result

    return attend


def _attention(run: Run) -> Callable[..., Any]:
    """Either of the two, by whether there is a cache: q [batch, seq, heads, size]."""
    cached, alone = _with_cache(run), _without_cache(run)

    def triton_attention(
        q: Any, k: Any, v: Any, cos: Any, sin: Any, layer: CacheLayer | None, sinks: Any, bias: Any = None
    ) -> Any:
        return (alone if layer is None else cached)(q, k, v, cos, sin, layer, sinks, bias)

    return triton_attention


def _qkv_attention(run: Run) -> Callable[..., Any]:
    attend = _attention(run)
    heads, groups = run.attrs["heads"], run.attrs["groups"]

    def triton_qkv_attention(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: CacheLayer | None,
        sinks: torch.Tensor | None,
    ) -> Any:
        parts = qkv.view(*qkv.shape[:2], heads + 2 * groups, -1)
        q, k, v = torch.split(parts, [heads, groups, groups], 2)
        return attend(q, k, v, cos, sin, layer, sinks)

    return triton_qkv_attention


KERNELS = (
    Kernel("triton_qkv_attention", "qkv_attention", _qkv_attention, _FUSED, _qkv, _as_heads),
    Kernel("triton_rope_attention", "rope_attention", _attention, _FUSED, _rotated, _turned),
    Kernel("triton_attention", "attention", _attention, _PLAIN, _plain, _unturned),
)
