# SPDX-License-Identifier: Apache-2.0
"""Random modules with weights: several methods, private functions, shared and unshared weights, dims from weights.

Every value is a square matrix, 4 by 4 or d by d with d a dim of weights, or a matrix without meaning for others (a half, a
number), so that nearly every op fits every value. Everything that is computed reaches the result.

`wide` modules have, besides: dead code and weights that nobody reads, branches, tuples as parameters and results, private functions
of any size that use it as a number, fused functions, fresh dims, weights `[m*n]` of which a call says what m and n are, and `[d*e]`
of which the weight of another method says what d is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from nnfront import ops
from nnfront.dims import Dim, Symbol, of_symbol
from nnfront.ir import (
    Atom,
    Block,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    MatchShape,
    Projection,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
)

STATIC = TensorType((4, 4), "float32")
NAMED = TensorType((Dim("d"), Dim("d")), "float32")
TYPES = (STATIC, NAMED)
ANY = TensorType((Dim("k"), Dim("k")), "float32")  # of private functions that are called with either
GRID = TensorType((Dim("m"), Dim("n")), "float32")
FLAT = TensorType((Dim("m") * Dim("n"),), "float32")


def weight_types(named: TensorType) -> dict[str, TensorType]:
    """A weight's type is in its name, so that functions agree about it."""
    return {f"{kind}{i}": type for kind, type in (("w", STATIC), ("v", named)) for i in range(3)}


def _half_and_back(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.astype, b.call(ops.astype, x, dtype="float16"), dtype="float32")


def _top_half(b: FunctionBuilder, x: Var) -> Var:
    parts = b.call(ops.split, b.call(ops.concat, x, x), indices_or_sections=2)
    return b.emit(Projection(parts, 1))


def _plus_total(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.call(ops.sum, x))


def _plus_ones(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.call(ops.ones, shape=x.type.shape))  # type: ignore[union-attr]


def _times_size(b: FunctionBuilder, x: Var) -> Var:
    size = x.type.shape[0]  # type: ignore[union-attr]
    return b.call(ops.multiply, x, Scalar(size))


def _times_size_under_a_name(b: FunctionBuilder, x: Var) -> Var:
    size = x.type.shape[0]  # type: ignore[union-attr]
    number = b.emit(Projection(b.emit(Tuple((x, Scalar(size)))), 1))
    return b.call(ops.add, x, number)


def _through_tuple(b: FunctionBuilder, x: Var) -> Var:
    return b.emit(Projection(b.emit(Tuple((Scalar(1.0), x))), 1))


UNARY: tuple[Callable[[FunctionBuilder, Var], Var], ...] = (
    lambda b, x: b.call(ops.permute_dims, x),
    lambda b, x: b.call(ops.multiply, x, Scalar(0.5)),
    lambda b, x: b.call(ops.stop_lift_params, x),
    lambda b, x: b.call(ops.tanh, x),
    lambda b, x: b.emit(x),
    _half_and_back,
    _top_half,
    _plus_total,
    _plus_ones,
    _through_tuple,
)
WIDE_UNARY = (
    *UNARY,
    _times_size,
    _times_size_under_a_name,
    lambda b, x: b.call(ops.multiply, x, Scalar(1e-3)),
    lambda b, x: b.emit(MatchShape(x, x.type)),
    lambda b, x: b.call(ops.ones, shape=x.type.shape),
)
BINARY = (ops.add, ops.multiply, ops.matmul)


@st.composite
def modules(draw: Any, declares: bool = False, wide: bool = False) -> IRModule:
    """A module with one to three methods and up to two private functions; `declares`: some values are derived tensors."""
    functions: dict[str, Function] = {}
    size = (
        draw(st.sampled_from([Dim("d"), Dim("d", min=1), of_symbol(Symbol.fresh("d"))])) if wide else Dim("d")
    )
    named = TensorType((size, size), "float32")
    types = (STATIC, named)
    if wide and draw(st.booleans()):
        functions["kernel"] = _kernel()
    for name in draw(st.sampled_from([(), ("inner",), ("inner", "outer")])):
        type = draw(st.sampled_from((*types, ANY, ANY) if wide else types))
        builder = FunctionBuilder(name, functions)
        builder.param("x", type, "input")
        for i in range(draw(st.integers(1, 2))):
            builder.param(f"p{i}", type, draw(st.sampled_from(["input", "weight"])))
        if wide and draw(st.booleans()):
            builder.param("pair", TupleType((type, type)), "input")
        body = _Body(draw, builder, functions, wide)
        result = body.result()
        if wide and draw(st.booleans()):
            result = builder.emit(
                Tuple((result, draw(st.sampled_from([v for v in body.values if v.type == type]))))
            )
        functions[name] = builder.finish(result, "private")
    weights = weight_types(named)
    has_rest = wide and draw(st.booleans()) and size.symbols[0].uid == 0
    for name in draw(st.sampled_from([("a",), ("b", "a"), ("a", "b", "c")])):
        builder = FunctionBuilder(name, functions)
        builder.param("x", draw(st.sampled_from(types)), "input")
        builder.param("flag", ScalarType("bool"), "input")
        for weight in draw(st.lists(st.sampled_from(sorted(weights)), min_size=1, max_size=4, unique=True)):
            builder.param(weight, weights[weight], "weight")
        if has_rest and name == "a" and not any(p.name.startswith("v") for p in builder.params):
            builder.param("v0", named, "weight")
        if has_rest and draw(st.booleans()):
            builder.param("rest", TensorType((size * Dim("e"),), "float32"), "weight")
        functions[name] = _method(draw, builder, functions, declares, wide, size)
    return IRModule(functions.values())


def _kernel() -> Function:
    builder = FunctionBuilder("kernel")
    x, w = (builder.param(name, ANY, "input") for name in "xw")
    return builder.finish(builder.call(ops.matmul, x, builder.call(ops.permute_dims, w)), "fused")


def _method(
    draw: Any, builder: FunctionBuilder, functions: dict[str, Function], declares: bool, wide: bool, size: Dim
) -> Function:
    result = _Body(draw, builder, functions, wide).result()
    if wide and draw(st.booleans()):
        grid, flat = builder.param("grid", GRID, "input"), builder.param("flat", FLAT, "weight")
        flat_1 = builder.call(ops.add, flat, Scalar(1.0)) if draw(st.booleans()) else flat
        sum = builder.call(
            ops.sum, builder.call(ops.multiply, grid, builder.call(ops.reshape, flat_1, shape=GRID.shape))
        )
        result = builder.call(ops.add, result, sum)
    for rest in [p for p in builder.params if p.name == "rest"]:
        twice = builder.call(ops.multiply, rest, Scalar(2.0)) if draw(st.booleans()) else rest
        rows = builder.call(ops.reshape, twice, shape=(size, Dim("e")))
        last = builder.call(ops.sum, rows, axis=0) if draw(st.booleans()) else rows
        result = builder.call(ops.add, result, builder.call(ops.sum, last))
    function = builder.finish(result)
    if declares:
        weights = {p for p in function.params if p.role == "weight"}
        derived = []
        for binding in function.bindings:
            operands = [a for a in getattr(binding.value, "args", ()) if isinstance(a, Var)]
            of_weights = (
                operands
                and all(a in weights for a in operands)
                and not isinstance(binding.value, FunctionCall)
            )
            if of_weights and binding.var.name != "stop_lift_params" and draw(st.booleans()):
                derived.append(binding.var.name)
        function = function.with_(attrs={"derived": tuple(derived)})
    return function


class _Body:
    """Draws the body of one function."""

    def __init__(
        self, draw: Any, builder: FunctionBuilder, functions: dict[str, Function], wide: bool
    ) -> None:
        self.draw = draw
        self.builder = builder
        self.functions = functions
        self.wide = wide
        self.values: list[Var] = [p for p in builder.params if getattr(p.type, "ndim", 0) == 2]
        self.pairs: list[Var] = [p for p in builder.params if isinstance(p.type, TupleType)]
        self.unread = set(self.values[1:])

    def result(self) -> Atom:
        """Draw bindings; return what is made of all that was computed, or, if `wide`, of what was not drawn to be dead."""
        for _ in range(self.draw(st.integers(1, 8))):
            self.step()
        total: Atom = self.values[0]
        for value in sorted(self.unread, key=lambda v: v.name):
            if not self.wide or self.draw(st.integers(0, 3)):
                total = self.builder.call(ops.add, total, self.builder.call(ops.sum, value))
        return total

    def step(self) -> None:
        """Draw one value."""
        draw, x = self.draw, self.draw(st.sampled_from(self.values))
        same = [v for v in self.values if v.type == x.type]
        kinds = ["unary", "binary"]
        callees = [f for f in self.functions.values() if _takes(f, x.type)]
        kinds += ["call"] if callees else []
        pairs = [p for p in self.pairs if p.type.fields[0] == x.type]  # type: ignore[union-attr]
        if self.wide:
            kinds += ["pair", "branch", *(["field"] * 2 if pairs else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "unary":
            self.add(draw(st.sampled_from(WIDE_UNARY if self.wide else UNARY))(self.builder, x), x)
        elif kind == "binary":
            y = draw(st.sampled_from(same))
            self.add(self.builder.call(draw(st.sampled_from(BINARY)), x, y), x, y)
        elif kind == "call":
            callee = draw(st.sampled_from(callees))
            args = tuple(self.argument(p.type, same) for p in callee.params)
            self.add(self.builder.emit(FunctionCall(callee.name, args)), *args)
        elif kind == "field":
            self.add(self.builder.emit(Projection(draw(st.sampled_from(pairs)), draw(st.integers(0, 1)))))
        elif kind == "pair":
            self.pair(same)
        else:
            self.branches(same)

    def add(self, new: Var, *read: Var) -> None:
        """Note a new value, and what it reads."""
        self.unread -= set(read)
        if isinstance(new.type, TupleType):
            self.pairs.append(new)
        else:
            self.values.append(new)
            self.unread.add(new)

    def pair(self, same: list[Var]) -> Var:
        """Draw a tuple of two values of one type."""
        fields = tuple(self.draw(st.sampled_from(same)) for _ in range(2))
        self.add(self.builder.emit(Tuple(fields)), *fields)
        return self.pairs[-1]

    def argument(self, type: Type, same: list[Var]) -> Var:
        """Draw what a function is called with."""
        if isinstance(type, TensorType):
            return self.draw(st.sampled_from(same))
        pairs = [p for p in self.pairs if p.type.fields[0] == same[0].type]  # type: ignore[union-attr]
        return self.draw(st.sampled_from(pairs)) if pairs else self.pair(same)

    def branches(self, same: list[Var]) -> None:
        """Draw an `if` whose branches compute a value of one type."""
        builder, (x, y) = self.builder, (self.draw(st.sampled_from(same)) for _ in range(2))
        flags = [p for p in builder.params if p.name == "flag"]
        if not flags:
            return
        blocks = []
        for value in (x, y):
            with builder.block() as bindings:
                for _ in range(self.draw(st.integers(0, 2))):
                    unary = self.draw(st.sampled_from([u for u in WIDE_UNARY]))
                    value = unary(builder, value)
            blocks.append(Block(tuple(bindings), value))
        self.add(builder.emit(If(flags[0], *blocks)), x, y)


def _takes(function: Function, type: Type) -> bool:
    """Whether a function can be called with values of a type, and tuples of two of them."""
    if function.kind == "public":
        return False
    wanted = function.params[0].type
    return wanted in (type, ANY)
