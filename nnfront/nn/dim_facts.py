# SPDX-License-Identifier: Apache-2.0
"""What all arguments and parameters of an export say about each dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from nnfront.dims import Dim, Symbol, merge_facts, with_facts
from nnfront.ir import Type, map_sizes, type_symbols
from nnfront.nn import spec as specs
from nnfront.nn.parameter import Parameter


def known_facts(spec: specs.ModuleSpec, parameters: Mapping[str, Parameter]) -> Mapping[Symbol, Symbol]:
    """Combine what every occurrence of a dim says of it. Contradictions are a DimError that names both places."""
    places: list[tuple[Symbol, str]] = []
    for name, method in spec.methods.items():
        for arg, arg_spec in method.arguments.items():
            symbols = type_symbols(specs.argument_type(arg, arg_spec))
            places.extend((symbol, f"argument {arg!r} of {name!r}") for symbol in symbols)
    for name, parameter in parameters.items():
        if Dim in map(type, parameter.shape):
            places.extend((symbol, f"parameter {name!r}") for symbol in type_symbols(parameter.type))
    return {
        old: new
        for old, new in merge_facts(places).items()
        if (new.min, new.max, new.multiple_of) != (0, None, 1)
    }


def with_facts_attr(value: Any, facts: Mapping[Symbol, Symbol]) -> Any:
    """Return an attribute with the facts known of the dims in it; the same object if it has them already."""
    if isinstance(value, Dim):
        return value if all(facts.get(s, s) is s for s in value.symbols) else with_facts(value, facts)
    if isinstance(value, tuple):
        new = tuple([with_facts_attr(item, facts) for item in value])
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return with_facts_type(value, facts) if isinstance(value, get_args(Type)) else value


def with_facts_type(type: Type, facts: Mapping[Symbol, Symbol]) -> Type:
    """Return `type` with the facts known of its dims; the same object if they say so already."""
    return map_sizes(type, lambda size: with_facts(size, facts))
