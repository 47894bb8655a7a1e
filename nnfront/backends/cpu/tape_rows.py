# SPDX-License-Identifier: Apache-2.0
"""How the calls of kernels in C are written down, for `tape` to run many of them as one: a function for each kernel that can be written so, which
says where operands lie, and finds a place for the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import torch

from nnfront.backends.cpu import quantized_linear as quantized
from nnfront.backends.cpu.activations import GATES, activation_name, activation_number
from nnfront.backends.cpu.decode_attention import Scores, are_for_c, are_tables, bias_sizes, rotates
from nnfront.backends.cpu.gemv import SMALL_BATCH, TILES
from nnfront.backends.cpu.linear import gated_small_batch
from nnfront.backends.cpu.norm import Norm, is_for_c
from nnfront.backends.cpu.quantized_gemv import FORMATS_READ
from nnfront.backends.cpu.quantized_pieces import DECODINGS
from nnfront.backends.cpu.rope import is_interleaved
from nnfront.backends.cpu.tape_builder import (
    LayerValue,
    Operand,
    Place,
    Refused,
    TapeBuilder,
    Value,
    Write,
    demand,
    place_of,
)
from nnfront.backends.cpu.tape_elementwise import ELEMENTWISE
from nnfront.backends.cpu.tape_recurrent import RECURRENT
from nnfront.lower import Run


def _few(x: Value, columns: int, most: int) -> int:
    """The rows of x, if they are few and in bfloat16."""
    rows = prod(x.shape) // max(columns, 1)
    demand(x.dtype == torch.bfloat16 and 0 < rows <= most and prod(x.shape) == rows * columns)
    return rows


def _product(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    bias: Value | None,
    scale: None = None,
    added: Value | None = None,
) -> Sequence[Operand]:
    assert SMALL_BATCH is not None
    outputs, columns = weight.shape
    rows, number = _few(x, columns, SMALL_BATCH.most), activation_number(run)
    if number is None:
        raise Refused
    is_wide = "float32" in (run.attrs.get("out_dtype"), run.attrs.get("dtype"))
    demand(all(t is None or t.dtype == torch.bfloat16 for t in (weight, bias, added)))
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs), torch.float32 if is_wide else torch.bfloat16)
    operands = (weight.place, x.place, place_of(bias), place_of(added), y.place)
    kind = is_wide, number, TILES, builder.threads
    builder.call("multiply", rows, columns, outputs, *kind, *operands)
    return (y,)


def _gated(builder: TapeBuilder, run: Run, x: Value, weight: Value, bias: Value | None) -> Sequence[Operand]:
    demand(gated_small_batch(run) is not None)
    assert SMALL_BATCH is not None
    outputs, columns = weight.shape[0] // 2, weight.shape[1]
    rows, gate = _few(x, columns, SMALL_BATCH.most), GATES.index(activation_name(run))
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs))
    operands = (weight.place, x.place, place_of(bias), y.place)
    kind = gate, TILES, builder.threads
    builder.call("multiply_gated", rows, columns, outputs, *kind, *operands)
    return (y,)


def _quantized(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    weight: Value,
    scales: Value,
    zeros: Value | None,
    bias: Value | None,
    scale: Value | None = None,
    added: Value | None = None,
    *,
    is_gated: bool = False,
) -> Sequence[Operand]:
    """A product with codes; in a gated one gate and up next to each other, then what they give."""
    few = quantized.small_batch(run)
    demand(scale is None and (is_gated or quantized.only_adds(run)))
    demand(not is_gated or activation_name(run) in GATES)
    if few is None:
        raise Refused
    columns, outputs = x.shape[-1], weight.shape[0]
    rows = _few(x, columns, few.most)
    demand(scales.dtype == few.scales and (zeros is not None) == few.has_zeros)
    demand(all(t is None or t.dtype == torch.bfloat16 for t in (bias, added)))
    demand(added is None or added.shape == (*x.shape[:-1], outputs))
    if is_gated:
        both = Value(builder.take(rows * outputs * x.dtype.itemsize), (*x.shape[:-1], outputs))
    y = builder.make(run.outputs[0], (*x.shape[:-1], outputs // 2 if is_gated else outputs))
    to = both.place if is_gated else y.place
    operands = (weight.place, scales.place, place_of(zeros), x.place, place_of(bias), place_of(added), to)
    group = few.format.group_size
    sizes = (rows, columns, outputs, columns // group if group else 1)
    builder.call("multiply_quantized", few.stored, *sizes, TILES, builder.threads, *operands)
    if is_gated:
        builder.call("gate", rows, outputs // 2, GATES.index(activation_name(run)), to, y.place)
        builder.release(to)
    return (y,)


def _norm(
    builder: TapeBuilder, run: Run, x: Value, weight: Value | None, bias: Value | None
) -> Sequence[Operand]:
    return _norm_of_sum(builder, run, x, None, weight, bias)


def _norm_of_sum(
    builder: TapeBuilder, run: Run, x: Value, added: Value | None, weight: Value | None, bias: Value | None
) -> Sequence[Operand]:
    vectors = [None if vector is None else vector.dtype for vector in (weight, bias)]
    demand(is_for_c(x.dtype, prod(x.shape), *vectors))
    y, total = builder.make(run.outputs[0], x.shape), None
    if added is not None:
        total = (
            builder.make(run.outputs[1], x.shape)
            if len(run.outputs) == 2
            else Value(builder.take(x.nbytes), x.shape)
        )
    norm, size = Norm.of(run), x.shape[-1]
    operands = (x.place, place_of(added), place_of(total), place_of(weight), place_of(bias), y.place)
    kind = (norm.is_centered, torch.float32 in vectors, builder.threads, norm.epsilon)
    builder.call("norm", prod(x.shape) // size, size, *kind, *operands)
    if total is not None and len(run.outputs) == 1:
        builder.release(total.place)
    return (y,) if total is None or len(run.outputs) == 1 else (y, total)


def _rope(builder: TapeBuilder, run: Run, x: Value, cos: Value, sin: Value) -> Sequence[Operand]:
    batch, seq, heads, size = x.shape
    rows, kind = batch * seq, (cos.shape[-1], is_interleaved(run))
    demand(rotates(x.dtype, cos.dtype, prod(x.shape)))
    next_table = _table_step(cos, rows, size)
    y = builder.make(run.outputs[0], x.shape)
    operands = (x.place, cos.place, sin.place, y.place)
    builder.call("rotate", rows, heads, size, *kind, heads * size, next_table, builder.threads, *operands)
    return (y,)


def _table_step(table: Value, rows: int, size: int) -> int:
    """Elements from one row's table for heads of `size` features to the next one's."""
    demand(table.dtype == torch.float32 and are_tables(table.shape, rows, size))
    return 0 if prod(table.shape) == table.shape[-1] else table.shape[-1]


def _attention(
    builder: TapeBuilder,
    run: Run,
    q: Value,
    k: Value | None,
    v: Value | None,
    layer: LayerValue,
    sinks: Value | None,
    bias: Value | None = None,
) -> Sequence[Operand]:
    if k is None:
        raise Refused
    batch, seq, heads, size = q.shape
    value_size = int(run.attrs["value_size"]) if v is None else v.shape[3]
    demand(seq == 1 and all(t is None or t.dtype == torch.bfloat16 for t in (q, k, v)))
    strides = tuple(0 if t is None else prod(t.shape[1:]) for t in (q, k, v))
    places, sizes = (q.place, k.place, place_of(v)), (batch, heads, k.shape[2], size, value_size)
    return _append_and_attend(builder, run, layer, places, strides, sizes, sinks, bias)


def _qkv_attention(
    builder: TapeBuilder,
    run: Run,
    qkv: Value,
    cos: Value,
    sin: Value,
    layer: LayerValue,
    sinks: Value | None,
) -> Sequence[Operand]:
    """One token, by the places that `decode_attention.attend_rotated` has."""
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    batch, seq, width = qkv.shape
    size, kind = width // (heads + 2 * groups), (cos.shape[-1], is_interleaved(run))
    demand(seq == 1 and qkv.dtype == torch.bfloat16)
    next_table = _table_step(cos, batch, size)
    item, turned_width = qkv.dtype.itemsize, (heads + groups) * size
    turned = builder.take(batch * turned_width * item)
    operands = (qkv.place, cos.place, sin.place, turned)
    builder.call("rotate", batch, heads + groups, size, *kind, width, next_table, builder.threads, *operands)
    places = (turned, turned + heads * size * item, qkv.place + turned_width * item)
    strides, sizes = (turned_width, turned_width, width), (batch, heads, groups, size, size)
    made = _append_and_attend(builder, run, layer, places, strides, sizes, sinks)
    builder.release(turned)
    return made


def _append_and_attend(
    builder: TapeBuilder,
    run: Run,
    layer: LayerValue,
    places: tuple[Place, Place, Place],
    strides: tuple[int, ...],
    sizes: tuple[int, int, int, int, int],
    sinks: Value | None,
    bias: Value | None = None,
) -> Sequence[Operand]:
    """Attention of q, k and v at places, sequences so many elements apart; sizes are batch, heads, groups, size and that of values."""
    batch, heads, groups, size, value_size = sizes
    scores, kinds = Scores.of(run), [None if given is None else given.dtype for given in (sinks, bias)]
    demand(prod(sizes) > 0 and are_for_c(scores, layer.layer, *kinds))
    y = builder.make(run.outputs[0], (batch, 1, heads, value_size))
    of_bias = (None, 0) if bias is None else (bias.shape, bias.dtype.itemsize)
    builder.call(
        "append_and_attend",
        batch,
        groups,
        heads // groups,
        size,
        value_size,
        layer.place(3),
        scores.seen(layer.layer),
        *strides,
        *bias_sizes(*of_bias),
        kinds[0] == torch.float32,
        builder.threads,
        *scores.reals(size),
        *places,
        *(layer.place(i) for i in range(3)),
        place_of(sinks),
        place_of(bias),
        y.place,
    )
    return (y, layer)


def _reshape(builder: TapeBuilder, run: Run, x: Value, *, shape: Sequence[int]) -> Sequence[Operand]:
    """The same bytes."""
    count, known = prod(x.shape), prod(size for size in shape if size != -1)
    builder.hold(x.base)
    shape = tuple(count // known if size == -1 else size for size in shape)
    return (Value(x.place, shape, x.dtype, x.base),)


def _split(
    builder: TapeBuilder, run: Run, x: Value, *, indices_or_sections: int | Sequence[int], axis: int
) -> Sequence[Operand]:
    """Parts of one row, each in one piece."""
    *outer, width = x.shape
    demand(prod(outer) == 1 and axis == len(outer))
    if isinstance(indices_or_sections, int):
        demand(width % indices_or_sections == 0)
        starts = list(range(0, width, width // indices_or_sections))
    else:
        starts = [0, *indices_or_sections]
    demand(sorted(starts) == starts and starts[-1] <= width)
    parts = []
    for start, end in pairwise([*starts, width]):
        builder.hold(x.base)
        place = x.place + start * x.dtype.itemsize
        parts.append(Value(place, (*outer, end - start), x.dtype, x.base))
    return parts


VIEWS: Mapping[str, Write] = {"reshape": _reshape, "split": _split}
"""Instructions that do nothing: their results are places in their operands. Their attributes are passed by name."""

_READ_IN_C = [d.name for d in DECODINGS if not FORMATS_READ.isdisjoint(d.formats)]
WRITERS: Mapping[str, Write] = {
    "linear_bfloat16": _product,
    "linear_wide": _product,
    "finished_product": _product,
    "gated_product": _gated,
    **{f"{name}_product": _quantized for name in _READ_IN_C},
    **{f"{name}_gated_product": partial(_quantized, is_gated=True) for name in _READ_IN_C},
    "rms_norm_last": _norm,
    "layer_norm_last": _norm,
    "rms_norm_of_sum": _norm_of_sum,
    "layer_norm_of_sum": _norm_of_sum,
    "rope_rotated": _rope,
    "qkv_attention": _qkv_attention,
    "attention_cached": _attention,
    **ELEMENTWISE,
    **RECURRENT,
    **VIEWS,
}
"""For each kernel that sequences have: how its calls are written. It raises Refused for operands that it is not for."""
