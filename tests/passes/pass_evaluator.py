# SPDX-License-Identifier: Apache-2.0
"""Run IR as it is written, binding by binding, with the torch reference of each op: what passes are compared with.

It knows nothing of lowering or of the runtime. A transform is a function like any other; its results are handed to the method
by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Dim, Symbol, evaluate, solve
from nnfront.ir import (
    Atom,
    Block,
    Call,
    Constant,
    Expr,
    Function,
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


def run_method(
    ir: IRModule,
    name: str,
    inputs: Mapping[str, Any],
    weights: Mapping[str, Any],
    entered: list[str] | None = None,
) -> Any:
    """Run a public function on inputs and checkpoint weights, its transform first if it has one; note the cases it enters.

    Dims of weights are the whole module's: those of one method may tell what those of another are.
    """
    method = ir[name]
    owners = [f for f in ir.functions if f.kind in ("public", "transform")]
    said = [
        e for f in owners for p in f.params if p.role == "weight" for e in _equations(p.type, weights[p.name])
    ]
    given = {**weights, **inputs}
    if "transform" in method.attrs:
        transform = ir[method.attrs["transform"]]
        results = run_function(ir, transform, [weights[p.name] for p in transform.params])
        given = {**dict(zip(transform.result_type.names, results, strict=True)), **inputs}
    return run_function(ir, method, [given[p.name] for p in method.params], entered, said)


def run_function(
    ir: IRModule,
    function: Function,
    args: list[Any],
    entered: list[str] | None = None,
    said: Sequence[tuple[Any, int]] = (),
) -> Any:
    """Run a function on values in the order of its parameters; `said` are sizes that are known besides."""
    equations = [
        *said,
        *(e for p, arg in zip(function.params, args, strict=True) for e in _equations(p.type, arg)),
    ]
    run = Run(ir, dict(zip(function.params, args, strict=True)), equations, entered)
    return run.block(function.body)


def _equations(type: Type, value: Any) -> list[tuple[Any, int]]:
    match type:
        case TensorType():
            assert str(value.dtype).removeprefix("torch.") == type.dtype
            assert len(type.shape) == value.dim()
            return list(zip(type.shape, value.shape, strict=True))
        case ScalarType() if type.value is not None:
            return [(type.value, value)]
        case TupleType():
            return [
                e for field, part in zip(type.fields, value, strict=True) for e in _equations(field, part)
            ]
        case _:
            return []


class Run:
    """One run of a function: the values of its variables and dims."""

    def __init__(
        self,
        ir: IRModule,
        values: dict[Var, Any],
        equations: list[tuple[Any, int]],
        entered: list[str] | None,
    ) -> None:
        self.ir = ir
        self.entered = entered
        self.values = values
        self.dims: dict[Symbol, int] = solve(equations)

    def block(self, block: Block) -> Any:
        for binding in block.bindings:
            value = self.expr(binding.value)
            for size, number in _equations(binding.var.type, value):
                assert evaluate(size, self.dims) == number, f"{binding.var.name}: {size} is not {number}"
            self.values[binding.var] = value
        return self.atom(block.result)

    def expr(self, expr: Expr) -> Any:
        match expr:
            case Call():
                if expr.op.name == "enter_case" and self.entered is not None:
                    self.entered.append(expr.attrs["case"])
                args = [None if a is None else self.atom(a) for a in expr.args]
                return expr.op.run(args, {name: self.attr(value) for name, value in expr.attrs.items()})
            case FunctionCall():
                args = [self.atom(a) for a in expr.args]
                return run_function(self.ir, self.ir[expr.function], args, self.entered)
            case Tuple():
                return tuple(self.atom(field) for field in expr.fields)
            case Projection():
                return self.atom(expr.tuple)[expr.index]
            case If():
                return self.block(expr.then if bool(self.atom(expr.condition)) else expr.otherwise)
            case MatchShape():
                value = self.atom(expr.value)
                known = [(Dim(symbol.name), number) for symbol, number in self.dims.items()]
                self.dims |= solve([*known, *_equations(expr.type, value)])
                return value
            case _:
                return self.atom(expr)

    def atom(self, atom: Atom) -> Any:
        match atom:
            case Var():
                return self.values[atom]
            case Constant():
                data = torch.frombuffer(bytearray(atom.data), dtype=getattr(torch, atom.type.dtype))
                return data.reshape([int(s) for s in atom.type.shape])
            case Scalar():
                return self.attr(atom.value)

    def attr(self, value: Any) -> Any:
        if isinstance(value, Dim):
            return evaluate(value, self.dims)
        if isinstance(value, tuple | list):
            return tuple(map(self.attr, value))
        return value
