# SPDX-License-Identifier: Apache-2.0
"""Python, torch and numpy given tensors of a model: which of their calls are operators of ours, and what to say of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import resolve_name

from nnfront import ops
from nnfront.dims import Dim
from nnfront.dtypes import DTYPES
from nnfront.errors import NnfrontError, TraceError, UnknownName, WrongUse
from nnfront.ir import Op, Provenance
from nnfront.nn import elsewhere
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.mode import outside_place
from nnfront.nn.source_location import raising_frame, user_frame

BINARY: dict[str, Op] = {
    "add": ops.add,
    "sub": ops.subtract,
    "mul": ops.multiply,
    "truediv": ops.divide,
    "floordiv": ops.floor_divide,
    "mod": ops.remainder,
    "pow": ops.power,
    "and": ops.bitwise_and,
    "or": ops.bitwise_or,
    "xor": ops.bitwise_xor,
    "matmul": ops.matmul,
}
COMPARE: dict[str, Op] = {
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
    "eq": ops.equal,
    "ne": ops.not_equal,
}
UNARY: dict[str, Op] = {"neg": ops.negative, "abs": ops.abs, "invert": ops.bitwise_not}

# What torch and numpy call for an operator between one of their arrays and a tensor of ours.
_TORCH = {"truediv": "div", "mod": "remainder"} | {n: f"__{n}__" for n in ("floordiv", "and", "or", "xor")}
_NUMPY = {"sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide"}
_NUMPY |= {"mod": "remainder", "pow": "power"} | {n: f"bitwise_{n}" for n in ("and", "or", "xor")}
_NUMPY |= {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_NUMPY |= {"eq": "equal", "ne": "not_equal"}
OPERATORS: dict[Any, Op] = {
    getattr(library, names.get(name, name)): op
    for library, names in ((torch.Tensor, _TORCH), (np, _NUMPY))
    for name, op in (BINARY | COMPARE).items()
}


_OURS = re.compile(r"\b(Tensor|Parameter|Dim|Cache|CacheLayer)\b")
_NO_VALUE = "tensors and dims have no values while a method is traced: compute with nnfront.op, on dims with + - * // %"


def refused(function: Callable[..., Any]) -> WrongUse:
    """Return the error for a function of torch or numpy that was called with a tensor of a model."""
    if isinstance(function, np.ufunc):
        name = f"numpy.{function.__name__}"
    else:
        name = resolve_name(function) or f"{function.__module__}.{function.__name__}"
    return WrongUse(
        f"{name} does not take a tensor of a model",
        where=outside_place(),
        help=elsewhere.known(name.rpartition(".")[2]) or "compute with the functions of nnfront.op",
    )


def refuse_torch(name: str, item: Any) -> None:
    """Refuse a module's attribute that holds weights in torch: no checkpoint would be asked for them."""
    is_parameter = isinstance(item, torch.Tensor) and isinstance(item, torch.nn.Parameter)
    if is_parameter or isinstance(item, torch.nn.Module):
        instead = "nn.Parameter(shape, dtype)" if is_parameter else "layers of nnfront"
        raise TraceError(
            f"{name!r} is a torch.nn.{type(item).__name__}, which holds no weights of a model here",
            where=outside_place(),
            help=f"use {instead}; load_state_dict binds values",
        )


def explain(error: Exception, path: str, method: str, definition: Provenance | None = None) -> None:
    """Give an error that comes out of the author's code its place: module path, method and the author's innermost line.

    `definition` is where the method is defined, for an error that no line of the author's led to. Raises a TraceError for what
    Python or a library has said of a traced value; other errors that are not ours get the place as a note.
    """
    file, line = raising_frame(error)
    if not file:
        file, line = (definition.file, definition.line) if definition else user_frame()
    place = f"{path}{' in ' if path else ''}method {method!r} ({file}:{line})"
    if isinstance(error, NnfrontError):
        error.where = error.where or place
    elif (ours := as_trace_error(error)) is not None:
        ours.where = place
        raise ours from error
    elif not hasattr(error, "__notes__"):
        error.add_note(f"  at {place}")


def as_trace_error(error: Exception) -> TraceError | None:
    """Return in our form what Python or a library said of a traced value; None for an error that is the author's own affair.

    Each TypeError counts: a traced value stands where another is wanted.
    """
    match error:
        case TypeError():
            called = re.match(r"(?:\w+\.)*(\w+)\(\)", str(error))
            help = elsewhere.known(called[1]) if called else ""
            return WrongUse(str(error), help=help or (_NO_VALUE if _OURS.search(str(error)) else ""))
        case AttributeError(obj=Dim()):
            return UnknownName(f"a dim has no attribute {error.name!r}", help=_NO_VALUE)
        case AttributeError(obj=str() as name) if name in DTYPES:
            return UnknownName(
                f"a dtype has no attribute {error.name!r}", help=f"a dtype is its name, as {name!r}"
            )
        case AttributeError(obj=tuple()):
            return UnknownName(
                f"a tuple has no attribute {error.name!r}", help="a shape is a tuple of ints and dims"
            )
        case AttributeError(obj=Cache() | CacheLayer()):
            return UnknownName(
                f"a cache has no attribute {error.name!r}",
                help="op.attention(q, k, v, cache=cache[i]) appends to layer i and attends",
            )
        case AttributeError() if _OURS.search(str(error)):
            return UnknownName(
                str(error), help="a tensor takes no attributes: keep what belongs to it beside it"
            )
        case KeyError(args=(Dim() as dim,)):
            return TraceError(
                f"dim '{dim}' has no value yet, so nothing is found under it",
                help="keep what belongs to a dim under its name, str(dim), or in a tensor that op.take reads",
            )
    return None
