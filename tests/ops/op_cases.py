# SPDX-License-Identifier: Apache-2.0
"""For every op a strategy for operands and attributes, mostly well-formed: `CASES[name]`.

Sizes are 0 to 4, dtypes all there are. Data is small: indices in range where an op needs them so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from nnfront.dtypes import DTYPES
from nnfront.ir.types import CacheLayerType, CacheType, ScalarType, TensorType, Type

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
NUMBERS = FLOATS + INTEGERS
SIZES = st.sampled_from([0, 1, 2, 2, 3, 4])
SOME = st.sampled_from([1, 2, 3, 4])


@dataclass
class Case:
    """Operands and attributes of one call; `sizes` are the attributes whose ints are sizes."""

    operands: tuple[Any, ...]
    attrs: dict[str, Any]
    sizes: tuple[str, ...] = ()
    keeps_ones: bool = False  # the meaning depends on which sizes are known to be 1


class Layer:
    """One layer of a contiguous cache, as plainly as the protocol of `ops.attention` allows."""

    def __init__(self, type: CacheLayerType, stored: int = 0) -> None:
        self.type, self.window = type, type.window
        shape = (type.batch, type.kv_heads, stored, type.head_size)
        self.k, self.v = (torch.randn(shape).to(getattr(torch, type.dtype)) for _ in range(2))

    def positions(self, seq: int) -> torch.Tensor:
        start = self.k.shape[2]
        return torch.arange(start, start + seq).expand(self.k.shape[0], seq)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k = torch.cat([self.k, k.transpose(1, 2)], 2)
        self.v = torch.cat([self.v, v.transpose(1, 2)], 2)

    def keys(self) -> torch.Tensor:
        return self.k

    def values(self) -> torch.Tensor:
        return self.v

    def key_positions(self) -> torch.Tensor:
        return torch.arange(self.k.shape[2]).expand(self.k.shape[0], -1)


def type_of(value: Any) -> Type | None:
    """Return the type of a value of a case."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, Layer):
        return value.type
    if isinstance(value, tuple):
        return CacheType(tuple(layer.type for layer in value))
    if isinstance(value, bool):
        return ScalarType("bool")
    return ScalarType("float64") if isinstance(value, float) else ScalarType("int64", value)


def make(shape: Sequence[int], dtype: str, low: int = -3, high: int = 4) -> torch.Tensor:
    """Return a tensor of small numbers in [low, high)."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(int(low > 0), 2, tuple(shape)).bool()
    if dtype == "uint8":
        return torch.randint(max(low, 0), high, tuple(shape), dtype=kind)
    if kind.is_floating_point:
        return (torch.rand(tuple(shape)) * (high - low) + low).to(kind)
    return torch.randint(low, high, tuple(shape), dtype=kind)


def shape_of(
    draw: Draw, least: int = 0, most: int = 4, sizes: st.SearchStrategy[int] = SIZES
) -> tuple[int, ...]:
    return tuple(draw(st.lists(sizes, min_size=least, max_size=most)))


def rarely(draw: Draw) -> bool:
    return draw(st.integers(0, 9)) == 5


def dtype_of(draw: Draw, usual: Sequence[str] = NUMBERS) -> str:
    return str(draw(st.sampled_from(DTYPES if rarely(draw) else usual)))


def partner(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts with `shape`, or rarely any shape."""
    if rarely(draw):
        return shape_of(draw)
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)


def axis_in(draw: Draw, ndim: int) -> int:
    if ndim == 0 or rarely(draw):
        return int(draw(st.integers(-ndim - 1, ndim)))
    return int(draw(st.integers(-ndim, ndim - 1)))


def axes_in(draw: Draw, ndim: int) -> Any:
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return None
    return axis_in(draw, ndim) if kind == 1 else [axis_in(draw, ndim) for _ in range(draw(st.integers(1, 2)))]


CASES: dict[str, st.SearchStrategy[Case]] = {}


def case(*names: str) -> Callable[[Callable[..., Case]], None]:
    """Register a function of (draw, name) as the strategy of these ops."""

    def register(function: Callable[..., Case]) -> None:
        for name in names:
            assert name not in CASES, name
            CASES[name] = st.composite(function)(name)

    return register


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
    layer = None
    if causal and draw(st.booleans()):
        v = k
        batch = k.shape[0] + (1 if rarely(draw) else 0)
        layer = Layer(
            CacheLayerType(k.shape[2], k.shape[3], str(k.dtype)[6:], batch, 8, draw(st.none() | SOME)),
            draw(SIZES),
        )
    sinks = make((q.shape[2],), "float32") if draw(st.booleans()) else None
    attrs = {
        "is_causal": causal,
        "softcap": draw(st.sampled_from([None, 5.0])),
        "window": draw(st.none() | SOME) if causal else None,
    }
    return Case((q, k, v, layer, sinks), attrs)


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
    return Layer(
        CacheLayerType(draw(SOME), draw(SOME), draw(st.sampled_from(FLOATS)), draw(SIZES), 8), draw(SIZES)
    )


@case("cache_split", "cache_join")
def _(draw: Draw, name: str) -> Case:
    layers = tuple(_layer(draw) for _ in range(draw(st.integers(0, 3))))
    return Case((layers,) if name == "cache_split" else layers, {})


@case("cache_positions")
def _(draw: Draw, name: str) -> Case:
    return Case((_layer(draw),), {"seq": draw(SIZES)}, ("seq",))


# Few bits, and sampling.


@case("quantize")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 1), dtype_of(draw, FLOATS))
    attrs = {
        "bits": draw(st.integers(2, 8)),
        "group_size": draw(st.none() | st.integers(1, 3)),
        "axis": axis_in(draw, x.ndim),
    }
    return Case(
        (x,),
        {**attrs, "symmetric": draw(st.booleans()), "scale_dtype": draw(st.none() | st.sampled_from(FLOATS))},
    )


@case("dequantize")
def _(draw: Draw, name: str) -> Case:
    shape, group = list(shape_of(draw, 1)), draw(st.none() | st.integers(1, 2))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    small = list(shape)
    small[axis] = 1 if group is None else shape[axis] // group
    kind = dtype_of(draw, ("int8", "uint8"))
    zero = make(small, kind) if draw(st.booleans()) else None
    scale = make(small, dtype_of(draw, FLOATS))
    return Case(
        (make(shape, kind), scale, zero),
        {"group_size": group, "axis": axis, "dtype": draw(st.none() | st.sampled_from(FLOATS))},
    )


@case("pack_int4", "unpack_int4")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw, 0, 3), dtype_of(draw, ("int8", "uint8") if name == "pack_int4" else ("uint8",)))
    return Case(
        (x,),
        {"axis": axis_in(draw, x.ndim), **({"signed": draw(st.booleans())} if name == "unpack_int4" else {})},
    )


def _probabilities(draw: Draw) -> torch.Tensor:
    prob = torch.rand(draw(SOME), draw(SOME))
    return (prob / prob.sum(-1, keepdim=True)).to(getattr(torch, draw(st.sampled_from(FLOATS))))


def _samples(draw: Draw, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = draw(SIZES)
    if draw(st.booleans()):
        return torch.rand(prob.shape[0], 1), None
    return torch.rand(rows, 1), torch.randint(0, prob.shape[0], (rows, 1))


@case("multinomial_from_uniform")
def _(draw: Draw, name: str) -> Case:
    prob = _probabilities(draw)
    return Case((prob, *_samples(draw, prob)), {"dtype": draw(st.sampled_from(INTEGERS))})


@case("sample_top_p_top_k_from_sorted_prob", "renormalize_top_p_top_k_prob")
def _(draw: Draw, name: str) -> Case:
    prob = _probabilities(draw)
    ordered, index = prob.sort(-1, descending=True)
    limits = torch.rand(prob.shape[0], 1), torch.randint(1, 5, (prob.shape[0], 1))
    if name == "renormalize_top_p_top_k_prob":
        return Case((prob, ordered, *limits), {})
    return Case(
        (ordered, index.to(getattr(torch, draw(st.sampled_from(INTEGERS)))), *limits, *_samples(draw, prob)),
        {},
    )


# Running.


@case("print_")
def _(draw: Draw, name: str) -> Case:
    return Case(
        tuple(make(shape_of(draw), dtype_of(draw, DTYPES)) for _ in range(draw(st.integers(0, 2)))), {}
    )


@case("extern")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    several = draw(st.booleans())
    out: Any = [type_of(x), type_of(x)] if several else type_of(x)
    return Case((x, 2, 0.5), {"name": "tests.twice" if several else "tests.once", "out": out})
