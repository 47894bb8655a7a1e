# SPDX-License-Identifier: Apache-2.0
"""Give parameters a value: they become constants, and the dims that their sizes define become numbers.

example: bind_params(ir, {"scale": 2.0, "bias": [1.0, 2.0]})
before:
    def main[n](x: input float32[n], scale: input float64, bias: weight float32[n]) -> float32[n] {
        y: float32[n] = multiply(x, scale)
        z: float32[n] = add(y, bias)
        return z
    }
after:
    def main(x: input float32[2]) -> float32[2] {
        y: float32[2] = multiply(x, 2.0)
        z: float32[2] = add(y, const(float32[2], [1.0, 2.0]))
        return z
    }

A value is a tensor, an array, a nested list or a number. A parameter goes from every function that has it.

raises:  PassError for a parameter that no function has, and for a value that does not fit its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nnfront.dims import Size, solve
from nnfront.errors import DimError, PassError
from nnfront.ir import (
    Constant,
    Function,
    IRModule,
    Param,
    Scalar,
    ScalarType,
    TensorType,
    type_text,
)
from nnfront.ops.constants import constant
from nnfront.passes.base import module_pass
from nnfront.passes.bind_dims import bind, chosen_functions


@module_pass()
def bind_params(ir: IRModule, params: Mapping[str, Any], functions: Iterable[str] | None = None) -> IRModule:
    """Bind parameters by name in the named functions, by default in all public ones."""
    bound = [ir[name] for name in chosen_functions(ir, functions)]
    known = {p.name for f in bound for p in f.params}
    unknown = [name for name in params if name not in known]
    if unknown:
        raise PassError(
            f"no function has a parameter '{unknown[0]}'",
            details=[f"the parameters of {f.name} are {', '.join(p.name for p in f.params)}" for f in bound],
        )
    done: dict[str, Function] = {}
    for function in bound:
        values = {
            p.name: _atom(p, params[p.name], function.name) for p in function.params if p.name in params
        }
        sizes = _sizes(function, values)
        done[function.name] = bind(function, sizes, ir, values)
        transform = function.attrs.get("transform")
        if transform is not None:
            done[transform] = bind(done.get(transform, ir[transform]), sizes, ir)
    return ir.with_functions(done.get(f.name, f) for f in ir.functions)


def _atom(param: Param, value: Any, function: str) -> Constant | Scalar:
    """Return the constant or literal for a parameter."""
    if isinstance(param.type, ScalarType):
        kinds = {"bool": bool, "int64": int, "float64": float}
        number = float(value) if param.type.dtype == "float64" and type(value) is int else value
        is_fit = type(number) is kinds[param.type.dtype]
        if is_fit:
            return Scalar(number)
    elif isinstance(param.type, TensorType):
        dtype = None if isinstance(value, torch.Tensor) else getattr(torch, param.type.dtype)
        atom = constant(torch.as_tensor(value, dtype=dtype))
        if atom.type.dtype == param.type.dtype and atom.type.ndim == param.type.ndim:
            return atom
    raise _misfit(function, param, value)


def _sizes(function: Function, values: Mapping[str, Constant | Scalar]) -> dict[str, Size]:
    """Return what the values say about the dims of the function, by name."""
    equations: list[tuple[Size, int]] = []
    for param in function.params:
        atom = values.get(param.name)
        if isinstance(atom, Constant) and isinstance(param.type, TensorType):
            equations += [
                (size, int(n))
                for size, n in zip(param.type.shape, atom.type.shape, strict=True)
                if isinstance(n, int)
            ]
        elif isinstance(atom, Scalar) and isinstance(param.type, ScalarType) and param.type.value is not None:
            assert isinstance(atom.value, int)
            equations.append((param.type.value, atom.value))
    try:
        return {symbol.name: number for symbol, number in solve(equations).items()}
    except DimError as error:
        given = ", ".join(values)
        raise PassError(
            f"the values for {given} do not fit {function.name}: {error.what}", details=error.details
        ) from None


def _misfit(function: str, param: Param, value: Any) -> PassError:
    shape = (
        f" of shape {tuple(value.shape)} and dtype {value.dtype}"
        if hasattr(value, "shape")
        else f" {value!r}"
    )
    return PassError(
        f"the value for '{param.name}' does not fit {function}",
        details=[f"got a {type(value).__name__}{shape}", f"expected {type_text(param.type)}"],
    )
