# SPDX-License-Identifier: Apache-2.0
"""Generated modules: everything that the text form can say, whether or not it makes sense to the verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

import nnfront.ops  # noqa: F401  declares the ops
from nnfront import dims, dtypes
from nnfront.dims import Dim, Size, Symbol, of_symbol
from nnfront.ir import (
    KINDS,
    OPS,
    ROLES,
    Atom,
    Binding,
    Block,
    Buffer,
    Call,
    Constant,
    Expr,
    Function,
    FunctionCall,
    FunctionType,
    If,
    IRModule,
    MatchShape,
    Mutator,
    ObjectType,
    Param,
    Projection,
    Provenance,
    Scalar,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    kv_layer,
)

WORDS = [
    "x",
    "cache",
    "w.0.weight",
    "if",
    "return",
    "yield",
    "None",
    "nan",
    "const",
    "dim",
    "def",
    "state",
    "a.b_1",
    "größe",
]
DIM_NAMES = ["n", "m", "seq", "batch_1", "fresh", "True", "nan", "dim", "type"]
ATTR_NAMES = ["axis", "a b", "None", "", "dim", "x.y"]

names = st.sampled_from(WORDS) | st.text(max_size=6)
numbers: st.SearchStrategy[bool | int | float] = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, 1e22, 1.0])
)
provenances = st.none() | st.builds(
    Provenance,
    st.sampled_from(["", "model.layers.0.mlp"]),
    st.sampled_from(["", "llama.py", "a b.py"]),
    st.integers(1, 99),
)


@st.composite
def symbols(draw: Callable[..., Any]) -> Symbol:
    low = draw(st.integers(0, 9))
    step = draw(st.sampled_from([1, 1, 2, 16]))
    high = draw(st.none() | st.integers(low + 16, 99))
    name = draw(st.sampled_from(DIM_NAMES))
    return Symbol.fresh(name, low, high, step) if draw(st.booleans()) else Symbol(name, 0, low, high, step)


class Maker:
    """Draws the parts of one function over a few dims of its own."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.symbols = draw(
            st.lists(symbols(), max_size=3, unique_by=lambda symbol: (symbol.name, symbol.uid))
        )
        self.vars: list[Var] = []
        self.taken: set[str] = set()

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def many(self, make: Callable[[], Any], most: int = 3) -> tuple[Any, ...]:
        return tuple(make() for _ in range(self.draw(st.integers(0, most))))

    def name(self) -> str:
        name = self.draw(names)
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def size(self) -> Size:
        number = self.draw(st.integers(0, 300))
        if not self.symbols or self.pick(True, False):
            return number
        a: Size = of_symbol(self.pick(*self.symbols))
        b = of_symbol(self.pick(*self.symbols))
        k = number + 1
        options = [
            lambda: a,
            lambda: a * b + k,
            lambda: a * 2 - b,
            lambda: dims.ceildiv(a + b, k),
            lambda: a * b // k,
        ]
        options += [lambda: (a + b) % k, lambda: dims.minimum(a, b * 2, k), lambda: dims.maximum(a // k, b)]
        return self.pick(*options)()

    def dim(self) -> Dim | None:
        size = self.size()
        return size if isinstance(size, Dim) else None

    def sizes(self) -> tuple[Size, ...]:
        return self.many(self.size)

    def dtype(self) -> str:
        return self.pick(*dtypes.DTYPES)

    def layer(self) -> StateLayerType:
        sizes, window = (self.size(), self.size()), self.pick(None, 16)
        if self.pick(True, False):
            return kv_layer(2, self.pick(4, 64), self.dtype(), *sizes, window, self.pick(None, 8))
        count = self.pick(0, 1, 2)
        buffers = [
            Buffer(f"{self.pick('a', 'layer', 'b c')}{i}", (3,) * self.pick(1, 3), self.dtype())
            for i in range(3)
        ]
        return StateLayerType(tuple(buffers[:count]), tuple(buffers[count:]), *sizes, window)

    def type(self, depth: int = 0) -> Type:
        kinds = ["tensor"] * 4 + ["shape", "scalar", "layer", "cache", "object"]
        match self.pick(*kinds, *(["tuple", "dict", "function"] if depth < 2 else [])):
            case "tensor":
                return TensorType(self.sizes(), self.dtype())
            case "shape":
                return ShapeType(self.sizes())
            case "scalar":
                return ScalarType(self.pick("bool", "int64", "float64"), self.pick(None, self.size()))
            case "layer":
                return self.layer()
            case "cache":
                unit = self.many(self.layer, 2)
                return StateType(unit * self.draw(st.integers(0, 4)) + self.many(self.layer, 2))
            case "object":
                return ObjectType(self.draw(names))
            case "function":
                return FunctionType(self.many(lambda: self.type(depth + 1), 2), self.type(depth + 1))
            case kind:
                fields = self.many(lambda: self.type(depth + 1))
                return TupleType(fields, self.field_names(len(fields)) if kind == "dict" else None)

    def field_names(self, count: int) -> tuple[str, ...]:
        return tuple(self.draw(st.lists(names, min_size=count, max_size=count, unique=True)))

    def constant(self) -> Constant:
        shape, dtype = self.pick((), (2,), (2, 3), (20,), (0, 4)), self.dtype()
        count = math.prod(shape) * dtypes.size_bytes(dtype)
        return Constant(TensorType(shape, dtype), self.draw(st.binary(min_size=count, max_size=count)))

    def atom(self) -> Atom:
        kind = self.pick("var", "var", "var", "number", "dim", "constant")
        if kind == "var" and self.vars:
            return self.pick(*self.vars)
        if kind == "constant":
            return self.constant()
        dim = self.dim() if kind == "dim" else None
        return Scalar(self.draw(numbers) if dim is None else dim)

    def item(self, depth: int = 0, *, mappings: bool = False) -> Any:
        kinds = ["none", "number", "text", "size", "type"]
        kinds += ["tuple"] * (depth < 2) + ["mapping"] * (mappings and depth < 2)
        match self.pick(*kinds):
            case "none":
                return None
            case "number":
                return self.draw(numbers)
            case "text":
                return self.draw(names)
            case "size":
                return self.size()
            case "type":
                return self.type(1)
            case "tuple":
                return self.many(lambda: self.item(depth + 1, mappings=mappings))
            case _:
                return {name: self.item(depth + 1, mappings=True) for name in self.field_names(2)}

    def attrs(self, *, mappings: bool = False) -> dict[str, Any]:
        chosen = self.draw(st.lists(st.sampled_from(ATTR_NAMES), max_size=2, unique=True))
        return {name: self.item(mappings=mappings) for name in chosen}

    def call(self) -> Call:
        op = OPS[self.pick(*sorted(OPS))]
        if op.is_variadic:
            return Call(op, self.many(self.atom), self.attrs())
        args = [
            None if operand.is_optional and self.pick(True, False) else self.atom() for operand in op.operands
        ]
        return Call(op, tuple(args), self.attrs())

    def expr(self, depth: int) -> Expr:
        match self.pick(
            "call",
            "call",
            "function",
            "tuple",
            "dict",
            "field",
            "match",
            "atom",
            *(["if"] if depth < 2 else []),
        ):
            case "call":
                return self.call()
            case "function":
                return FunctionCall(self.draw(names), self.many(self.atom))
            case "tuple":
                return Tuple(self.many(self.atom))
            case "dict":
                fields = self.many(self.atom)
                return Tuple(fields, self.field_names(len(fields)))
            case "field":
                return Projection(self.atom(), self.draw(st.integers(0, 9)))
            case "match":
                return MatchShape(self.atom(), self.type())
            case "if":
                return If(self.atom(), self.block(depth + 1), self.block(depth + 1))
            case _:
                return self.atom()

    def block(self, depth: int) -> Block:
        outer = list(self.vars)
        bindings = []
        for _ in range(self.draw(st.integers(0, 3))):
            value = self.expr(depth)
            var = Var(self.name(), self.type())
            self.vars.append(var)
            bindings.append(Binding(var, value, self.draw(provenances)))
        result = self.atom()
        self.vars = outer
        return Block(tuple(bindings), result)

    def function(self, name: str) -> Function:
        params = self.many(lambda: Param(self.name(), self.type(), self.pick(*ROLES)))
        self.vars += params
        block = self.block(0)
        attrs = self.attrs(mappings=True)
        return Function(name, params, block.bindings, block.result, self.pick(*KINDS), attrs)


@st.composite
def modules(draw: Callable[..., Any]) -> IRModule:
    """Modules of up to two functions."""
    function_names = draw(st.lists(names, max_size=2, unique=True))
    maker = Maker(draw)
    maker.symbols = []
    return IRModule([Maker(draw).function(name) for name in function_names], maker.attrs(mappings=True))


class _Renamed(Mutator):
    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self.make = make

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = self.expr(binding.value)
        var = Var(self.make(len(self.replaced)), binding.var.type)
        self.replaced[binding.var] = var
        return (Binding(var, value),)


def renamed(module: IRModule, prefix: str) -> IRModule:
    """The module without provenance, its local variables called `prefix` and a number."""
    return module.with_functions([_Renamed(lambda i: f"{prefix}{i}").function(f) for f in module.functions])
