# SPDX-License-Identifier: Apache-2.0
"""Strategies for elementwise ops, products, resizing, reductions and norms."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from op_cases import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    SIZES,
    SOME,
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

# Each element on its own.

_UNARY = "negative abs sign square floor ceil round sqrt rsqrt reciprocal exp log sin cos tanh erf sigmoid"
_ACTIVATION = "relu relu6 silu mish hardswish gelu softplus leaky_relu elu"
_BINARY = "add subtract multiply divide floor_divide remainder power maximum minimum"
_BINARY_LOGIC = "less less_equal greater greater_equal equal not_equal bitwise_and bitwise_or bitwise_xor left_shift right_shift"


@case(*_UNARY.split(), *_ACTIVATION.split(), "logical_not", "bitwise_not", "stop_lift_params")
def _(draw: Draw, name: str) -> Case:
    attrs = {"gelu": {"approximate": draw(st.sampled_from([None, "tanh"]))}, "softplus": {"beta": 2.0}}.get(
        name, {}
    )
    usual = ("bool", *INTEGERS) if name == "bitwise_not" else NUMBERS
    return Case((make(shape_of(draw), dtype_of(draw, usual)),), attrs)


@case(*_BINARY.split(), *_BINARY_LOGIC.split())
def _(draw: Draw, name: str) -> Case:
    usual = INTEGERS if name.startswith("bitwise") or name.endswith("shift") else NUMBERS
    shape = shape_of(draw)
    x = make(shape, dtype_of(draw, usual), 1)
    number: st.SearchStrategy[Any] = st.sampled_from(
        [1, 2, 3] if usual is INTEGERS else [1, 2, True, 0.5, 2.0]
    )
    y = draw(number) if draw(st.integers(0, 3)) == 0 else make(partner(draw, shape), dtype_of(draw, usual), 1)
    if name == "power" and rarely(draw):
        y = -1
    swap = name not in ("power",) and draw(st.booleans())
    return Case((y, x) if swap else (x, y), {})


@case("logical_and", "logical_or", "logical_xor")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)
    return Case((make(shape, dtype_of(draw, DTYPES)), make(partner(draw, shape), dtype_of(draw, DTYPES))), {})


@case("swiglu", "geglu")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)
    return Case((make(shape, dtype_of(draw, FLOATS)), make(partner(draw, shape), dtype_of(draw, FLOATS))), {})


@case("prelu")
def _(draw: Draw, name: str) -> Case:
    shape, dtype = shape_of(draw), dtype_of(draw, FLOATS)
    slopes = draw(st.sampled_from([1, shape[1] if len(shape) > 1 else 1, 2]))
    return Case((make(shape, dtype), make((slopes,), dtype_of(draw, FLOATS) if rarely(draw) else dtype)), {})


@case("clip")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)

    def bound() -> Any:
        kind = draw(st.integers(0, 4))
        return [None, 1, 0.5, make(partner(draw, shape), dtype_of(draw)), 2][kind]

    return Case((make(shape, dtype_of(draw)), bound(), bound()), {})


@case("where")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw)
    sides = [
        draw(st.sampled_from([1, 0.5, True]))
        if draw(st.booleans())
        else make(partner(draw, shape), dtype_of(draw))
        for _ in "ab"
    ]
    return Case((make(partner(draw, shape), dtype_of(draw, ("bool",))), *sides), {})


@case("astype")
def _(draw: Draw, name: str) -> Case:
    return Case((make(shape_of(draw), dtype_of(draw, DTYPES), 0),), {"dtype": dtype_of(draw, DTYPES)})


@case("bitcast")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 1, 3), dtype_of(draw, DTYPES))
    return Case((x,), {"dtype": dtype_of(draw, DTYPES)})


# Products.


@case("matmul")
def _(draw: Draw, name: str) -> Case:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = shape_of(draw, 0, 2)
    left, right = (*batch, m, k), (*partner(draw, batch), k if not rarely(draw) else draw(SIZES), n)
    left = left[-1:] if draw(st.integers(0, 5)) == 0 else left
    right = right[-2:-1] if draw(st.integers(0, 5)) == 0 else right
    dtype = dtype_of(draw)
    other = dtype_of(draw) if rarely(draw) else dtype
    out = dtype_of(draw) if draw(st.integers(0, 2)) == 0 else None
    return Case((make(left, dtype), make(right, other)), {"out_dtype": out})


@case("linear")
def _(draw: Draw, name: str) -> Case:
    batch, k, n, dtype = shape_of(draw, 0, 2), draw(SIZES), draw(SIZES), dtype_of(draw, FLOATS)
    out = draw(st.sampled_from([None, *FLOATS]))
    bias = make((n,), out or dtype) if draw(st.booleans()) else None
    return Case((make((*batch, k), dtype), make((n, k), dtype), bias), {"out_dtype": out})


@case("einsum")
def _(draw: Draw, name: str) -> Case:
    letters = {letter: draw(SIZES) for letter in "abcd"}
    terms = [draw(st.text("abcd", max_size=3)) for _ in range(draw(st.integers(1, 3)))]
    used = sorted(set("".join(terms)))
    result = "".join(draw(st.permutations(used))[: draw(st.integers(0, len(used)))])
    dtype = dtype_of(draw)
    arrow = f"->{result}" if draw(st.booleans()) else ""
    return Case(
        tuple(make([letters[x] for x in term], dtype) for term in terms),
        {"subscripts": ", ".join(terms) + arrow},
    )


@case("conv1d", "conv2d", "conv3d", "conv1d_transpose")
def _(draw: Draw, name: str) -> Case:
    count, dtype = int(name[4]), dtype_of(draw, FLOATS)
    groups, kernel = draw(st.sampled_from([1, 1, 2])), [draw(st.integers(1, 3)) for _ in range(int(name[4]))]
    inside, outside = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    spatial = [draw(st.integers(1, 5)) for _ in range(count)]
    spread = draw(st.integers(1, 2))
    attrs: dict[str, Any] = {
        "stride": draw(st.integers(1, 3)),
        "groups": groups,
        "dilation": [spread] * count,
    }
    attrs["padding"] = draw(st.sampled_from([0, 1, [1] * count, [(1, 0)] * count]))
    if name == "conv1d_transpose":
        attrs["output_padding"] = draw(st.integers(0, 1))
    elif attrs["stride"] == 1 and draw(st.booleans()):
        attrs["padding"] = draw(st.sampled_from(["same", "valid"]))
    channels = inside if not rarely(draw) else inside + 1
    shape = [draw(SIZES), channels, *spatial]
    if count > 1 and draw(st.booleans()):
        attrs["data_layout"] = {2: "NHWC", 3: "NDHWC"}[count]
        shape = [shape[0], *spatial, channels]
    ends = (inside, outside // groups) if name == "conv1d_transpose" else (outside, inside // groups)
    bias = make((outside,), dtype) if draw(st.booleans()) else None
    return Case((make(shape, dtype), make((*ends, *kernel), dtype), bias), attrs)


@case("interpolate")
def _(draw: Draw, name: str) -> Case:
    count = draw(st.integers(1, 3))
    mode = draw(
        st.sampled_from(
            ["nearest", "nearest-exact", "area", ["linear", "bilinear", "trilinear"][count - 1], "bicubic"]
        )
    )
    attrs: dict[str, Any] = {"mode": mode, "data_layout": ["NCW", "NCHW", "NDHWC"][count - 1]}
    if draw(st.booleans()):
        attrs["size"] = draw(st.sampled_from([3, [2] * count]))
    else:
        attrs["scale_factor"] = draw(st.sampled_from([2, 0.5, 1.5, [2.0] * count]))
    shape = [draw(st.integers(1, 4)) for _ in range(count + 2)]
    return Case((make(shape, dtype_of(draw, FLOATS)),), attrs)


# Along axes.


@case("sum", "prod", "max", "min", "mean", "var", "any", "all")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, FLOATS if name in ("mean", "var") else NUMBERS))
    return Case((x,), {"axis": axes_in(draw, x.ndim), "keepdims": draw(st.booleans())})


@case("argmax", "argmin")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw))
    return Case(
        (x,), {"axis": draw(st.sampled_from([None, axis_in(draw, x.ndim)])), "keepdims": draw(st.booleans())}
    )


@case("cumsum")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw))
    axis = draw(st.sampled_from([None, axis_in(draw, x.ndim)]))
    return Case(
        (x,),
        {
            "axis": axis,
            "dtype": draw(st.sampled_from([None, "float32", "int32"])),
            "exclusive": draw(st.booleans()),
        },
    )


@case("sort", "argsort", "softmax", "log_softmax")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, FLOATS if "soft" in name else NUMBERS))
    return Case(
        (x,),
        {"axis": axis_in(draw, x.ndim), **({"descending": draw(st.booleans())} if "sort" in name else {})},
    )


@case("topk")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw))
    attrs = {
        "k": draw(st.integers(-1, 4)),
        "axis": axis_in(draw, x.ndim),
        "ret_type": draw(st.sampled_from(["both", "values", "indices"])),
    }
    return Case((x,), attrs)


@case("layer_norm")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw, 1)
    tail = shape[draw(st.integers(0, len(shape) - 1)) :]
    affine = [make(tail, dtype_of(draw, FLOATS)) if draw(st.booleans()) else None for _ in "wb"]
    return Case(
        (make(shape, dtype_of(draw, FLOATS)), *affine),
        {"normalized_shape": list(tail)},
        ("normalized_shape",),
    )


@case("rms_norm")
def _(draw: Draw, name: str) -> Case:
    shape = shape_of(draw, 1)
    axes = draw(st.sampled_from([-1, [-1], list(range(len(shape))), [0]]))
    tail = [shape[a] for a in (axes if isinstance(axes, list) else [axes])]
    affine = [make(tail, dtype_of(draw, FLOATS)) if draw(st.booleans()) else None for _ in "wb"]
    return Case((make(shape, dtype_of(draw, FLOATS)), *affine), {"axes": axes})


@case("group_norm")
def _(draw: Draw, name: str) -> Case:
    groups, each = draw(SOME), draw(st.integers(0, 2))
    channels = groups * each + (1 if rarely(draw) else 0)
    shape, axis = (draw(SIZES), channels, *shape_of(draw, 0, 2)), 1
    if len(shape) == 4 and draw(st.booleans()):
        shape, axis = (shape[0], shape[2], shape[3], channels), 3
    affine = [make((channels,), dtype_of(draw, FLOATS)) if draw(st.booleans()) else None for _ in "wb"]
    return Case((make(shape, dtype_of(draw, FLOATS)), *affine), {"num_groups": groups, "channel_axis": axis})
