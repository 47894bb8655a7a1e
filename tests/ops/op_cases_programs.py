# SPDX-License-Identifier: Apache-2.0
"""Strategies for recurrences, loops, external functions and several processes."""

from __future__ import annotations

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
    axis_in,
    case,
    dtype_of,
    make,
    rarely,
    shape_of,
    type_of,
)

from nnfront import ops
from nnfront.dtypes import DTYPES
from nnfront.ir.types import FunctionName, TupleType


def _floats(draw: Draw, *shape: int, sign: int = 0) -> torch.Tensor:
    made = torch.randn(shape)
    return (sign * made.abs() if sign else made).to(getattr(torch, dtype_of(draw, FLOATS)))


def _state(draw: Draw, x: torch.Tensor, *shape: int) -> torch.Tensor | None:
    """One in the dtype that x is computed in; rarely in another, or of other sizes."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if rarely(draw):
        dtype, shape = draw(st.sampled_from([(torch.float16, shape), (dtype, (*shape[:-1], shape[-1] + 1))]))
    return torch.randn(shape).to(dtype) if draw(st.booleans()) else None


@case("causal_conv1d")
def _(draw: Draw, name: str) -> Case:
    batch, seq, channels, width = draw(SIZES), draw(SIZES), draw(SIZES), draw(SOME)
    bias = _floats(draw, channels) if draw(st.booleans()) else None
    state = _floats(draw, batch, channels, width - 1) if draw(st.booleans()) else None
    operands = _floats(draw, batch, seq, channels), _floats(draw, channels, width), bias, state
    return Case(operands, {"activation": draw(st.sampled_from([None, "silu"]))})


@case("ssm_scan")
def _(draw: Draw, name: str) -> Case:
    batch, seq, groups, states = (draw(SIZES) for _ in range(4))
    heads = groups * draw(SOME) + (1 if rarely(draw) else 0)
    x = _floats(draw, batch, seq, heads, draw(SIZES))
    b, c = (_floats(draw, batch, seq, groups, states) for _ in range(2))
    d = _floats(draw, heads) if draw(st.booleans()) else None
    state = _state(draw, x, batch, heads, x.shape[3], states)
    return Case(
        (x, _floats(draw, batch, seq, heads, sign=1), _floats(draw, heads, sign=-1), b, c, d, state), {}
    )


@case("selective_scan")
def _(draw: Draw, name: str) -> Case:
    batch, seq, channels, states = (draw(SIZES) for _ in range(4))
    x = _floats(draw, batch, seq, channels)
    b, c = (_floats(draw, batch, seq, states + (1 if rarely(draw) else 0)) for _ in range(2))
    d = _floats(draw, channels) if draw(st.booleans()) else None
    state = _state(draw, x, batch, channels, states)
    rates = _floats(draw, channels, states, sign=-1)
    return Case((x, _floats(draw, batch, seq, channels, sign=1), rates, b, c, d, state), {})


@case("gated_delta_rule")
def _(draw: Draw, name: str) -> Case:
    batch, seq, groups, key_size, value_size = (draw(SIZES) for _ in range(5))
    heads = groups * draw(SOME) + (1 if rarely(draw) else 0)
    q, k = (_floats(draw, batch, seq, groups, key_size) for _ in range(2))
    v, beta = _floats(draw, batch, seq, heads, value_size), _floats(draw, batch, seq, heads, sign=1)
    g = _floats(draw, batch, seq, heads, *draw(st.sampled_from([(), (key_size,)])), sign=-1)
    attrs = {"scale": draw(st.sampled_from([None, 0.5])), "qk_l2norm": draw(st.booleans())}
    return Case((q, k, v, g, beta, _state(draw, q, batch, heads, key_size, value_size)), attrs)


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


# Loops.


class Sums(FunctionName):
    """A body as verified IR has it, by name, and as references get it: running sums of the type that they began with, and the slices as they come."""

    def __call__(self, total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return total + x.to(total.dtype), x


@case("scan")
def _(draw: Draw, name: str) -> Case:
    shape, dtype = list(shape_of(draw, 1)), draw(st.sampled_from(FLOATS))
    axis = draw(st.integers(0, len(shape) - 1))
    start = make([*shape[:axis], *shape[axis + 1 :]], dtype_of(draw, FLOATS) if rarely(draw) else dtype)
    x = make(shape, dtype)
    out = TupleType((type_of(start), type_of(x)))
    return Case(
        (start, x), {"body": Sums("sums"), "out": out, "carried": 1, "sliced": 1, "axis": axis}, ("out",)
    )


# Running.


@case("print_")
def _(draw: Draw, name: str) -> Case:
    return Case(
        tuple(make(shape_of(draw), dtype_of(draw, DTYPES)) for _ in range(draw(st.integers(0, 2)))), {}
    )


ops.register_extern("tests.once", lambda x, *rest: x)
ops.register_extern("tests.twice", lambda x, *rest: [x, x])


@case("extern")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    several = draw(st.booleans())
    out: Any = [type_of(x), type_of(x)] if several else type_of(x)
    return Case((x, 2, 0.5), {"name": "tests.twice" if several else "tests.once", "out": out})


@case("enter_case")
def _(draw: Draw, name: str) -> Case:
    return Case((), {"case": draw(st.sampled_from(["batch == 1", "general"]))})


@case("within")
def _(draw: Draw, name: str) -> Case:
    number = st.one_of(st.booleans(), st.integers(-3, 3), st.sampled_from([0.0, 1.5, -2.0]))
    tensor = st.builds(
        lambda shape, dtype: make(shape, dtype),
        st.just(()) | st.just((1,)),
        st.sampled_from(FLOATS + INTEGERS),
    )
    values = draw(st.lists(number | tensor, min_size=1, max_size=3))
    bound = st.none() | st.integers(-2, 2)
    return Case(
        tuple(values),
        {"ranges": [(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))) for _ in values]},
    )


# Several processes: one alone is all ranks of a world of one.


@case("all_reduce", "all_gather", "all_to_all")
def _(draw: Draw, name: str) -> Case:
    x = make(shape_of(draw), dtype_of(draw, DTYPES))
    attrs = {"axis": axis_in(draw, x.ndim)} if name == "all_gather" else {}
    return Case((x,), {**attrs, "world": 0 if rarely(draw) else 1})


@case("shard")
def _(draw: Draw, name: str) -> Case:
    x, world = make(shape_of(draw), dtype_of(draw, DTYPES)), draw(SOME)
    attrs: dict[str, Any] = {"axis": axis_in(draw, x.ndim), "world": world}
    if x.ndim and draw(st.booleans()):
        parts = draw(st.sampled_from([1, world, 3]))
        size = x.shape[attrs["axis"]] if -x.ndim <= attrs["axis"] < x.ndim else 0
        first = draw(st.integers(0, size))
        attrs["blocks"] = [(first, parts), (size - first + (1 if rarely(draw) else 0), parts)]
    rank = torch.tensor(draw(st.integers(0, world - 1)))
    return Case((x, rank.float() if rarely(draw) else rank), attrs)
