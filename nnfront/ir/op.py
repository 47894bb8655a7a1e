# SPDX-License-Identifier: Apache-2.0
"""`Op`: one entry of the vocabulary, and the registry of all of them.

An op is declared by its type rule, a function from operand types and attributes to the result's type:

    @op()
    def matmul(a: TensorType, b: TensorType, out_dtype: str | None = None) -> TensorType:
        ...

    @matmul.reference
    def _(a, b, out_dtype):          # torch; this is what the op means, and what a CPU runs
        ...

Parameters whose annotation names a type (`TensorType`, `OperandType`, `TensorType | None`, `Sequence[TensorType]`) are
operands; all others are attributes. At most one operand is a sequence, and then it is the only one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nnfront.ir.types import ScalarType, TensorType, Type

# What elementwise ops take: a tensor, or a host scalar that promotes weakly, as in torch.
OperandType: TypeAlias = TensorType | ScalarType

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Operand:
    """One operand of an op."""

    name: str
    is_sequence: bool
    is_optional: bool
    takes_scalar: bool  # a Python number may stand for the tensor


@dataclass(eq=False)
class Op:
    """A vocabulary entry: name, type rule, torch reference and signature. Compared by identity.

    Its declaration completes it (`reference`, `normalize`); after that it does not change.
    """

    name: str
    infer: Callable[..., Type]
    is_pure: bool
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Any]  # name -> default, or inspect.Parameter.empty
    doc: str
    signature: inspect.Signature
    _reference: Callable[..., Any] | None = field(default=None, repr=False)
    _normalize: Callable[..., dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def is_variadic(self) -> bool:
        """Whether the op takes one sequence of operands of any length."""
        return bool(self.operands) and self.operands[0].is_sequence

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declare what the op means: a function of torch tensors, named attributes as in the rule."""
        assert self._reference is None, f"{self.name} has a reference already"
        self._reference = function
        return function

    def normalize(self, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Declare how attributes become canonical before they are stored: same parameters as the rule, returns attributes."""
        assert self._normalize is None, f"{self.name} normalizes already"
        self._normalize = function
        return function

    def result_type(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Type:
        """Return the type of the result for these operand types (None: an optional operand that is absent)."""
        return self.infer(list(types), **attrs) if self.is_variadic else self.infer(*types, **attrs)

    def canonical_attrs(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the attributes in the one form in which a call stores them."""
        if self._normalize is None:
            return attrs
        return self._normalize(list(types), **attrs) if self.is_variadic else self._normalize(*types, **attrs)

    def run(self, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Run the reference on torch values; dims in attributes have been replaced by ints."""
        assert self._reference is not None, f"{self.name} has no reference"
        return self._reference(list(args), **attrs) if self.is_variadic else self._reference(*args, **attrs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def op(*, name: str | None = None, is_pure: bool = True) -> Callable[[Callable[..., Type]], Op]:
    """Declare an op from its type rule and register it under the rule's name (a trailing underscore is part of it)."""

    def declare(rule: Callable[..., Type]) -> Op:
        signature = inspect.signature(rule)
        operands, attributes = [], {}
        for parameter in signature.parameters.values():
            annotation = str(parameter.annotation)
            if "Type" in annotation:
                optional = "None" in annotation
                operands.append(Operand(parameter.name, annotation.startswith("Sequence"), optional, "OperandType" in annotation))
            else:
                attributes[parameter.name] = parameter.default
        op_name = name or rule.__name__
        assert op_name not in OPS, f"op {op_name} is declared twice"
        assert len(operands) == 1 or not any(o.is_sequence for o in operands), f"{op_name}: a sequence stands alone"
        declared = Op(
            op_name, rule, is_pure, tuple(operands), attributes, inspect.getdoc(rule) or "", signature
        )
        OPS[op_name] = declared
        return declared

    return declare
