# SPDX-License-Identifier: Apache-2.0
"""Ops as functions, the short way for tests: on values through the reference, on types through the rule."""

from typing import Any

from op_cases import type_of

from nnfront.ir.op import Op
from nnfront.ir.types import ScalarType, TensorType, Type


def attrs_of(op: Op, types: list[Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the canonical attributes, as a call stores them."""
    full = {name: attrs.get(name, default) for name, default in op.attributes.items()}
    return op.canonical_attrs(types, full)


def run(op: Op, *operands: Any, **attrs: Any) -> Any:
    """Run the reference on values; optional operands may be left out at the end."""
    operands += (None,) * (0 if op.is_variadic else len(op.operands) - len(operands))
    return op.run(operands, attrs_of(op, [type_of(x) for x in operands], attrs))


def infer(op: Op, *types: Type | None, **attrs: Any) -> Type:
    """Return the type of the result for operands of these types."""
    return op.result_type(types, attrs_of(op, list(types), attrs))


def t(*shape: Any, dtype: str = "float32") -> TensorType:
    """Return a tensor type."""
    return TensorType(shape, dtype)


INT, FLOAT, BOOL = ScalarType("int64", 2), ScalarType("float64"), ScalarType("bool")
