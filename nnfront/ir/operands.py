# SPDX-License-Identifier: Apache-2.0
"""The operands of an op: which parameters of a rule are some, and which types each takes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TypeAlias

from nnfront.ir.types import (
    FunctionType,
    ObjectType,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
)

# What elementwise ops take: a tensor, or a host scalar that promotes weakly, as in torch.
OperandType: TypeAlias = TensorType | ScalarType

# annotation -> (the classes of type it takes, and their name in a message)
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "TensorType": ((TensorType,), "a tensor"),
    "OperandType": ((TensorType, ScalarType), "a tensor or a number"),
    "StateLayerType": ((StateLayerType,), "one layer of a cache"),
    "StateType": ((StateType,), "a cache"),
    "Type": ((object,), "a value"),
}


@dataclass(frozen=True)
class Operand:
    """One operand of an op."""

    name: str
    is_sequence: bool
    is_optional: bool
    takes_scalar: bool  # a Python number may stand for the tensor
    kinds: tuple[type, ...]  # the classes of type that it takes
    expects: str  # their name in a message


def operand_of(parameter: inspect.Parameter, annotation: str) -> Operand:
    """Return the operand that a parameter of a rule is."""
    words = annotation.removeprefix("Sequence[").split("]")[0].split(" | ")
    is_sequence = annotation.startswith("Sequence") or parameter.kind is parameter.VAR_POSITIONAL
    kinds, expects = _KINDS[words[0]]
    return Operand(
        parameter.name, is_sequence, "None" in annotation, words[0] == "OperandType", kinds, expects
    )


_OTHER_KINDS: dict[object, str] = {
    type(None): "nothing",
    ScalarType: "a number",
    ShapeType: "a shape",
    TupleType: "a tuple",
    ObjectType: "an object",
    FunctionType: "a function",
}


def kind_name(type: Type | None) -> str:
    """Return what kind of value is of a type, as a message says it."""
    for kinds, name in _KINDS.values():
        if kinds == (type.__class__,):
            return name
    return _OTHER_KINDS[type.__class__]
