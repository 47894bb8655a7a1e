# SPDX-License-Identifier: Apache-2.0
"""Attention, with and without a cache. At run time a layer of a cache is what `nnfront.ops.layer` says.

Scores and softmax are computed in float32 for half types; the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Size, divides, product, same, total
from nnfront.ir.op import op
from nnfront.ir.types import StateLayerType, TensorType, TupleType
from nnfront.ops.layer import LayerLike, by_position
from nnfront.ops.rules import (
    Dtype,
    Flag,
    Number,
    Whole,
    require,
    require_alike,
    require_float,
    require_same,
    wide,
)

_STRICTER = "all operands are floats of one dtype, where the reference would convert"
_HEADS = "{} query heads are no multiple of {} key heads"


def _check(q: TensorType, k: TensorType, v: TensorType) -> TensorType:
    """Check query, key and value [batch, seq, heads, head_size] and return the type of what attention gives."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        require(x.ndim == 4, "{} must be [batch, seq, heads, head_size], got {} axes", name, x.ndim)
    require_alike(query=q, key=k, value=v)
    require_float(q, "query")
    batch, seq, heads, size = q.shape
    k_batch, k_seq, k_heads, k_size = k.shape
    v_batch, v_seq, v_heads, v_size = v.shape
    require_same(batch, k_batch, "batch sizes of query and key differ: {} and {}")
    require_same(batch, v_batch, "batch sizes of query and value differ: {} and {}")
    require_same(k_seq, v_seq, "key and value have {} and {} positions")
    require_same(k_heads, v_heads, "key and value have {} and {} heads")
    require_same(size, k_size, "head sizes of query and key differ: {} and {}")
    if heads is not k_heads:
        known = isinstance(k_heads, int)
        require(
            isinstance(k_heads, int) and k_heads > 0 and divides(k_heads, heads) is True,
            _HEADS,
            heads,
            k_heads,
        ) if known else require_same(heads, k_heads, _HEADS)
    return q if v_size is size else TensorType((batch, seq, heads, v_size), q.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attend from q [b, s, h, d] to k, v [b, g, t, d], h a multiple of g; a bool bias hides, a float bias adds to [b, h, s, t].

    A query that sees nothing gives zeros.
    """
    compute = dtype or wide(q.dtype)
    batch, seq, heads, size = q.shape
    groups = k.shape[1]
    factor = size**-0.5 if scale is None else scale
    query = q.to(compute).transpose(1, 2).reshape(batch, groups, heads // max(groups, 1), seq, size)
    scores = (query @ k.to(compute).transpose(-1, -2)[:, :, None]).reshape(
        batch, heads, seq, k.shape[2]
    ) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = (
            scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(compute)
        )
    if sinks is not None:
        sink = sinks.to(compute)[None, :, None, None].expand(batch, heads, seq, 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
        weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    grouped = weights.reshape(batch, groups, heads // max(groups, 1), seq, k.shape[2])
    result = (grouped @ v.to(compute)[:, :, None]).reshape(batch, heads, seq, v.shape[-1])
    return result.transpose(1, 2).to(q.dtype)


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Scores and weighted sum, as if every query saw every key given; where none is given, what is stored of as many tokens."""
    q, *rest = operands
    given = rest and rest[0].ndim == 4 and rest[0].dtype == q.dtype and same(rest[0].shape[3], q.shape[3])
    keys = rest[0].shape[1] if given else q.shape[1]
    return total([product([2, *each.shape, keys]) for each in (q, results[0])])


@op(stricter=_STRICTER, flops=_flops, dtype_policy="compute")
def scaled_dot_product_attention(
    query: TensorType,
    key: TensorType,
    value: TensorType,
    attn_mask: TensorType | None = None,
    is_causal: Flag = False,
    scale: Number | None = None,
    scale_dtype: Dtype | None = None,
) -> TensorType:
    """softmax(query key^T * scale + mask) value, for each head.

    Shapes: query [batch, seq, heads, head_size], key [batch, kv_seq, kv_heads, head_size], value [batch, kv_seq, kv_heads,
    value_size], result [batch, seq, heads, value_size]; heads is a multiple of kv_heads. attn_mask broadcasts to
    [batch, heads, seq, kv_seq]: bool (true is seen) or float (added). is_causal: query i sees keys 0 ... i.
    scale: 1 / sqrt(head_size) if None. scale_dtype: what scores are computed in, if not float32 or wider.
    Source: Attention Is All You Need (arXiv 1706.03762), eq. 1.
    """
    result = _check(query, key, value)
    if attn_mask is not None:
        require(
            attn_mask.dtype == "bool" or attn_mask.dtype == query.dtype,
            "attn_mask must be bool or {}, got {}",
            query.dtype,
            attn_mask.dtype,
        )
        wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        require(
            attn_mask.ndim <= 4,
            "attn_mask has {} axes, more than [batch, heads, seq, kv_seq]",
            attn_mask.ndim,
        )
        for mine, full in zip(attn_mask.shape, wanted[4 - attn_mask.ndim :], strict=True):
            if not (isinstance(mine, int) and mine == 1):
                require_same(
                    mine, full, "attn_mask does not broadcast to [batch, heads, seq, kv_seq]: {} and {}"
                )
    return result


@scaled_dot_product_attention.reference
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    scale_dtype: str | None,
) -> torch.Tensor:
    bias = attn_mask
    if is_causal:
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
        if bias is None or bias.dtype == torch.bool:
            bias = seen if bias is None else bias & seen
        else:
            bias = bias.masked_fill(~seen, -torch.inf)
    compute = None if scale_dtype is None else getattr(torch, scale_dtype)
    return _attend(query, key.transpose(1, 2), value.transpose(1, 2), bias, scale, dtype=compute)


def _of_layer(
    k: TensorType | None, v: TensorType | None, cache: StateLayerType, value_size: int | None
) -> int:
    """Check what is appended to a layer; return the size of what it keeps as values."""
    buffers = cache.per_token
    heads_and_size = bool(buffers) and all(len(buffer.shape) == 2 for buffer in buffers[:2])
    require(heads_and_size, "the layer keeps {}, attention needs keys [heads, size] of each token", cache)
    require(k is not None or v is None, "v is given without k")
    if k is not None and v is None:
        require(
            len(buffers) == 1,
            "the layer keeps {} besides {}, v is missing",
            *(b.name for b in buffers[1::-1]),
        )
    if v is not None:
        require(len(buffers) > 1, "the layer keeps nothing but {}, v is given", buffers[0].name)
    for name, x, buffer in (("k", k, buffers[0]), ("v", v, buffers[min(1, len(buffers) - 1)])):
        if x is None:
            continue
        require(
            buffer.dtype == x.dtype,
            "the cache holds {}, {} is {}",
            buffer.dtype,
            name,
            x.dtype,
            help="cast k and v, or make the cache of that dtype",
        )
        require_same(cache.batch, x.shape[0], f"the cache is for a batch of {{}}, {name} has {{}}")
        heads = "key heads" if name == "k" else "value heads"
        require_same(buffer.shape[0], x.shape[2], f"the cache has {{}} {heads}, {name} has {{}}")
        require_same(buffer.shape[1], x.shape[3], f"the cache has head size {{}}, {name} has {{}}")
    if len(buffers) > 1:
        require(
            value_size is None,
            "value_size says what of the keys are values, and the layer keeps {}",
            buffers[-1].name,
        )
        return buffers[1].shape[1]
    return _value_size(value_size, buffers[0].shape[1])


def _value_size(value_size: int | None, size: Size) -> int:
    """How many elements of a key are its values."""
    require(
        value_size is not None,
        "v is missing",
        help="value_size=... says that the first so many elements of the keys are the values",
    )
    assert value_size is not None
    fits = not isinstance(size, int) or value_size <= size
    require(fits, "value_size is {}, the keys have {}", value_size, size)
    return value_size


def _check_bias(bias: TensorType, q: TensorType, keys: Size) -> None:
    if bias.dtype != "bool":
        require_float(bias, "bias")
    require(bias.ndim == 4, "bias must be [batch, heads, seq, positions], got {} axes", bias.ndim)
    wanted = (q.shape[0], q.shape[2], q.shape[1], keys)
    for axis, (mine, full) in enumerate(zip(bias.shape, wanted, strict=True)):
        if axis == 3 or not (isinstance(mine, int) and mine == 1):
            require_same(mine, full, "bias is not [batch, heads, seq, positions]: {} and {}")


@op(is_pure=False, writes="cache", stricter=_STRICTER, flops=_flops, dtype_policy="compute")
def attention(
    q: TensorType,
    k: TensorType | None = None,
    v: TensorType | None = None,
    cache: StateLayerType | None = None,
    sinks: TensorType | None = None,
    bias: TensorType | None = None,
    *,
    scale: Number | None = None,
    is_causal: Flag = True,
    window: Whole | None = None,
    softcap: Number | None = None,
    value_size: Whole | None = None,
) -> TensorType | TupleType:
    """Attention of new tokens to themselves and, with a cache, to all that came before them.

    Shapes: q [batch, seq, heads, head_size], k [batch, seq, kv_heads, head_size], v [batch, seq, kv_heads, size of a value], heads a multiple
    of kv_heads; the result is [batch, seq, heads, size of a value]. With a layer of a cache k and v are appended to what it keeps of tokens,
    and the result is y, in the IR (y, the written handle). Without one, k and v may be longer or shorter than q if is_causal is False.

    is_causal False: queries see later tokens as well, with a cache all that it holds but for what its window hides: what an encoder has stored, or, under a
    bias, tokens of this call that lie ahead.
    Without v the first `value_size` elements of the keys are the values, as of a latent that is stored once. Without k nothing is appended:
    the queries are those of the last seq tokens that the layer holds, for layers that share keys and values.
    scale: of the scores; 1 / sqrt(head_size) if None. window: each token sees itself and the window - 1 before it; the
    cache's own window holds as well. softcap: scores become softcap * tanh(score / softcap). sinks [heads]: a logit for each
    head that takes part in its softmax and is then dropped. bias: what is added to scores, or as bool which keys are seen besides:
    [batch or 1, heads or 1, seq or 1, positions], its last axis the position of the key, as long as the cache's max_seq; without a cache
    there is one for each key.
    Source: sinks as in gpt-oss, softcap as in Gemma 2 (arXiv 2408.00118), value_size as in DeepSeek-V2 (arXiv 2405.04434).
    """
    for name, number in (("window", window), ("softcap", softcap), ("value_size", value_size)):
        require(number is None or number > 0, "{} must be positive, got {}", name, number)
    require(window is None or is_causal, "a window needs causal attention")
    if cache is None:
        require(
            k is not None, "k is missing", help="without k the cache of another layer is read: cache=cache[i]"
        )
        assert k is not None
        size: Size = 0 if v is not None else _value_size(value_size, k.shape[3])
        require(
            v is None or value_size is None, "value_size says what of the keys are values, and v is given"
        )
        y = _check(q, k, v if v is not None else TensorType((*k.shape[:3], size), k.dtype))
        keys = k.shape[1]
    else:
        size, keys = _of_layer(k, v, cache, value_size), cache.max_seq
        require(
            is_causal or k is not None or cache.window is None,
            "what a layer with a window of {} holds is not all that there was",
            cache.window,
            help="store what is attended to as a whole in a layer without a window",
        )
        heads = cache.per_token[0].shape[0]
        mine = TensorType((q.shape[0], q.shape[1], *cache.per_token[0].shape), cache.dtype)
        values = TensorType((q.shape[0], q.shape[1], heads, size), cache.dtype)
        y = _check(q, k if k is not None else mine, v if v is not None else values)
        require_same(cache.batch, q.shape[0], "the cache is for a batch of {}, q has {}")
    if sinks is not None:
        require(sinks.ndim == 1, "sinks must be [heads], got {} axes", sinks.ndim)
        require_same(sinks.shape[0], q.shape[2], "{} sinks for {} heads")
        require_float(sinks, "sinks")
    if bias is not None:
        _check_bias(bias, q, keys)
    if k is not None and (is_causal or cache is not None):
        require_same(q.shape[1], k.shape[1], "causal attention needs as many queries as keys, got {} and {}")
    return y if cache is None else TupleType((y, cache))


@attention.reference
def _(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache: LayerLike | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    scale: float | None,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> Any:
    seq = q.shape[1]
    if cache is None:
        assert k is not None
        values = k[..., :value_size] if v is None else v
        seen = None
        if is_causal:
            steps = torch.arange(seq, device=q.device)[None]
            seen = _visible(steps, steps, window)
        seen = bias if seen is None else _and(seen, bias)
        return _attend(q, k.transpose(1, 2), values.transpose(1, 2), seen, scale, softcap, sinks)
    positions = cache.positions(seq) if k is not None or not is_causal else cache.last_positions(seq)
    if k is not None:
        cache.append(*(part for part in (k, v) if part is not None))
    at = cache.key_positions()
    seen = _visible(positions, at, window, is_causal)
    if cache.window is not None:
        seen = seen & _visible(positions, at, cache.window, is_causal)
    keys = cache.stored(0)
    values = keys[..., :value_size] if value_size is not None else cache.stored(1)
    both = _and(seen, None if bias is None else by_position(bias, at))
    return _attend(q, keys, values, both, scale, softcap, sinks), cache


def _and(seen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A bias of the keys that are seen."""
    if bias is None:
        return seen
    return seen & bias if bias.dtype == torch.bool else bias.masked_fill(~seen, -torch.inf)


def _visible(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None, is_causal: bool = True
) -> torch.Tensor:
    """Return which keys each query sees: bool [batch, 1, queries, keys], from positions [batch, ...]; -1 is an empty slot."""
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    seen = (key >= 0) & (key <= query) if is_causal else (key >= 0).expand(-1, -1, query.shape[2], -1)
    return seen if window is None else seen & (key > query - window)
