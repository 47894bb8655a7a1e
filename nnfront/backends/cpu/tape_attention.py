# SPDX-License-Identifier: Apache-2.0
"""How attention is written down for the tape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from nnfront.backends.cpu.decode_attention import MOST_FEATURES, PLACES, Scores, bias_sizes
from nnfront.backends.cpu.rope import is_interleaved, table_step
from nnfront.backends.cpu.tape_builder import (
    LayerValue,
    Operand,
    Place,
    Refused,
    TapeBuilder,
    Value,
    demand,
    demand_bfloat16,
)
from nnfront.lower import Run


def write_attention(
    builder: TapeBuilder,
    run: Run,
    q: Value,
    k: Value | None,
    v: Value | None,
    layer: LayerValue | None,
    sinks: Value | None,
    bias: Value | None = None,
) -> Sequence[Operand]:
    if k is None:
        raise Refused("it appends nothing")
    batch, seq, heads, size = q.shape
    value_size = int(run.attrs["value_size"]) if v is None else v.shape[3]
    demand_bfloat16(q=q, k=k, v=v)
    strides = tuple(0 if t is None else prod(t.shape[2:]) for t in (q, k, v))
    sizes = (batch, seq, heads, k.shape[2], size, value_size)
    return _append_and_attend(builder, run, layer, (q, k, v), strides, sizes, sinks, bias)


def write_qkv_attention(
    builder: TapeBuilder,
    run: Run,
    qkv: Value,
    cos: Value,
    sin: Value,
    layer: LayerValue | None,
    sinks: Value | None,
) -> Sequence[Operand]:
    """Attention of a fused projection, by places in it."""
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    batch, seq, width = qkv.shape
    size, kind = width // (heads + 2 * groups), (cos.shape[-1], is_interleaved(run))
    rows = batch * seq
    demand_bfloat16(qkv=qkv)
    next_table = table_step(cos, rows, size)
    item, turned_width = qkv.dtype.itemsize, (heads + groups) * size
    turned = builder.take(rows * turned_width * item)
    of_rows = rows, heads + groups, size, *kind, width, next_table, builder.threads
    builder.call("rotate", *of_rows, qkv, cos, sin, turned)
    places = (turned, turned + heads * size * item, qkv.place + turned_width * item)
    strides, sizes = (turned_width, turned_width, width), (batch, seq, heads, groups, size, size)
    made = _append_and_attend(builder, run, layer, places, strides, sizes, sinks)
    builder.release(turned)
    return made


def _append_and_attend(
    builder: TapeBuilder,
    run: Run,
    layer: LayerValue | None,
    places: tuple[Value | Place | None, ...],
    strides: tuple[int, ...],
    sizes: tuple[int, int, int, int, int, int],
    sinks: Value | None,
    bias: Value | None = None,
) -> Sequence[Operand]:
    """Attention of q, k and v at places, tokens so many elements apart; sizes are batch, tokens, heads, groups, size and that of values."""
    batch, seq, heads, groups, size, value_size = sizes
    scores, kinds = Scores.of(run), [None if given is None else given.dtype for given in (sinks, bias)]
    if layer is None:
        raise Refused("there is no cache")
    demand(run.attrs.get("is_causal", True), "it sees later tokens too")
    builder.limit(prod(sizes) > 0, "there are no tokens")
    demand(size + value_size <= MOST_FEATURES, f"a key and a value have more than {MOST_FEATURES} features")
    floats = (torch.bfloat16, torch.float32)
    are_read = kinds[0] in (None, *floats) and kinds[1] in (None, torch.bool, *floats)
    demand(are_read, f"sinks and bias are {kinds[0]} and {kinds[1]}")
    y = builder.make(run.outputs[0], (batch, seq, heads, value_size))
    of_bias = (None, 0) if bias is None else (bias.shape, bias.dtype.itemsize)
    *operands, page, columns, pool = (layer.place(i) for i in range(PLACES))
    of_layer = page, columns, pool, scores.seen(layer.layer)
    kind = *strides, *bias_sizes(*of_bias), kinds[0] == torch.float32, builder.threads
    shape = batch, seq, groups, heads // groups, size, value_size
    numbers: tuple[Any, ...] = *shape, *of_layer, *kind, *scores.reals(size)
    builder.call("append_and_attend", *numbers, *places, *operands, sinks, bias, y)
    return (y, layer)
