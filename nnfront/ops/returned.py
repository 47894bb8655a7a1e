# SPDX-License-Identifier: Apache-2.0
"""What a function returns that is not nnfront's own, checked against the type that was declared: whatever reads it trusts that type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Dim, Size, Symbol, evaluate
from nnfront.errors import RunError
from nnfront.ir import (
    Op,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    type_symbols,
    type_text,
)
from nnfront.ops.control import extern

# The classes of tensors whose memory is what it seems to be.
TENSORS = torch.Tensor, torch.nn.Parameter
_SCALARS = {"bool": bool, "int64": int, "float64": float}
_SHOWN = 8  # values of a tuple


def is_foreign(op: Op) -> bool:
    """Whether what an op's reference returns is made by a function that is not nnfront's own."""
    return op is extern or op.infer.__module__.partition(".")[0] != __name__.partition(".")[0]


def returner(op: Op, attrs: Mapping[str, Any]) -> str:
    """Name what makes the result of such an op."""
    return f"the external function {attrs['name']!r}" if op is extern else f"the op {op.name!r}"


def run_reference(
    op: Op, args: Sequence[Any], attrs: Mapping[str, Any], type: Type, dims: Mapping[Symbol, int]
) -> Any:
    """Run an op's reference on torch values, whose result has a type; what one that is not nnfront's own returns is checked (RunError)."""
    result = op.run(args, attrs)
    if is_foreign(op):
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
        check_returned(returner(op, attrs), type, result, dims, device, args)
    return result


def check_returned(
    who: str,
    type: Type,
    value: Any,
    dims: Mapping[Symbol, int],
    device: torch.device,
    handles: Sequence[Any] = (),
) -> None:
    """Raise RunError, which begins with `who`, unless a value is of a type, with what is known of its dims, and on a device.

    A layer of a cache, or a whole one, must be one of `handles`, the operands: ops write to those in place.
    """
    if _fits(type, value, dims, device, handles):
        return
    symbols = dict.fromkeys(type_symbols(type))
    known = ", ".join(f"{symbol} = {dims[symbol]}" for symbol in symbols if symbol in dims)
    raise RunError(
        f"{who} returned {value_text(value, device)}",
        details=[f"declared is {type_text(type)}{f' with {known}' if known else ''}"],
    )


def _fits(
    type: Type, value: Any, dims: Mapping[Symbol, int], device: torch.device, handles: Sequence[Any]
) -> bool:
    match type:
        case TensorType():
            return (
                value.__class__ in TENSORS
                and value.dtype is getattr(torch, type.dtype)
                and value.device == device
                and value.layout is torch.strided
                and _are(type.shape, value.shape, dims)
            )
        case ScalarType():
            is_kind = value.__class__ is _SCALARS[type.dtype]
            return is_kind and (type.value is None or _are((type.value,), (value,), dims))
        case ShapeType():
            are_numbers = isinstance(value, (tuple, list)) and all(n.__class__ is int for n in value)
            return are_numbers and _are(type.sizes, value, dims)
        case TupleType():
            if not isinstance(value, (tuple, list)) or len(value) != len(type.fields):
                return not type.fields  # nobody looks at what stands for nothing
            return all(_fits(t, v, dims, device, handles) for t, v in zip(type.fields, value, strict=True))
        case StateLayerType() | StateType():
            return any(value is handle for handle in handles)
        case _:
            return True  # only functions look into objects


def _are(sizes: Sequence[Size], numbers: Sequence[int], dims: Mapping[Symbol, int]) -> bool:
    """Whether the numbers are what the sizes say, as far as their dims are known."""
    return len(sizes) == len(numbers) and all(
        (isinstance(size, Dim) and not dims.keys() >= set(size.symbols)) or evaluate(size, dims) == number
        for size, number in zip(sizes, numbers, strict=True)
    )


def value_text(value: Any, device: torch.device | None = None) -> str:
    """Say what a value is: `float32[2, 3]`, with where it is if it is not on that device; `None`, `an int`."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        if len(value) > _SHOWN:
            return f"a {type(value).__name__} of {len(value)}"
        return f"({', '.join(value_text(part, device) for part in value)}{',' * (len(value) == 1)})"
    name = type(value).__name__
    if not isinstance(value, torch.Tensor):
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    text = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    where = f" on {value.device}" if device is not None and value.device != device else ""
    layout = "" if value.layout is torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
    return f"{'' if type(value) in TENSORS else f'a {name} '}{text}{where}{layout}"
