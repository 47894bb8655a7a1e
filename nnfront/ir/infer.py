# SPDX-License-Identifier: Apache-2.0
"""The type of an expression, and the least general type that covers two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nnfront.dims import (
    Dim,
    Size,
    Symbol,
    describe_facts,
    is_itself,
    same,
    satisfies,
    substitute,
    unify,
)
from nnfront.errors import InferError
from nnfront.ir.expr import Call, Constant, Expr, FunctionCall, If, MatchShape, Projection, Scalar, Tuple, Var
from nnfront.ir.print_types import type_text
from nnfront.ir.types import (
    FunctionType,
    ObjectType,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    sizes_of,
)
from nnfront.ir.walk import functions_of

if TYPE_CHECKING:
    from nnfront.ir.module import Function

_NO_FACTS = Symbol("n").facts


def infer(expr: Expr, functions: Mapping[str, Function]) -> Type:
    """Return the type of `expr`; `functions` are the module's, for calls.

    Raises InferError when operands do not fit, without a place: the caller knows it.
    """
    match expr:
        case Var() | Constant() | Scalar():
            return expr.type
        case Call():
            types = [None if a is None else a.type for a in expr.args]
            result = expr.op.result_type(types, expr.attrs)
            called = expr.op.called_as(types, expr.attrs)
            if called is not None:
                _check_called(expr, called, functions)
            return result
        case FunctionCall():
            return call_type(functions[expr.function], [a.type for a in expr.args])
        case Tuple():
            return TupleType(tuple(f.type for f in expr.fields), expr.names)
        case Projection():
            source = expr.tuple.type
            if not isinstance(source, TupleType) or not 0 <= expr.index < len(source.fields):
                raise InferError(f"there is no field {expr.index} to take")
            return source.fields[expr.index]
        case If():
            joined = join(expr.then.result.type, expr.otherwise.result.type)
            if joined is None:
                raise InferError(
                    "the branches of an if have types that nothing covers",
                    details=[
                        f"then {type_text(expr.then.result.type)}",
                        f"else {type_text(expr.otherwise.result.type)}",
                    ],
                    help="a size that differs must be a dim in one of them: match both to one type with match_shape",
                )
            return joined
        case MatchShape():
            return expr.type


def _check_called(call: Call, called: FunctionType, functions: Mapping[str, Function]) -> None:
    """Raise InferError unless the functions that an op is given take and return what it calls them with and takes back."""
    for name in functions_of(call):
        if name not in functions:  # that it is there is for the verifier to say (V11)
            continue
        result = call_type(functions[name], called.params)
        if result != called.result:
            raise InferError(
                f"{call.op.name}: {name} returns {type_text(result)}, expected {type_text(called.result)}"
            )


def call_type(function: Function, args: Sequence[Type]) -> Type:
    """Return the result type of calling `function` with arguments of these types.

    The function's dims are its own: they are solved from the arguments' types, then replaced in the result's. What is known of the sizes
    must prove what the function says of its dims.
    """
    params = function.params
    if len(params) != len(args):
        raise InferError(f"{function.name} takes {len(params)} arguments, got {len(args)}")
    if all(p.type is a for p, a in zip(params, args, strict=True)):
        return function.result_type
    for param, arg in zip(params, args, strict=True):
        if without_sizes(param.type) != without_sizes(arg) or len(sizes_of(param.type)) > len(sizes_of(arg)):
            raise InferError(f"argument {param.name!r} of {function.name} has another type")
    bound, misfit = call_sizes(function, args)
    if misfit is not None:
        raise InferError(f"{function.name} expects size {misfit[0]} where the argument has {misfit[1]}")
    if all(is_itself(symbol, size) for symbol, size in bound.items()):
        return function.result_type
    _check_facts(function, bound)
    return substitute_type(function.result_type, bound)


def call_sizes(
    function: Function, args: Sequence[Type]
) -> tuple[dict[Symbol, Size], tuple[Size, Size] | None]:
    """Return what the dims of a function's parameters are in a call with arguments of these types; and the first size that a parameter has and an argument is not known to have, with the argument's."""
    bound: dict[Symbol, Size] = {}
    pairs = [
        pair for p, arg in zip(function.params, args, strict=True) for pair in _paired_sizes(p.type, arg)
    ]
    at = unify([pattern for pattern, _ in pairs], [size for _, size in pairs], bound)
    return bound, None if at is None else pairs[at]


def _paired_sizes(param: Type, arg: Type) -> Iterator[tuple[Size, Size]]:
    if isinstance(param, TupleType) and isinstance(arg, TupleType):
        for mine, its in zip(param.fields, arg.fields, strict=True):
            yield from _paired_sizes(mine, its)
    elif not (isinstance(param, ScalarType) and param.value is None):  # any number will do
        yield from zip(sizes_of(param), sizes_of(arg), strict=True)


def _check_facts(function: Function, bound: Mapping[Symbol, Size]) -> None:
    """Raise InferError unless all that the function says of its dims holds for the sizes that they are bound to: nothing looks at run time."""
    for symbol, size in bound.items():
        if symbol.facts != _NO_FACTS and satisfies(size, symbol) is not True:
            known = (
                [f"{s} is {describe_facts(*s.facts)}" for s in size.symbols] if isinstance(size, Dim) else []
            )
            raise InferError(
                f"{function.name} expects of its dim '{symbol}' that it is {describe_facts(*symbol.facts)}, and gets {size}",
                details=known,
                help="say as much of the caller's dims, or less of the function's",
            )


def without_sizes(type: Type) -> Type:
    """Return what types have in common that differ in sizes at most."""
    return ScalarType(type.dtype) if isinstance(type, ScalarType) else map_sizes(type, lambda size: 0)


def substitute_type(type: Type, mapping: Mapping[Symbol, Size]) -> Type:
    """Return `type` with its dims replaced; the same object if none of them is in `mapping`."""
    return map_sizes(type, lambda size: substitute(size, mapping))


def map_sizes(type: Type, size: Callable[[Size], Size]) -> Type:
    """Return `type` with `size` applied to each of its sizes; the same object if all of them come back as they are."""
    match type:
        case TensorType():
            shape = tuple(map(size, type.shape))
            return type if all(map(operator.is_, shape, type.shape)) else TensorType(shape, type.dtype)
        case ShapeType():
            return ShapeType(tuple(map(size, type.sizes)))
        case ScalarType():
            return type if type.value is None else ScalarType(type.dtype, size(type.value))
        case TupleType():
            return TupleType(tuple(map_sizes(f, size) for f in type.fields), type.names)
        case StateLayerType():
            batch, max_seq = size(type.batch), size(type.max_seq)
            if batch is type.batch and max_seq is type.max_seq:
                return type
            return StateLayerType(type.per_token, type.per_sequence, batch, max_seq, type.window)
        case StateType():
            done: dict[int, StateLayerType] = {}  # the layers of a cache are mostly one and the same object
            for layer in type.layers:
                if id(layer) not in done:
                    new = map_sizes(layer, size)
                    assert isinstance(new, StateLayerType)
                    done[id(layer)] = new
            return StateType(tuple(done[id(layer)] for layer in type.layers))
        case FunctionType():
            return FunctionType(tuple(map_sizes(p, size) for p in type.params), map_sizes(type.result, size))
        case ObjectType():
            return type


def join(a: Type, b: Type) -> Type | None:
    """Return the least general type that covers both, None if there is none.

    A known size and a dim are covered by the dim: `[16]` and `[n]` give `[n]`. That the branch with `[16]` knows `n == 16` is for
    the verifier to see (V18).
    """
    if a == b:
        return a
    match a, b:
        case TensorType(), TensorType() if a.dtype == b.dtype and a.ndim == b.ndim:
            sizes = [_join_size(x, y) for x, y in zip(a.shape, b.shape, strict=True)]
            known = tuple(s for s in sizes if s is not None)
            return TensorType(known, a.dtype) if len(known) == len(sizes) else None
        case TupleType(), TupleType() if len(a.fields) == len(b.fields) and a.names == b.names:
            fields = [join(x, y) for x, y in zip(a.fields, b.fields, strict=True)]
            covered = tuple(f for f in fields if f is not None)
            return TupleType(covered, a.names) if len(covered) == len(fields) else None
        case ScalarType(), ScalarType() if a.dtype == b.dtype:
            return ScalarType(a.dtype)
        case _:
            return None


def _join_size(a: Size, b: Size) -> Size | None:
    if same(a, b):
        return a
    if isinstance(a, int) != isinstance(b, int):
        return b if isinstance(a, int) else a
    return None
