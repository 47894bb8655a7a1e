# SPDX-License-Identifier: Apache-2.0
"""Ops whose bodies are lambdas over TE and TIR: what a port writes for their name hint, or else what TVM itself, where it is installed,
makes of them: tensor expressions become ops (te.py), functions in TIR external functions (tir.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nnfront.compat.tvm import te, tir
from nnfront.compat.tvm.absent import LAMBDA, TE, has_tvm, refuse
from nnfront.errors import WrongUse

_WRITTEN: dict[str, Callable[..., Any]] = {}


def register_lambda(name_hint: str, function: Callable[..., Any]) -> None:
    """Have `function(*args)`, written with ops, stand for each lambda that a model names `name_hint`, so that its file stays as it is."""
    _WRITTEN[name_hint] = function


def tensor_expr_op(tensor_expr_func: Any, name_hint: str, args: Sequence[Any], *, attrs: Any = None) -> Any:
    """The tensors that `tensor_expr_func` computes, as ops. Raises WrongUse for what no op computes, and without TVM."""
    written = _written("tensor_expr_op", name_hint)
    if written is not None:
        return written(*args)
    try:
        return te.trace(tensor_expr_func, args)
    except WrongUse as error:
        refuse(f"tensor_expr_op {name_hint!r}", error.what, _instead(name_hint))


def tensor_ir_op(func: Any, name_hint: str, args: Any, out: Any) -> Any:
    """Call `func` as an external function that returns `out`. Raises WrongUse without TVM."""
    written, given = _written("tensor_ir_op", name_hint), _listed(args)
    return tir.call(func, name_hint, given, out) if written is None else written(*given)


def tensor_ir_inplace_op(func: Any, name_hint: str, args: Any, inplace_indices: Any, out: Any) -> Any:
    """Call `func` with copies of what it changes in place; returns those. Raises WrongUse without TVM."""
    written, given = _written("tensor_ir_inplace_op", name_hint), _listed(args)
    if written is not None:
        return written(*given)
    return tir.call(func, name_hint, given, out, _listed(inplace_indices))


def _written(name: str, name_hint: str) -> Callable[..., Any] | None:
    """What is registered for the name hint; None where TVM can be asked."""
    found = _WRITTEN.get(name_hint)
    if found is None and not has_tvm():
        refuse(f"{name} {name_hint!r}", TE, _instead(name_hint))
    return found


def _listed(args: Any) -> list[Any]:
    return list(args) if isinstance(args, list | tuple) else [args]


def _instead(name_hint: str) -> str:
    return f"{LAMBDA}; or register_lambda({name_hint!r}, function of tensors) leaves the file as it is"
