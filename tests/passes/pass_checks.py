# SPDX-License-Identifier: Apache-2.0
"""What every pass test asks: the text after, the same results on random inputs, a module that verifies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pass_evaluator import run_method

import nnfront.ops  # noqa: F401  registers the ops that the texts name
from nnfront.dims import Dim, evaluate
from nnfront.ir import (
    Function,
    IRModule,
    ScalarType,
    TensorType,
    Type,
    first_difference,
    parse,
    sizes_of,
    verify,
)


def module(text: str) -> IRModule:
    """Return the verified module that a text says."""
    ir = parse(text)
    verify(ir)
    return ir


def expect(actual: IRModule, text: str) -> None:
    """Check that a module is well formed and is what the text says."""
    verify(actual)
    expected = module(text)
    difference = first_difference(actual, expected)
    assert difference is None, f"{difference}\n{actual}"


def expect_same_results(before: IRModule, after: IRModule, dims: Mapping[str, int] | None = None) -> None:
    """Check that all public functions compute the same, up to rounding, on random inputs; `dims` gives sizes, by default 2, 3, ..."""
    verify(after)
    assert [f.name for f in after.methods] == [f.name for f in before.methods]
    sizes = {name: sizes_for(f, dims or {}) for name, f in before.items()}
    # What a shared transform wants for other methods is there, too; a weight's content depends on its name and shape only.
    owners = [f for f in before.functions if f.kind in ("public", "transform")]
    weights = {
        p.name: weight(p.name, p.type, sizes[f.name]) for f in owners for p in f.params if p.role == "weight"
    }
    for index, method in enumerate(before.methods):
        generator = torch.Generator().manual_seed(index)
        inputs = {p.name: random_value(p.type, sizes[method.name], generator) for p in method.inputs}
        assert [(p.name, p.role) for p in after[method.name].inputs] == [
            (p.name, p.role) for p in method.inputs
        ]
        expected = run_method(before, method.name, inputs, weights)
        actual = run_method(after, method.name, inputs, weights)
        torch.testing.assert_close(actual, expected, equal_nan=True)


def sizes_for(method: Function, dims: Mapping[str, int]) -> dict[Any, int]:
    """Return a number for each dim that a function's parameters name, the same for the same name."""
    symbols = sorted(
        {s for p in method.params for z in sizes_of(p.type) if isinstance(z, Dim) for s in z.symbols}, key=str
    )
    return {s: dims.get(s.name, s.multiple_of * max(s.min, 2 + sum(map(ord, s.name)) % 3)) for s in symbols}


def weight(name: str, type: Type, values: Mapping[Any, int]) -> Any:
    """Return a weight's value."""
    return random_value(type, values, torch.Generator().manual_seed(sum(map(ord, name))))


def random_value(type: Type, values: Mapping[Any, int], generator: torch.Generator) -> Any:
    if isinstance(type, ScalarType):
        if type.value is not None:
            return evaluate(type.value, values)
        return bool(torch.rand((), generator=generator) < 0.5) if type.dtype == "bool" else 2
    assert isinstance(type, TensorType)
    shape = [evaluate(size, values) for size in type.shape]
    dtype = getattr(torch, type.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
