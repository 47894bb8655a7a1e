# SPDX-License-Identifier: Apache-2.0
"""Random methods that ask about their dims, and random special cases for them.

A method has dims of arguments, a and b, and of a weight, d. Its ifs lie in one another; where a condition holds, functions are
called that take no other sizes, and tensors are reshaped to what they can only be there. All of it is known from plain numbers
here: `Facts` are (least, greatest, divisor), joined by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import nnfront as nn
from nnfront import ops
from nnfront.dims import Dim
from nnfront.ir import (
    Atom,
    Block,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Scalar,
    ScalarType,
    TensorType,
    Var,
)

MOST = 4
"""The greatest number of each dim."""

Facts = tuple[int, int, int]
FREE: Facts = (1, MOST, 1)
DIMS = ("a", "b", "d")


def numbers(facts: Facts) -> list[int]:
    """The numbers that have these facts."""
    low, high, step = facts
    return [n for n in range(low, high + 1) if n % step == 0]


@dataclass
class Inputs:
    """One call: the sizes, and everything else that a case may ask about."""

    sizes: Mapping[str, int]
    mask: torch.Tensor
    k: int
    flag: bool
    s: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs by name; x depends on the sizes only."""
        a, b = self.sizes["a"], self.sizes["b"]
        x = torch.randn(a, b, generator=torch.Generator().manual_seed(8 * a + b))
        return {"x": x, "mask": self.mask, "k": self.k, "flag": self.flag, "s": torch.tensor(self.s)}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights."""
        d = self.sizes["d"]
        return {
            name: torch.randn(d, 4, generator=torch.Generator().manual_seed(d + ord(name))) for name in "wv"
        }


MASKS: Mapping[str, Callable[[int, int], torch.Tensor]] = {
    "random": lambda a, b: torch.randn(a, b, generator=torch.Generator().manual_seed(a)),
    "zeros": torch.zeros,
    "causal": lambda a, b: torch.full((a, b), -torch.inf).triu(1),
}
Values = tuple[str, int, bool, float]
EVERY_VALUE: list[Values] = list(itertools.product(MASKS, range(3), (False, True), (0.0, 1.0, 0.5)))
VALUES = st.lists(st.sampled_from(EVERY_VALUE), min_size=3, max_size=7)


def grid(values: list[Values]) -> Iterator[Inputs]:
    """Calls of every size of each dim, with values of the other arguments in turn; all of them, for `EVERY_VALUE`."""
    turn = itertools.cycle(values)
    for a, b, d in itertools.product(*[range(1, MOST + 1)] * 3):
        for kind, k, flag, s in values if values is EVERY_VALUE else [next(turn)]:
            yield Inputs({"a": a, "b": b, "d": d}, MASKS[kind](a, b), k, flag, s)


class Author:
    """Writes one method. `facts` are those of the branch that is being written, None where no call comes to."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.functions: dict[str, Function] = {}
        self.builder = builder = FunctionBuilder("main", self.functions)
        self.sizes = {name: Dim(name, min=1, max=MOST) for name in DIMS}
        a, b, d = self.sizes.values()
        self.type = TensorType((a, b), "float32")
        builder.param("x", self.type, "input")
        builder.param("mask", self.type, "input")
        builder.param("k", ScalarType("int64"), "input")
        builder.param("flag", ScalarType("bool"), "input")
        builder.param("s", TensorType((), "float32"), "input")
        for name in "wv":
            builder.param(name, TensorType((d, 4), "float32"), "weight")
        self.params = {p.name: p for p in builder.params}
        self.facts: dict[str, Facts] = dict.fromkeys(DIMS, FREE)
        self.is_dead = False

    def function(self) -> Function:
        """The method."""
        return self.builder.finish(self.body(self.params["x"], 3, 2))

    def body(self, x: Var, most: int, depth: int) -> Var:
        """Write some steps, each over the one before it; ifs up to this depth."""
        steps = [self.flat, self.masked, self.counted, self.weighed, self.reshaped_weight, self.through_layer]
        steps += [self.narrow, self.known_size, self.weight_of_known_size]
        for _ in range(self.draw(st.integers(1, most))):
            is_if = depth > 0 and self.draw(st.booleans())
            x = self.branches(x, depth - 1) if is_if else self.draw(st.sampled_from(steps))(x)
        return x

    # Steps that any sizes may take.

    def flat(self, x: Var) -> Var:
        a, b = self.type.shape
        b_ = self.builder
        flat = b_.call(ops.relu, b_.call(ops.reshape, x, shape=(a * b,)))
        return b_.call(ops.reshape, flat, shape=(a, b))

    def masked(self, x: Var) -> Var:
        return self.builder.call(
            ops.add, x, self.builder.call(ops.sum, self.builder.call(ops.exp, self.params["mask"]))
        )

    def counted(self, x: Var) -> Var:
        other = self.draw(st.sampled_from([self.params["k"], self.params["s"], Scalar(self.sizes["b"])]))
        return self.builder.call(ops.add, x, other)

    def weighed(self, x: Var) -> Var:
        turned = self.builder.call(ops.permute_dims, self.params[self.draw(st.sampled_from("wv"))])
        return self.plus(x, self.builder.call(ops.tanh, turned))

    def reshaped_weight(self, x: Var) -> Var:
        d = self.sizes["d"]
        flat = self.builder.call(ops.reshape, self.params[self.draw(st.sampled_from("wv"))], shape=(4 * d,))
        return self.plus(x, self.builder.call(ops.cumsum, flat, axis=0))

    def through_layer(self, x: Var) -> Var:
        p, q, r = Dim("p"), Dim("q"), Dim("r")
        callee = FunctionBuilder("layer")
        y = callee.param("y", TensorType((p, q), "float32"), "input")
        w = callee.param("u", TensorType((r, 4), "float32"), "weight")
        turned = callee.call(ops.permute_dims, w)
        scaled = callee.call(ops.sum, callee.call(ops.reshape, turned, shape=(4 * r,)))
        self.functions["layer"] = callee.finish(callee.call(ops.multiply, y, scaled), "private")
        return self.builder.emit(FunctionCall("layer", (x, self.params[self.draw(st.sampled_from("wv"))])))

    def plus(self, x: Var, many: Var) -> Var:
        return self.builder.call(ops.add, x, self.builder.call(ops.sum, many))

    # Steps that only the sizes of this branch may take.

    def size(self, name: str) -> Any:
        """What is known of a dim here, for a function's parameter."""
        known = numbers(self.facts[name])
        if len(known) == 1:
            return known[0]
        low, high, step = self.facts[name]
        return Dim({"a": "p", "b": "q", "d": "r"}[name], min=low, max=high, multiple_of=step)

    def narrow(self, x: Var) -> Var:
        """A call of a function that takes what is known here and nothing else."""
        if self.is_dead:
            return x
        callee = FunctionBuilder(f"narrow_{len(self.functions)}")
        y = callee.param("y", TensorType((self.size("a"), self.size("b")), "float32"), "input")
        u = callee.param("u", TensorType((self.size("d"), 4), "float32"), "weight")
        result = callee.call(ops.add, y, callee.call(ops.sum, callee.call(ops.permute_dims, u)))
        self.functions[callee.name] = callee.finish(result, "private")
        return self.builder.emit(FunctionCall(callee.name, (x, self.params["w"])), type=self.type)

    def known_size(self, x: Var) -> Var:
        """Reshapes to the numbers that are known here."""
        if self.is_dead:
            return x
        a, b = (
            numbers(self.facts[n])[0] if len(numbers(self.facts[n])) == 1 else self.sizes[n]
            for n in ("a", "b")
        )
        flat = self.builder.emit(
            Call(ops.reshape, (x,), {"shape": (b * a,)}), type=TensorType((b * a,), "float32")
        )
        again = self.builder.call(ops.cumsum, flat, axis=0)
        return self.builder.emit(Call(ops.reshape, (again,), {"shape": self.type.shape}), type=self.type)

    def weight_of_known_size(self, x: Var) -> Var:
        """A weight in a shape that it has here."""
        if self.is_dead or len(numbers(self.facts["d"])) > 1:
            return x
        size = 4 * numbers(self.facts["d"])[0]
        flat = self.builder.emit(
            Call(ops.reshape, (self.params["v"],), {"shape": (size,)}), type=TensorType((size,), "float32")
        )
        return self.plus(x, self.builder.call(ops.cumsum, flat, axis=0))

    # Branches.

    def branches(self, x: Var, depth: int) -> Var:
        outer = self.facts, self.is_dead
        condition, self.facts = self.condition()
        self.is_dead = self.is_dead or not all(numbers(f) for f in self.facts.values())
        with self.builder.block() as then:
            first = self.body(x, 2, depth)
        self.facts, self.is_dead = outer
        with self.builder.block() as otherwise:
            second = self.body(x, 2, depth)
        return self.builder.emit(
            If(condition, Block(tuple(then), first), Block(tuple(otherwise), second)), type=self.type
        )

    def condition(self) -> tuple[Atom, dict[str, Facts]]:
        """Ask something, in one step or two; with what is known where it holds."""
        first, facts = self.question(self.facts)
        if self.draw(st.integers(0, 2)):
            return first, facts
        with self.builder.block() as then:
            second, facts = self.question(facts)
        return self.builder.emit(If(first, Block(tuple(then), second), Block((), Scalar(False)))), facts

    def question(self, facts: dict[str, Facts]) -> tuple[Atom, dict[str, Facts]]:
        """A `within`, and what is known where it holds."""
        operands: list[Atom] = []
        ranges: list[tuple[int | None, int | None, int | None]] = []
        facts = dict(facts)
        end = st.integers(1, MOST)
        for _ in range(self.draw(st.integers(1, 2))):
            kind = self.draw(st.sampled_from(["dim", "dim", "dim", "multiple", "sum", "number"]))
            if kind in ("dim", "multiple"):
                name = self.draw(st.sampled_from(DIMS))
                low, high = sorted((self.draw(end), self.draw(end)))
                step = self.draw(st.sampled_from([1, 1, 2, 3]))
                by = 1 if kind == "dim" else 2
                operands.append(Scalar(by * self.sizes[name]))
                if by == 2:
                    low = high  # an expression says something only where it is a number
                    step = 1
                ranges.append((by * low, by * high, step if step > 1 else None))
                its = facts[name]
                facts[name] = max(its[0], low), min(its[1], high), math.lcm(its[2], step)
            elif kind == "sum":
                operands.append(Scalar(self.sizes["a"] + self.sizes["b"]))
                ranges.append((self.draw(end), self.draw(end) + MOST, None))
            else:
                operands.append(self.params[self.draw(st.sampled_from(["k", "flag"]))])
                ranges.append((1, None, None))
        call = Call(ops.within, tuple(operands), {"ranges": tuple(ranges)})
        return self.builder.emit(call, type=ScalarType("bool")), facts


@st.composite
def methods(draw: Any) -> IRModule:
    """A module with the method `main` and what it calls."""
    author = Author(draw)
    main = author.function()
    return IRModule([*author.functions.values(), main])


SIZE = st.integers(1, MOST)
DIM = st.one_of(
    SIZE,
    st.tuples(SIZE, SIZE).map(lambda ends: (min(ends), max(ends))),
    st.integers(1, 3).map(nn.multiple_of),
)
SEVERAL = DIM | st.lists(DIM, min_size=1, max_size=2)
MASK = st.sampled_from([nn.zeros, nn.causal])
CASE = st.fixed_dictionaries(
    {},
    optional={
        "a": SEVERAL,
        "b": SEVERAL,
        "d": SEVERAL,
        "k": st.integers(0, 2),
        "flag": st.booleans(),
        "s": st.sampled_from([0.0, nn.zeros, 1]),
        "mask": MASK | st.just([nn.zeros, nn.causal]),
    },
).filter(bool)
CASES = st.lists(CASE, min_size=1, max_size=3)


def holds(case: Mapping[str, Any], inputs: Inputs) -> bool:
    """Whether a case holds: what a condition means, said once more, element by element."""
    known = {**inputs.sizes, "k": inputs.k, "flag": inputs.flag, "s": inputs.s}
    for name, condition in case.items():
        for part in condition if isinstance(condition, list) else [condition]:
            if name == "mask":
                a, b = inputs.mask.shape
                wanted = [
                    [0.0 if part is nn.zeros or j <= i else -math.inf for j in range(b)] for i in range(a)
                ]
                if inputs.mask.tolist() != wanted:
                    return False
            elif isinstance(part, nn.multiple_of):
                if known[name] % part.divisor:
                    return False
            elif isinstance(part, tuple):
                if not part[0] <= known[name] <= part[1]:
                    return False
            elif known[name] != (0 if part is nn.zeros else part):
                return False
    return True
