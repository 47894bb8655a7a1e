# SPDX-License-Identifier: Apache-2.0
"""What TVM's frontend has and nnfront has not: each name can be imported; what TVM itself can be asked for is its own, the use of the rest says
what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from nnfront.errors import WrongUse
from nnfront.nn.mode import outside_place

LAMBDA = (
    "write it with ops, or as op.extern(name, args, out), out being a Tensor.placeholder; "
    "nnfront.register_extern(name, function) gives the Python function where it runs"
)
_EXTERN = "nnfront.register_extern(name, function) gives op.extern a Python function where it runs"
_ONE_DEVICE = "a model runs on one device: build it with tensor_parallel_shards = 1"


def refuse(name: str, why: str, instead: str) -> NoReturn:
    """Raise the error for a use of what is not here."""
    raise WrongUse(f"{name}: {why}", where=outside_place(), help=instead)


def absent_function(name: str, signature: str, why: str, instead: str) -> Callable[..., Any]:
    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, why, instead)

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"{name}({signature}) of TVM. Raises WrongUse: {why}."
    absent.__text_signature__ = f"({signature})"  # type: ignore[attr-defined]
    return absent


TE = "lambdas over TE and TIR are TVM's own, and TVM is not installed"
debug_func = absent_function(
    "debug_func",
    "name, *args, _line_info=None",
    "there is no debug VM",
    "use op.print_(x), or op.extern(name, args, out)",
)
_CCL = "there are no collectives"
ccl_allreduce = absent_function(
    "ccl_allreduce", "x, op_type='sum', in_group=True, name='ccl_allreduce'", _CCL, _ONE_DEVICE
)
ccl_allgather = absent_function("ccl_allgather", "x, num_workers, name='ccl_allgather'", _CCL, _ONE_DEVICE)
ccl_broadcast_from_worker0 = absent_function(
    "ccl_broadcast_from_worker0", "x, name='broadcast_from_worker'", _CCL, _ONE_DEVICE
)
add_extern = absent_function("add_extern", "mod", "compiled modules are not linked into a model", _EXTERN)


def has_tvm() -> bool:
    """Whether TVM itself is installed, which traces its own lambdas."""
    return find_spec("tvm") is not None


def tvms(module: str, name: str, instead: str) -> Any:
    """What TVM's `module` has under a name that makes functions in TIR. Raises WrongUse where TVM is not installed."""
    if name.startswith("__"):
        raise AttributeError(name)
    if not has_tvm():
        refuse(name, TE, instead)
    return getattr(import_module(f"tvm.relax.frontend.nn.{module}"), name)


class _Absent:
    why = instead = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__, self.why, self.instead)


class KVCache(_Absent):
    """TVM's contiguous cache effect. Raises WrongUse: a cache is an argument."""

    why = "a cache is an argument of a method, not an effect of a module"
    instead = "give the method spec.Cache(layers, ...) and call op.attention(q, k, v, cache=cache[i])"


class IOEffect(_Absent):
    """TVM's effect for printing. Raises WrongUse: printing needs none."""

    why = "printing needs no effect"
    instead = "call op.print_(x) in any method"


class ExternModule(_Absent):
    """TVM's external module. Raises WrongUse."""

    why = "compiled modules are not linked into a model"
    instead = _EXTERN


class ObjectModule(ExternModule):
    """TVM's module of an object file. Raises WrongUse."""


class SourceModule(ExternModule):
    """TVM's module of C++ or CUDA sources. Raises WrongUse."""
