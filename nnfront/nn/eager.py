# SPDX-License-Identifier: Apache-2.0
"""Run the author's code on torch tensors, op by op, through the references. No trace, no compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from nnfront.dims import Dim, Symbol, evaluate, solve
from nnfront.errors import NnfrontError, RunError
from nnfront.holding import holding
from nnfront.ir import Op, StateLayerType, TensorType, TupleType, Type, Var
from nnfront.nn.loop import run_scan
from nnfront.nn.mode import active_mode, canonical, infer, out_of_trace
from nnfront.nn.parameter import Parameter
from nnfront.nn.pytree import flatten, unflatten
from nnfront.nn.source_location import raising_frame, user_place
from nnfront.nn.tensor import Formula, FormulaCall, Tensor, as_operand, operand_types, value
from nnfront.ops.returned import run_reference

Result = TypeVar("Result")


class Eager:
    """The eager mode: parameters are their bound values, derived tensors are computed once per run."""

    def __init__(self) -> None:
        self._formulas: dict[int, tuple[FormulaCall, Any]] = {}
        self._dims: dict[Symbol, int] = {}
        self.effects: dict[int, tuple[Tensor, ...]] = {}

    def apply(self, op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Run one op."""
        operands = tuple(self._operand(a, op) for a in args)
        types = operand_types(operands)
        attrs = canonical(op, types, attrs)
        type_ = infer(op, types, attrs, "")
        result = self._run(op, [a.content if isinstance(a, Tensor) else a for a in operands], attrs, type_)
        if isinstance(type_, TensorType):
            return value(result)
        if not isinstance(type_, TupleType):
            return None if isinstance(type_, StateLayerType) else result
        tensors = [
            value(r) for r, t in zip(result or (), type_.fields, strict=True) if isinstance(t, TensorType)
        ]
        # What an op on a cache returns besides its tensor is the cache's own handle, which it has written in place.
        return (
            tensors[0] if len(tensors) == 1 and len(type_.fields) > 1 else tuple(tensors) if tensors else None
        )

    def cond(self, predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run the branch that is taken."""
        return (
            then() if bool(predicate.torch() if isinstance(predicate, Tensor) else predicate) else otherwise()
        )

    def scan(self, body: Callable[[Any, Any], Any], carry: Any, xs: Any, axis: int) -> tuple[Any, Any]:
        """Run the loop."""
        return run_scan(body, carry, xs, axis)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module."""
        return module.forward(*args, **kwargs)

    def allow_change(self, owner: Any, what: str) -> None:
        """Allow it: a run may keep what it likes."""

    def _operand(self, x: Any, op: Op) -> Any:
        if not is_plain(x):
            return x  # a cache layer or another run-time object
        x = as_operand(x, op)
        return (
            value(self._evaluate(x))
            if isinstance(x, Tensor) and not isinstance(x.content, torch.Tensor)
            else x
        )

    def _evaluate(self, tensor: Tensor) -> torch.Tensor:
        """Return the value of a parameter or derived tensor."""
        if isinstance(tensor.content, torch.Tensor):
            return tensor.content
        if isinstance(tensor, Parameter):
            if tensor.data is None:
                raise RunError(
                    f"{tensor!r} has no value", help="bind one with load_state_dict or parameter.data = ..."
                )
            self._dims.update(solve(list(zip(tensor.shape, tensor.data.shape, strict=True))))
            return tensor.data
        if isinstance(tensor.content, Var):
            raise out_of_trace(tensor)
        if not isinstance(tensor.content, Formula):
            raise RunError(f"{tensor!r} has no value")
        formula = tensor.content
        known = self._formulas.get(id(formula.call))
        if known is None:
            call = formula.call
            args = [self._evaluate(a) if isinstance(a, Tensor) else a for a in call.args]
            made = self._run(call.op, args, call.attrs, call.result_type())
            known = self._formulas[id(call)] = (call, made)
        result: torch.Tensor = known[1] if formula.index is None else known[1][formula.index]
        return result

    def _run(self, op: Op, args: Sequence[Any], attrs: Mapping[str, Any], type: Type) -> Any:
        return run_reference(op, args, self._known(attrs), type, self._dims)

    def _known(self, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace dims in attributes by their values."""
        return {name: self._resolve(attr) for name, attr in attrs.items()}

    def _resolve(self, attr: Any) -> Any:
        if isinstance(attr, Dim):
            return evaluate(attr, self._dims)
        return tuple(map(self._resolve, attr)) if isinstance(attr, tuple) else attr


def is_plain(x: Any) -> bool:
    """Whether `x` is something that `as_operand` reads: all but caches and other run-time objects."""
    return x is None or not hasattr(x, "type") or isinstance(x, (Tensor, torch.Tensor))


def eager(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call `function`, such as a module's method, eagerly: torch tensors in, torch tensors out.

    Parameters that it reads must have values. Raises RunError for one that has none.
    """
    if active_mode.get() is not None:
        return function(*args, **kwargs)
    return run_in(Eager(), function, args, kwargs)


def run_in(
    mode: Eager, function: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Result:
    """Call `function` eagerly in a mode: torch tensors in, torch tensors out."""
    structure, leaves = flatten((args, kwargs), lambda x: isinstance(x, torch.Tensor))
    inner_args, inner_kwargs = unflatten(structure, map(value, leaves))
    try:
        with holding(active_mode, mode), torch.no_grad():
            result = function(*inner_args, **inner_kwargs)
            structure, out = flatten(result, lambda x: isinstance(x, Tensor))
            tensors = [mode._evaluate(x) for x in out]
    except NnfrontError as error:
        file, line = raising_frame(error)
        error.where = error.where or (f"{file}:{line}" if file else user_place())
        raise
    final: Result = unflatten(structure, tensors)
    return final
