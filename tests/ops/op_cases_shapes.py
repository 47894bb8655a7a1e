# SPDX-License-Identifier: Apache-2.0
"""Strategies for ops on shapes and positions, and for those that make tensors."""

from __future__ import annotations

from hypothesis import strategies as st
from op_cases import (
    INTEGERS,
    SIZES,
    Case,
    Draw,
    axes_in,
    axis_in,
    case,
    dtype_of,
    make,
    partner,
    rarely,
    shape_of,
)

from nnfront.dtypes import DTYPES

# Shapes.


@case("reshape")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)
    flat = [size for size in shape if size != 1] if draw(st.booleans()) else list(shape)
    for _ in range(draw(st.integers(0, 2))):
        if len(flat) > 1:
            at = draw(st.integers(0, len(flat) - 2))
            flat[at : at + 2] = [flat[at] * flat[at + 1]]
    if flat and draw(st.booleans()):
        flat[draw(st.integers(0, len(flat) - 1))] = -1
    if rarely(draw):
        flat.append(2)
    return Case((make(shape, dtype_of(draw, DTYPES)),), {"shape": flat}, ("shape",))


@case("permute_dims")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    order = draw(st.permutations(range(x.ndim)))
    return Case((x,), {"axes": draw(st.sampled_from([None, order, [a - x.ndim for a in order], order[1:]]))})


@case("unsqueeze", "squeeze", "flip")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 0, 4, st.sampled_from([1, 1, 2, 0])), dtype_of(draw, DTYPES))
    if name == "unsqueeze":
        return Case((x,), {"dim": axis_in(draw, x.ndim + 1)})
    axis = axes_in(draw, x.ndim)
    return Case((x,), {"axis": axis}, keeps_ones=name == "squeeze" and axis is None)


@case("broadcast_to")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)
    return Case((make(partner(draw, shape), dtype_of(draw, DTYPES)),), {"shape": shape}, ("shape",))


@case("repeat", "tile")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    if name == "tile":
        return Case((x,), {"repeats": shape_of(draw)}, ("repeats",))
    return Case(
        (x,),
        {"repeats": draw(SIZES), "axis": draw(st.sampled_from([None, axis_in(draw, x.ndim)]))},
        ("repeats",),
    )


@case("concat", "stack")
def _(draw: Draw, name: str) -> Case:
    shape, axis = shape_of(draw, 1), 0
    dtype = dtype_of(draw, DTYPES)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        own = list(shape)
        if name == "concat" or rarely(draw):
            own[axis] = draw(SIZES)
        tensors.append(make(own, dtype_of(draw) if rarely(draw) else dtype))
    return Case(tuple(tensors), {"dim": axis})


@case("split")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 1), dtype_of(draw, DTYPES))
    axis = axis_in(draw, x.ndim)
    if draw(st.booleans()):
        return Case((x,), {"indices_or_sections": draw(st.integers(1, 3)), "axis": axis})
    places = sorted(draw(st.lists(st.integers(0, 4), max_size=3)))
    return Case((x,), {"indices_or_sections": places, "axis": axis}, ("indices_or_sections",))


@case("chunk")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    return Case((x,), {"chunks": draw(st.integers(1, 4)), "dim": axis_in(draw, x.ndim)})


@case("getitem")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    bound = st.none() | st.integers(-5, 5)
    entry = st.one_of(
        st.integers(-2, 2),
        st.none(),
        st.just(slice(None)),
        st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 3])),
    )
    entries = draw(st.lists(entry, max_size=x.ndim + 1))
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), ...)
    return Case((x,), {"index": tuple(entries)})


@case("pad")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    amounts = draw(st.lists(st.integers(0, 3), max_size=2 * x.ndim))
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    return Case((x,), {"pad": amounts, "mode": mode, "value": 1.0}, ("pad",))


@case("triu", "tril")
def _(draw: Draw, name: str) -> Case:
    return Case((make(shape_of(draw, 1), dtype_of(draw, DTYPES)),), {"diagonal": draw(st.integers(-2, 2))})


# Elements by position.


@case("take")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    axis = draw(st.sampled_from([None, axis_in(draw, x.ndim)]))
    size = x.shape[axis] if axis is not None and -x.ndim <= axis < x.ndim else x.numel()
    return Case(
        (x, make(shape_of(draw, 0, 2) if size else (0,), dtype_of(draw, INTEGERS), 0, max(min(size, 4), 1))),
        {"axis": axis},
    )


@case("gather", "scatter", "scatter_add")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw, 1)
    axis = axis_in(draw, len(shape))
    count = list(shape) if rarely(draw) else [draw(st.integers(0, size)) for size in shape]
    if -len(shape) <= axis < len(shape) and shape[axis]:
        count[axis] = draw(SIZES)
    dtype = dtype_of(draw, DTYPES)
    x, indices = make(shape, dtype), make(count, dtype_of(draw, INTEGERS), 0, 1)
    return Case((x, indices) if name == "gather" else (x, indices, make(count, dtype)), {"axis": axis})


# From nothing.


@case("zeros", "ones", "empty")
def _(draw: Draw, name: str) -> Case:
    return Case((), {"shape": shape_of(draw), "dtype": dtype_of(draw, DTYPES)}, ("shape",))


@case("full")
def _(draw: Draw, name: str) -> Case:
    fill = draw(st.sampled_from([1, 0.5, True, make((), "float32"), make((1,), "int64")]))
    return Case((fill,), {"shape": shape_of(draw), "dtype": dtype_of(draw, DTYPES)}, ("shape",))


@case("zeros_like", "ones_like", "full_like")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    return Case((x, 1) if name == "full_like" else (x,), {"dtype": draw(st.none() | st.sampled_from(DTYPES))})


@case("arange")
def _(draw: Draw, name: str) -> Case:
    number = st.integers(-4, 6) | st.sampled_from([0.5, 2.25, -1.0])
    attrs = {
        "start": draw(number),
        "end": draw(st.none() | number),
        "step": draw(st.sampled_from([1, 2, -1, 0.25])),
        "dtype": dtype_of(draw),
    }
    return Case((), attrs, ("start", "end"))


@case("dim_value")
def _(draw: Draw, name: str) -> Case:
    return Case((), {"dim": draw(SIZES)}, ("dim",))
