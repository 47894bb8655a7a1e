# SPDX-License-Identifier: Apache-2.0
"""Rules about form: names, scopes, operands, literals, attributes. They take nothing for granted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from nnfront import dtypes
from nnfront.dims import Dim
from nnfront.errors import VerifyError
from nnfront.ir.attributes import INT64
from nnfront.ir.budget import MAX_AXES
from nnfront.ir.expr import ROLES, Binding, Call, Constant, FunctionCall, Scalar, Var
from nnfront.ir.interfaces import KINDS
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
from nnfront.ir.verifier_view import Body, Rule, Scope
from nnfront.ir.walk import functions_of

_SCALARS = ("bool", "int64", "float64")
_TYPES = get_args(Type)
_PLAIN = frozenset({bool, int, float, str, type(None), Dim, *_TYPES})


def v2_kinds_and_roles_are_known(body: Body) -> Iterator[VerifyError]:
    """A function's kind and its parameters' roles are among those that there are."""
    function = body.function
    if function.kind not in KINDS:
        yield body.error(
            f"V2: unknown kind {function.kind!r} of function", help=f"use one of {', '.join(KINDS)}"
        )
    for param in function.params:
        if param.role not in ROLES:
            what = f"V2: parameter {param.name!r} has the unknown role {param.role!r}"
            yield body.error(what, help=f"use one of {', '.join(ROLES)}")


def v3_transforms_take_weights_only(body: Body) -> Iterator[VerifyError]:
    """Every parameter of a transform is a weight: it runs before there are inputs."""
    for param in body.function.params:
        if body.function.kind == "transform" and param.role != "weight":
            yield body.error(
                f"V3: parameter {param.name!r} of a transform must be a weight, got the role {param.role!r}"
            )


def v4_names_are_unique(body: Body) -> Iterator[VerifyError]:
    """Every variable of a function, branches included, is bound once under a name of its own."""
    seen: set[str] = set()
    for param in body.function.params:
        if param.name in seen:
            yield body.error(f"V4: two parameters are called {param.name!r}")
        seen.add(param.name)
    for step in body.steps:
        name = step.binding.var.name
        if name in seen:
            yield body.error(f"V4: {name!r} is bound twice", step.binding)
        seen.add(name)


def v5_variables_are_bound_before_use(body: Body) -> Iterator[VerifyError]:
    """A variable is read only behind its binding, and one that a branch binds only in that branch."""
    return _unbound(body, body.root, set(body.function.params))


def _unbound(body: Body, scope: Scope, bound: set[Var]) -> Iterator[VerifyError]:
    for binding, atoms, branches in scope.steps:
        for atom in atoms:
            if isinstance(atom, Var) and atom not in bound:
                yield body.error(f"V5: {atom.name!r} is read where it is not bound", binding)
        for branch in branches:
            yield from _unbound(body, branch, bound)
        bound.add(binding.var)
    if isinstance(scope.result, Var) and scope.result not in bound:
        yield body.error(f"V5: {scope.result.name!r} is returned where it is not bound", scope.owner)
    bound.difference_update([step.binding.var for step in scope.steps])


def v6_operands_are_atoms(body: Body) -> Iterator[VerifyError]:
    """Operands and results are variables, constants or literals; only an op's operand may be absent."""
    for binding, atoms, _ in body.steps:
        for atom in atoms:
            if not isinstance(atom, Var | Constant | Scalar) and not (
                atom is None and isinstance(binding.value, Call)
            ):
                yield body.error(f"V6: an operand is a {type(atom).__name__}, not an atom", binding)
    results: list[tuple[object, Binding | None]] = list(body.results)
    for result, owner in results:
        if not isinstance(result, Var | Constant | Scalar):
            yield body.error(f"V6: the result of a block is a {type(result).__name__}, not an atom", owner)


def v7_types_are_well_formed(body: Body) -> Iterator[VerifyError]:
    """Dtypes are those of `nnfront.dtypes`, host scalars are int64, float64 or bool, and no size is negative."""
    for type_, binding in body.types:
        problem = _type_problem(type_)
        if problem:
            yield body.error(f"V7: {problem}", binding)


def _type_problem(type_: Any) -> str:
    if not isinstance(type_, _TYPES):
        return f"a type is a {type(type_).__name__}"
    for size in () if isinstance(type_, TupleType | StateType | FunctionType) else sizes_of(type_):
        if not isinstance(size, Dim) and (
            type(size) is not int or size not in INT64 or (size < 0 and not isinstance(type_, ScalarType))
        ):
            return f"{size!r} is no size"
    match type_:
        case TupleType(fields=parts, names=names):
            if names is not None and (len(names) != len(parts) or len(set(names)) != len(names)):
                return f"{len(parts)} fields of a tuple have the names {names}"
        case FunctionType():
            parts = (*type_.params, type_.result)
        case StateType():
            parts = tuple({id(layer): layer for layer in type_.layers}.values())
        case ScalarType():
            return "" if type_.dtype in _SCALARS else f"{type_.dtype!r} is no dtype of a host scalar"
        case ObjectType() | ShapeType():
            return ""
        case StateLayerType():
            return _layer_problem(type_)
        case TensorType() if type_.ndim > MAX_AXES:
            return f"a tensor has {type_.ndim} axes, {MAX_AXES} are the most"
        case _:
            return "" if type_.dtype in dtypes.DTYPES else f"unknown dtype {type_.dtype!r}"
    return next((problem for part in parts if (problem := _type_problem(part))), "")


def _layer_problem(layer: StateLayerType) -> str:
    names = [buffer.name for buffer in layer.buffers]
    if not names or len(set(names)) != len(names):
        return f"the buffers of a layer of a cache are named {names}"
    if not 0 < (layer.window or 1) < INT64.stop:
        return "the window of a cache is at least 1"
    for buffer in layer.buffers:
        if buffer.dtype not in dtypes.DTYPES:
            return f"unknown dtype {buffer.dtype!r}"
        if not all(0 < size < INT64.stop for size in buffer.shape) or len(buffer.shape) > MAX_AXES - 2:
            return f"sizes of a buffer of a cache are at least 1, {buffer.name!r} is {list(buffer.shape)}"
    if not all(buffer.shape for buffer in layer.per_token):
        return "a buffer that a cache has of each token has at least one axis"
    return ""


def v8_literals_fit_their_type(body: Body) -> Iterator[VerifyError]:
    """A constant has a static shape and as many bytes as its type says; a literal is a bool, an int64, a float or a dim."""
    for binding, atoms, _ in body.steps:
        for atom in atoms:
            if not isinstance(atom, Var) and (problem := _literal_problem(atom)):
                yield body.error(f"V8: {problem}", binding)
    for result, owner in body.results:
        if problem := _literal_problem(result):
            yield body.error(f"V8: {problem}", owner)


def _literal_problem(atom: object) -> str:
    if isinstance(atom, Constant):
        expected = atom.type.size_bytes
        if expected is None:
            return "a constant has a dim in its shape"
        return "" if len(atom.data) == expected else f"a constant of {expected} bytes has {len(atom.data)}"
    if isinstance(atom, Scalar) and not isinstance(atom.value, bool | float | Dim):
        if not isinstance(atom.value, int) or atom.value not in INT64:
            return f"{atom.value!r} is no literal"
    return ""


def v9_operands_fit_the_op(body: Body) -> Iterator[VerifyError]:
    """An op gets as many operands as it declares, each of a kind that it takes, and none is absent that must be there."""
    for binding, call in body.calls:
        operands, args = call.op.operands, call.args
        if call.op.is_variadic:
            operands *= len(args)
        if len(operands) != len(args):
            yield body.error(f"V9: {call.op.name} takes {len(operands)} operands, got {len(args)}", binding)
            continue
        for operand, arg in zip(operands, args, strict=True):
            if arg is None:
                if not operand.is_optional:
                    yield body.error(f"V9: operand {operand.name!r} of {call.op.name} is missing", binding)
            elif not isinstance(arg.type, operand.kinds):
                got = type(arg.type).__name__
                what = (
                    f"V9: operand {operand.name!r} of {call.op.name} must be {operand.expects}, got a {got}"
                )
                yield body.error(what, binding)


def v10_attributes_are_known(body: Body) -> Iterator[VerifyError]:
    """An op gets the attributes that it declares, those without a default always; values are of the kinds that it declares."""
    for binding, call in body.calls:
        declared = call.op.attributes
        for name, value in call.attrs.items():
            if name not in declared:
                known = ", ".join(declared) or "no attributes"
                yield body.error(
                    f"V10: {call.op.name} has no attribute {name!r}", binding, help=f"it has {known}"
                )
            elif problem := call.op.misfit(name, value):
                yield body.error(f"V10: {call.op.name}: {problem}", binding)
        if len(call.attrs) < len(declared):
            for name, default in declared.items():
                if default is inspect.Parameter.empty and name not in call.attrs:
                    yield body.error(f"V10: attribute {name!r} of {call.op.name} is missing", binding)
    for name, value in body.function.attrs.items():
        if not _has_text(value, takes_mappings=True):
            yield body.error(f"V10: attribute {name!r} of the function has no text")


def _has_text(value: object, *, takes_mappings: bool = False) -> bool:
    if isinstance(value, tuple):
        return all(_has_text(item, takes_mappings=takes_mappings) for item in value)
    if isinstance(value, Mapping) and takes_mappings:
        return all(isinstance(k, str) and _has_text(v, takes_mappings=True) for k, v in value.items())
    return type(value) in _PLAIN


def v11_called_functions_exist(body: Body) -> Iterator[VerifyError]:
    """A function that is called is in the module, takes as many arguments as it gets, and is not public."""
    for step in body.steps:
        call = step.binding.value
        for name in functions_of(call):
            callee = body.functions.get(name)
            if callee is None:
                yield body.error(f"V11: there is no function {name!r}", step.binding)
            elif callee.kind == "public":
                yield body.error(f"V11: {name!r} is public, so no function calls it", step.binding)
        callee = body.functions.get(call.function) if isinstance(call, FunctionCall) else None
        if isinstance(call, FunctionCall) and callee is not None and len(callee.params) != len(call.args):
            what = f"V11: {call.function!r} takes {len(callee.params)} arguments, got {len(call.args)}"
            yield body.error(what, step.binding)


FORM: tuple[Rule, ...] = (
    v2_kinds_and_roles_are_known,
    v3_transforms_take_weights_only,
    v4_names_are_unique,
    v5_variables_are_bound_before_use,
    v6_operands_are_atoms,
    v7_types_are_well_formed,
    v8_literals_fit_their_type,
    v9_operands_fit_the_op,
    v10_attributes_are_known,
    v11_called_functions_exist,
)
