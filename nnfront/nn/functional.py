# SPDX-License-Identifier: Apache-2.0
"""The ops as functions of tensors: this is `nnfront.op`.

Each op's function is made from its declaration, under its name and with its signature: operands are tensors (where the
declaration says so, numbers too), all else are attributes. What is not an op of its own is written out below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nnfront import ops
from nnfront.errors import TraceError
from nnfront.ir import OPS, Op
from nnfront.nn.eager import eager
from nnfront.nn.object import Object
from nnfront.nn.place import user_place
from nnfront.nn.tensor import Tensor, active_mode, apply, dtype_name


class OpFunction:
    """One op as a function. Torch tensors alone give torch tensors; with a Tensor among the operands, Tensors."""

    compared_by_identity = True

    def __init__(self, op: Op) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = op.name
        self.__doc__ = op.doc
        self.__signature__ = op.signature
        self._names = tuple(op.signature.parameters)
        self._operands = tuple(o.name for o in op.operands)
        self._defaults = {
            p.name: None if p.name in self._operands else p.default
            for p in op.signature.parameters.values()
            if p.default is not inspect.Parameter.empty
        }
        self._takes_many = any(p.kind is p.VAR_POSITIONAL for p in op.signature.parameters.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._bind(args, kwargs)
        operands: tuple[Any, ...]
        if self.op.is_variadic:
            operands = tuple(given.pop(self._operands[0]))
        else:
            operands = tuple([given.pop(name) for name in self._operands])
        for name, attr in given.items():
            if isinstance(attr, torch.dtype):
                given[name] = dtype_name(attr)
        if active_mode.get() is None and _are_torch(operands):
            return eager(lambda *tensors: apply(self.op, tensors, given), *operands)
        return apply(self.op, operands, given)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return every parameter by name, defaults filled in. Raises TypeError as a Python function would."""
        if self._takes_many or len(args) > len(self._names):
            bound = self.op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return dict(bound.arguments)
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        if len(given) != len(self._names) or (
            kwargs and not kwargs.keys().isdisjoint(self._names[: len(args)])
        ):
            self.op.signature.bind(*args, **kwargs)  # says what is missing, unknown or given twice
        return given

    def __repr__(self) -> str:
        return f"<function op.{self.op.name}>"


def _are_torch(operands: tuple[Any, ...]) -> bool:
    """Whether these are torch tensors, with numbers among them at most."""
    return any(isinstance(x, torch.Tensor) for x in operands) and all(
        x is None or isinstance(x, (torch.Tensor, bool, int, float)) for x in operands
    )


# Names under which TVM or torch have an op that is called otherwise here.
_ALIASES = {"permute": "permute_dims", "pow": "power"}


def __getattr__(name: str) -> OpFunction:
    declared = _ALIASES.get(name, name)
    if declared not in OPS:
        raise AttributeError(f"nnfront.op has no function {name!r}")
    function = globals()[name] = OpFunction(OPS[declared])
    return function


def __dir__() -> list[str]:
    return sorted({*OPS, *_ALIASES, "astype", "cond", "extern"})


def astype(x: Any, dtype: Any) -> Any:
    """Cast `x` to `dtype`; `x` itself if that is its dtype."""
    name = dtype_name(dtype)
    if isinstance(x, Tensor) and x.dtype == name:
        return x
    return OpFunction(ops.astype)(x, name)


def cond(pred: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `then()` where `pred` is true, else `otherwise()`; both branches stay in the IR and one of them runs.

    pred: a bool tensor without axes, or a bool, which decides at once. The branches take no arguments: they use what is around
    them. They return values of one structure, whose types agree up to dims. Caches written in one branch come out of both.
    Raises TraceError if the structures or types differ.
    """
    if isinstance(pred, bool):
        return then() if pred else otherwise()
    mode = active_mode.get()
    if mode is None:
        raise TraceError(
            "op.cond is used outside a method", where=user_place(), help="a derived tensor has no branches"
        )
    return mode.cond(pred, then, otherwise)


def extern(name: str, args: Sequence[Any], out: Any) -> Any:
    """Call the external function `name` and return what `out` describes.

    args: tensors, objects, dims and numbers. out: a `Tensor.placeholder`, a class derived from `nn.Object`, or a list or tuple of
    these. The function is registered with `nnfront.register_extern(name, function)` in the process that runs the method.
    """
    kinds = list(out) if isinstance(out, (list, tuple)) else [out]
    types = [kind.object_type() if _is_object(kind) else kind for kind in kinds]
    made = OpFunction(ops.extern)(name, args, tuple(types) if isinstance(out, (list, tuple)) else types[0])
    results = list(made) if isinstance(out, (list, tuple)) else [made]
    for i, kind in enumerate(kinds):
        if isinstance(kind, type) and issubclass(kind, Object) and isinstance(results[i], Object):
            results[i] = kind.traced(results[i].content)
    return type(out)(results) if isinstance(out, (list, tuple)) else results[0]


def _is_object(kind: Any) -> bool:
    return isinstance(kind, Object) or (isinstance(kind, type) and issubclass(kind, Object))
