# SPDX-License-Identifier: Apache-2.0
"""Functions in TIR as external functions: `out` says what they return, and TVM, where it is installed, compiles them for the processor.

A function is compiled when it is first called. Its name is `tir.` and the name hint, and a number where another function has that name;
a process that loads what was exported registers one of its own under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from nnfront.errors import RunError
from nnfront.nn.functional import op
from nnfront.nn.tensor import Tensor
from nnfront.ops import register_extern

# Output i of a function is its argument j, changed in place, or (-1) a tensor of its own.
_FRESH = -1

_NAMED: dict[str, Any] = {}
_NAMING = threading.Lock()


def call(
    func: Any, name_hint: str, args: Sequence[Any], out: Any, inplace: Sequence[int] | None = None
) -> Any:
    """The results `out` of a PrimFunc for these tensors, then dims and integers; `inplace` as in `tensor_ir_inplace_op`."""
    outs = list(out) if isinstance(out, list | tuple) else [out]
    places = list(inplace) if inplace is not None else [_FRESH] * len(outs)
    tensors = [x for x in args if isinstance(x, Tensor)]
    integers = [x if not hasattr(x, "value") else int(x.value) for x in args if not isinstance(x, Tensor)]
    made = [o for o, place in zip(outs, places, strict=True) if place == _FRESH]
    sizes = [n for o in made for n in o.shape]
    run = _compiled(func, name_hint, places, [(len(o.shape), o.dtype) for o in made], len(tensors))
    handed = [*tensors, *integers, *sizes]
    return op.extern(
        _name(func, name_hint, run), handed, tuple(outs) if isinstance(out, list | tuple) else out
    )


def _name(func: Any, hint: str, run: Callable[..., Any]) -> str:
    """The external function of this PrimFunc, registered the first time that it is met."""
    from tvm_ffi import structural_equal

    with _NAMING:
        name, number = f"tir.{hint}", 0
        while name in _NAMED and not structural_equal(_NAMED[name], func):
            number += 1
            name = f"tir.{hint}_{number}"
        if name not in _NAMED:
            register_extern(name, run)
            _NAMED[name] = func
    return name


def _compiled(
    func: Any, hint: str, places: Sequence[int], made: Sequence[tuple[int, str]], tensors: int
) -> Callable[..., Any]:
    """A function of torch tensors, integers, and the sizes of what it is to make."""
    count = sum(rank for rank, _ in made)
    built: list[Any] = []

    def run(*args: Any) -> Any:
        import torch

        given, integers = [x.contiguous() for x in args[:tensors]], args[tensors : len(args) - count]
        sizes = iter(args[len(args) - count :])
        if any(x.device.type != "cpu" for x in given):
            raise RunError(f"{hint!r} in TIR is compiled for the processor alone", help=_instead(hint))
        if not built:
            built.append(_build(func, hint))
        for place in places:
            if place != _FRESH:
                given[place] = given[place].clone()
        results = []
        for place in places:
            if place != _FRESH:
                results.append(given[place])
                continue
            rank, dtype = made[sum(p == _FRESH for p in places[: len(results)])]
            results.append(torch.empty([next(sizes) for _ in range(rank)], dtype=getattr(torch, dtype)))
        new = [r for r, place in zip(results, places, strict=True) if place == _FRESH]
        built[0](*given, *new, *map(int, integers))
        return results[0] if len(results) == 1 else results

    return run


def _build(func: Any, hint: str) -> Any:
    import tvm

    try:
        module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        return tvm.compile(module, target="llvm")["main"]
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise RunError(
            f"TVM does not compile {hint!r} in TIR for the processor",
            details=[f"{type(error).__name__}: {lines[-1] if lines else ''}"],
            help=_instead(hint),
        ) from error


def _instead(hint: str) -> str:
    return f"register_lambda({hint!r}, function of tensors) before the export writes it with ops"
