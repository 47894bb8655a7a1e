# SPDX-License-Identifier: Apache-2.0
"""Strategies for transformers, caches and quantisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from op_cases import (
    FLOATS,
    INTEGERS,
    SIZES,
    SOME,
    Case,
    Draw,
    Layer,
    axis_in,
    case,
    dtype_of,
    make,
    partner,
    rarely,
    shape_of,
)

from nnfront.ir.types import Buffer, StateLayerType, kv_layer
from nnfront.ops.linear_int8 import TAKEN
from nnfront.quant_format import BLOCK_FORMATS, FORMATS

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

# Transformers.


def _attention_operands(draw: Draw, same_seq: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seq, groups, size, dtype = draw(SIZES), draw(SIZES), draw(SOME), draw(SOME), dtype_of(draw, FLOATS)
    heads = groups * draw(st.integers(1, 2)) + (1 if rarely(draw) else 0)
    kv_seq = seq if same_seq else draw(SIZES)
    key, value = make((batch, kv_seq, groups, size), dtype), make((batch, kv_seq, groups, draw(SOME)), dtype)
    return make((batch, seq, heads, size), dtype_of(draw, FLOATS) if rarely(draw) else dtype), key, value


@case("scaled_dot_product_attention")
def _(draw: Draw, name: str) -> Case:
    q, k, v = _attention_operands(draw, draw(st.booleans()))
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mask = (
        make(partner(draw, full), draw(st.sampled_from(["bool", str(q.dtype)[6:]])))
        if draw(st.booleans())
        else None
    )
    return Case(
        (q, k, v, mask), {"is_causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.5]))}
    )


@case("attention")
def _(draw: Draw, name: str) -> Case:
    causal = draw(st.booleans())
    q, k, v = _attention_operands(draw, causal or rarely(draw))
    layer, given = None, (k, v)
    value_size = draw(SOME) if draw(st.booleans()) else None  # the values are parts of the keys
    if causal and draw(st.booleans()):
        batch = k.shape[0] + (1 if rarely(draw) else 0)
        type = kv_layer(
            k.shape[2], k.shape[3], str(k.dtype)[6:], batch, 8, draw(st.none() | SOME), v.shape[3]
        )
        if value_size is not None:
            type = dataclasses.replace(type, per_token=type.per_token[:1])
        layer = Layer(type, q.shape[1] + draw(SIZES))
    if value_size is not None and not rarely(draw):
        given = k, None
    if layer is not None and draw(st.booleans()):
        given = None, None
    sinks = make((q.shape[2],), "float32") if draw(st.booleans()) else None
    bias = None
    if draw(st.booleans()):
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1] if layer is None else 8)
        shape = [draw(st.sampled_from([1, n])) for n in full[:3]]
        bias = make((*shape, full[3]), draw(st.sampled_from(["bool", "float32"])))
    attrs = {
        "is_causal": causal,
        "softcap": draw(st.sampled_from([None, 5.0])),
        "window": draw(st.none() | SOME) if causal else None,
        "value_size": value_size,
    }
    return Case((q, *given, layer, sinks, bias), attrs)


@case("rope")
def _(draw: Draw, name: str) -> Case:
    batch, seq, pairs = draw(SIZES), draw(SIZES), draw(st.integers(0, 2))
    rest = draw(st.integers(0, 2)) - (1 if rarely(draw) else 0)
    table = draw(st.sampled_from([(seq, pairs), (batch, seq, pairs), (1, seq, pairs)]))
    x = make((batch, seq, draw(SIZES), max(2 * pairs + rest, 0)), dtype_of(draw, FLOATS))
    kind = dtype_of(draw, FLOATS)
    return Case((x, make(table, kind), make(table, kind)), {"interleaved": draw(st.booleans())})


@case("get_timestep_embedding")
def _(draw: Draw, name: str) -> Case:
    return Case(
        (make((draw(SIZES),), dtype_of(draw)),),
        {"embedding_dim": draw(st.integers(1, 9)), "dtype": draw(st.sampled_from(FLOATS))},
    )


def _layer(draw: Draw) -> Layer:
    return Layer(kv_layer(draw(SOME), draw(SOME), draw(st.sampled_from(FLOATS)), draw(SIZES), 8), draw(SIZES))


@case("cache_split", "cache_join")
def _(draw: Draw, name: str) -> Case:
    layers = tuple(_layer(draw) for _ in range(draw(st.integers(0, 3))))
    return Case((layers,) if name == "cache_split" else layers, {})


@case("cache_positions")
def _(draw: Draw, name: str) -> Case:
    return Case((_layer(draw),), {"seq": draw(SIZES)}, ("seq",))


@case("cache_append")
def _(draw: Draw, name: str) -> Case:
    layer = _layer(draw)
    seq = draw(SIZES)
    parts = [make((layer.type.batch, seq, *b.shape), b.dtype) for b in layer.type.per_token]
    return Case((layer, *parts[: 1 if rarely(draw) else 2]), {})


@case("cache_read", "cache_write")
def _(draw: Draw, name: str) -> Case:
    fixed = {"conv": shape_of(draw), "ssm": shape_of(draw)}
    buffers = tuple(
        Buffer(key, tuple(max(n, 1) for n in shape), dtype_of(draw)) for key, shape in fixed.items()
    )
    batch = draw(SOME)
    layer = Layer(StateLayerType((), buffers, batch, 8))
    buffer = draw(st.sampled_from(buffers))
    if name == "cache_read":
        return Case((layer,), {"name": "latent" if rarely(draw) else buffer.name})
    other = draw(st.sampled_from(buffers)) if rarely(draw) else buffer
    value = make((batch, *other.shape), other.dtype)
    return Case((layer, value), {"name": buffer.name, "seq": draw(SIZES)}, ("seq",))


# Few bits, and sampling.


@case("quantize")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 1), dtype_of(draw, FLOATS))
    attrs = {
        "bits": draw(st.integers(2, 8)),
        "group_size": draw(st.none() | st.integers(1, 3)),
        "axis": axis_in(draw, x.ndim),
        "symmetric": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        named = [name for name in FORMATS if name not in BLOCK_FORMATS]
        given = {"format": draw(st.sampled_from(named)), "group_size": draw(st.integers(1, 3))}
        return Case((x,), {**given, "axis": attrs["axis"]})
    dtype = draw(st.none() | st.sampled_from(FLOAT8))
    if dtype is not None:
        attrs |= {"bits": 8, "symmetric": True, "dtype": dtype}
    else:
        attrs["fit"] = draw(st.booleans())
    return Case((x,), {**attrs, "scale_dtype": draw(st.none() | st.sampled_from(FLOATS))})


@case("dequantize")
def _(draw: Draw, name: str) -> Case:
    shape, group = list(shape_of(draw, 1)), draw(st.none() | st.integers(1, 2))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    small = list(shape)
    small[axis] = 1 if group is None else shape[axis] // group
    if draw(st.integers(0, 3)) == 0:
        operands = make(shape, "uint8"), make(small, "uint8"), None
        given = {"format": "mxfp4", "group_size": group or shape[axis], "axis": axis}
        return Case(operands, {**given, "dtype": draw(st.sampled_from(FLOATS))})
    kind = dtype_of(draw, ("int8", "uint8", *FLOAT8))
    zero = make(small, kind) if draw(st.booleans()) and kind not in FLOAT8 else None
    scale = make(small, dtype_of(draw, FLOATS))
    return Case(
        (make(shape, kind), scale, zero),
        {"group_size": group, "axis": axis, "dtype": draw(st.none() | st.sampled_from(FLOATS))},
    )


@case("quantize_blocks")
def _(draw: Draw, name: str) -> Case:
    shape = (*shape_of(draw, 0, 2), draw(st.sampled_from([128, 256, 384, 640])))
    return Case((make(shape, dtype_of(draw, FLOATS)),), {"format": draw(st.sampled_from(BLOCK_FORMATS))})


@case("quantize_calibrated")
def _(draw: Draw, name: str) -> Case:
    format = draw(st.sampled_from(list(FORMATS)))
    known = FORMATS[format]
    columns = 128 if known.block else draw(st.sampled_from([32, 64]))
    shape = (*shape_of(draw, 1, 2), columns)
    moments, scales = make((columns // 16, 16, 16), "float32"), None
    if known.dtype in FLOAT8 and draw(st.booleans()):
        scales = make((*shape[:-1], draw(st.sampled_from([1, 2]))), "float32")
    group = None if known.block or known.fixed_groups else draw(st.sampled_from([None, 16]))
    operands = make(shape, dtype_of(draw, FLOATS)), moments, scales
    return Case(operands, {"format": format, "group_size": group})


@case("linear_int8")
def _(draw: Draw, name: str) -> Case:
    format, group = draw(st.sampled_from(TAKEN)), draw(st.sampled_from([None, 4]))
    lead, columns, out = shape_of(draw, 0, 2), 4 * draw(st.sampled_from([1, 2, 3])), draw(SIZES)
    dtype = draw(st.sampled_from(FLOATS))
    bias = make((out,), dtype) if draw(st.booleans()) else None
    if block := FORMATS[format].block:
        stored = make((out, block.row_bytes(32 * columns)), "uint8")
        return Case((make((*lead, 32 * columns), dtype), stored, None, None, bias), {"format": format})
    stored = make((out, columns), "int8") if format == "int8" else make((out, columns // 2), "uint8")
    groups = (out, columns // group if group else 1)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8) if format == "uint4" else None
    scales = make(groups, draw(st.sampled_from(sorted({dtype, "float32"}))))
    return Case(
        (make((*lead, columns), dtype), stored, scales, zeros, bias), {"format": format, "group_size": group}
    )


@case("dequantize_blocks")
def _(draw: Draw, name: str) -> Case:
    format = draw(st.sampled_from(BLOCK_FORMATS))
    block = FORMATS[format].block
    assert block is not None
    shape = (*shape_of(draw, 0, 2), block.row_bytes(draw(st.sampled_from([128, 256, 384]))))
    return Case((make(shape, "uint8"),), {"format": format, "dtype": draw(st.sampled_from(FLOATS))})


@case("pack_int4", "unpack_int4")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 0, 3), dtype_of(draw, ("int8", "uint8") if name == "pack_int4" else ("uint8",)))
    return Case(
        (x,),
        {"axis": axis_in(draw, x.ndim), **({"signed": draw(st.booleans())} if name == "unpack_int4" else {})},
    )


@case("moe_mlp")
def _(draw: Draw, name: str) -> Case:
    tokens, hidden, size, count, top_k = draw(SIZES), draw(SOME), draw(SOME), draw(SOME), draw(SOME)
    dtype, is_gated = getattr(torch, draw(st.sampled_from(FLOATS))), not rarely(draw)
    width = 2 * size if is_gated else size
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]))
    attrs: dict[str, Any] = {"activation": activation, "gated": is_gated}
    if is_gated:
        limit, offset = st.none() | st.sampled_from([0.5, 7]), st.sampled_from([0.0, 1.0])
        attrs |= {"interleaved": draw(st.booleans()), "limit": draw(limit), "up_offset": draw(offset)}
    if activation == "silu":
        attrs["alpha"] = draw(st.sampled_from([1.0, 1.702]))
    return Case(
        (
            torch.randn(tokens, hidden).to(dtype),
            torch.randn(count, width, hidden).to(dtype),
            torch.randn(count, hidden, size).to(dtype),
            torch.randint(-1, count + 1, (tokens, top_k)).to(
                getattr(torch, draw(st.sampled_from(("int32", "int64"))))
            ),
            torch.rand(tokens, top_k).to(getattr(torch, draw(st.sampled_from(FLOATS)))),
            torch.randn(count, width).to(dtype) if draw(st.booleans()) else None,
            torch.randn(count, hidden).to(dtype) if draw(st.booleans()) else None,
        ),
        attrs,
    )


@case("add_low_rank")
def _(draw: Draw, name: str) -> Case:
    lead, size, out = (draw(SIZES), *draw(st.sampled_from([(), (2,), (0,), (2, 3)]))), draw(SOME), draw(SOME)
    count, rank, dtype = draw(SIZES), draw(SOME), getattr(torch, draw(st.sampled_from(FLOATS)))
    shapes = (*lead, out), (*lead, size), (count, rank, size), (count, out, rank)
    chosen = torch.randint(-1, count + 1, lead[:1]).to(getattr(torch, draw(st.sampled_from(INTEGERS))))
    return Case((*(torch.randn(shape).to(dtype) for shape in shapes), chosen), {})
