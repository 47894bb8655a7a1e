# SPDX-License-Identifier: Apache-2.0
"""Which weights hold several matrices one after the other, and nobody has said so: what a product with them gives is taken apart along its features."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from nnfront import ops
from nnfront.ir import Binding, Call, Function, FunctionCall, IRModule, TensorType, Var, tensor_type

_ALIKE = (ops.add, ops.multiply, ops.astype)
"""Ops whose result has the features of an operand, in their order."""


def taken_apart(ir: IRModule, names: Collection[str]) -> Iterator[tuple[str, Binding]]:
    """Yield those of the weights [outputs, ...] of these names whose outputs, or what is computed of them, a method takes apart, each with where it does.

    What is laid out by heads first is in parts of heads, which may be taken apart.
    """
    for method in ir.methods:
        axes: dict[Var, tuple[str, int]] = {
            p: (p.name, 0) for p in method.params if p.role == "weight" and p.name in names
        }
        yield from _within(ir, method, axes)


def _within(
    ir: IRModule, function: Function, axes: Mapping[Var, tuple[str, int]]
) -> Iterator[tuple[str, Binding]]:
    """`axes`: of which weight a value has the outputs, and along which axis."""
    known = dict(axes)
    for binding in function.bindings:
        value = binding.value
        if isinstance(value, FunctionCall):
            called = ir[value.function]
            given = zip(called.params, value.args, strict=True)
            inside: dict[Var, tuple[str, int]] = {
                p: known[arg] for p, arg in given if isinstance(arg, Var) and arg in known
            }
            if inside:
                yield from _within(ir, called, inside)
            continue
        of = [known[arg] for arg in getattr(value, "args", ()) if isinstance(arg, Var) and arg in known]
        if not of or not isinstance(value, Call):
            continue
        name, axis = of[-1]
        if _parts(value, axis):
            yield name, binding
        elif (kept := _axis_after(value, known)) is not None:
            known[binding.var] = name, kept


def _parts(call: Call, axis: int) -> bool:
    """Whether a call takes its operand apart along an axis."""
    attrs = call.op.full_attrs(call.attrs)
    if call.op is ops.split:
        return bool(attrs["axis"] == axis)
    if call.op is not ops.getitem:
        return False
    entries = [entry for entry in attrs["index"] if entry is not None]
    return axis < len(entries) and not isinstance(entries[axis], str)


def _axis_after(call: Call, known: Mapping[Var, tuple[str, int]]) -> int | None:
    """Along which axis the result has a weight's outputs; None if it has them no more as they were."""
    axes = {i: known[arg][1] for i, arg in enumerate(call.args) if isinstance(arg, Var) and arg in known}
    place, axis = next(iter(axes.items()))
    operand = tensor_type(call.args[place])
    first = call.args[0]
    ndim = first.type.ndim if isinstance(first, Var) and isinstance(first.type, TensorType) else 0
    if call.op is ops.linear:
        return ndim - 1 if 1 in axes and axes[1] == 0 else None
    if call.op is ops.matmul:
        return ndim - 1 if 1 in axes and axes[1] == operand.ndim - 1 else None
    if call.op is ops.permute_dims:
        order = call.op.full_attrs(call.attrs)["axes"]
        return None if order is None else list(order).index(axis)
    if call.op in _ALIKE:
        others = [
            arg.type.ndim for arg in call.args if isinstance(arg, Var) and isinstance(arg.type, TensorType)
        ]
        return max(others) - operand.ndim + axis
    return None
