# SPDX-License-Identifier: Apache-2.0
"""Ops whose bodies are lambdas over TE and TIR, which only TVM can trace: what a port writes instead is found by their name hints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nnfront.compat.tvm.absent import LAMBDA, TE, refuse

_WRITTEN: dict[str, Callable[..., Any]] = {}


def register_lambda(name_hint: str, function: Callable[..., Any]) -> None:
    """Have `function(*args)`, written with ops, stand for each lambda that a model names `name_hint`, so that its file stays as it is."""
    _WRITTEN[name_hint] = function


def tensor_expr_op(tensor_expr_func: Any, name_hint: str, args: Sequence[Any], *, attrs: Any = None) -> Any:
    """Call what is registered for `name_hint`. Raises WrongUse where nothing is."""
    return _written("tensor_expr_op", name_hint, args)


def tensor_ir_op(func: Any, name_hint: str, args: Any, out: Any) -> Any:
    """Call what is registered for `name_hint`. Raises WrongUse where nothing is."""
    return _written("tensor_ir_op", name_hint, args)


def tensor_ir_inplace_op(func: Any, name_hint: str, args: Any, inplace_indices: Any, out: Any) -> Any:
    """Call what is registered for `name_hint`; it returns what was to change in place. Raises WrongUse where nothing is."""
    return _written("tensor_ir_inplace_op", name_hint, args)


def _written(name: str, name_hint: str, args: Any) -> Any:
    function = _WRITTEN.get(name_hint)
    if function is None:
        instead = f"{LAMBDA}; or register_lambda({name_hint!r}, function of tensors) leaves the file as it is"
        refuse(f"{name} {name_hint!r}", TE, instead)
    return function(*(args if isinstance(args, (list, tuple)) else [args]))
