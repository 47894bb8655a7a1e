# SPDX-License-Identifier: Apache-2.0
"""Round what quantised weights are multiplied with to 8 bits as well, each row by its largest element: sums of integers are what many processors make fastest.

example: quantize_activations(ir)
before:
    def main[n](x: input float32[n, 4], w: weight int8[6, 4], scales: weight float32[6, 1]) -> float32[n, 6] {
        dequantize: float32[6, 4] = dequantize(w, scales, axis=1)
        y: float32[n, 6] = linear(x, dequantize)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight int8[6, 4], scales: weight float32[6, 1]) -> float32[n, 6] {
        dequantize: float32[6, 4] = dequantize(w, scales, axis=1)
        y: float32[n, 6] = linear_int8(x, w, scales)
        return y
    }

Run it behind `quantize_weights`, or on weights that others have quantised to integers, with scales beside them or in blocks. What is not read any more goes with dead code.

leaves:  products with weights in other formats, of experts, and those that `refuses` names a reason against, given a format and the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nnfront import ops
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    IRModule,
    Mutator,
    Var,
    canonical_call,
    tensor_type,
    walk_bindings,
)
from nnfront.ops.linear_int8 import TAKEN
from nnfront.passes.base import module_pass
from nnfront.quant_format import FORMATS, QuantFormat, recognise

Refuses: TypeAlias = Callable[[QuantFormat, str], str]
"""Why a target has no kernel for products with weights in a format and x in a dtype; "" if it has one."""


def nothing_refused(format: QuantFormat, dtype: str) -> str:
    """Every target runs the reference."""
    return ""


@module_pass()
def quantize_activations(ir: IRModule, refuses: Refuses = nothing_refused) -> IRModule:
    """Have products with integers round what they multiply these with to 8 bits."""
    return ir.with_functions(_Rounding(function, refuses).function(function) for function in ir.functions)


@quantize_activations.reports
def _report(ir: IRModule, refuses: Refuses = nothing_refused) -> ActivationsReport:
    """Say how many products round their activations, and why others do not. Printable."""
    found = list(_products(ir))
    reasons: dict[str, int] = {}
    for each in found:
        if reason := each.reason(refuses):
            reasons[reason] = reasons.get(reason, 0) + 1
    return ActivationsReport(len(found), reasons)


@dataclass(frozen=True)
class ActivationsReport:
    """Of how many products with quantised weights activations may be rounded, and why those of others are not."""

    products: int
    reasons: Mapping[str, int]

    def require_any(self) -> None:
        """Raise PassError if there is no product whose activations are rounded."""
        if self.products == sum(self.reasons.values()):
            taken = f"{', '.join(TAKEN[:-1])} or {TAKEN[-1]}"
            raise PassError(
                "no product takes activations in int8",
                details=list(self.reasons) or ["there is none with a quantised weight"],
                help=f"quantise weights to {taken} on a target with a kernel for that, or leave activations as they are",
            )

    def __str__(self) -> str:
        left = "".join(f"; {count} as they are: {reason}" for reason, count in self.reasons.items())
        return f"activations: int8 in {self.products - sum(self.reasons.values())} of {self.products} products{left}"


@dataclass(frozen=True)
class _Product:
    """A product with a quantised weight: the call, and what its weight is stored in, with scales and zero points; None in the place of the format if it is rounded already."""

    call: Call
    format: QuantFormat | None
    stored: tuple[Atom | None, ...] = ()

    def reason(self, refuses: Refuses) -> str:
        """Why its activations stay as they are."""
        if self.format is None:
            return ""
        dtype = tensor_type(self.call.args[0]).dtype
        if self.call.op is not ops.linear:
            return "experts"
        if self.format.name not in TAKEN or self.format.axis != 1:
            return f"weights in {self.format}"
        if self.call.attrs.get("out_dtype") is not None:
            return "its result has a dtype of its own"
        scales = self.stored[1]
        if scales is not None and (found := tensor_type(scales).dtype) not in (dtype, "float32"):
            return f"scales are {found}"
        return refuses(self.format, dtype)


def _products(ir: IRModule) -> Iterator[_Product]:
    for function in ir.functions:
        made = {b.var: b.value for b in walk_bindings(function.bindings)}
        for value in made.values():
            if isinstance(value, Call) and (product := _product(value, made)):
                yield product


def _product(call: Call, made: Mapping[Var, object]) -> _Product | None:
    """What a call multiplies with, if that is a quantised weight."""
    if call.op is ops.linear_int8:
        return _Product(call, None)
    if call.op not in (ops.linear, ops.moe_mlp):
        return None
    for weight in call.args[1:3] if call.op is ops.moe_mlp else call.args[1:2]:
        source = made.get(weight) if isinstance(weight, Var) else None
        if isinstance(source, Call) and source.op in (ops.dequantize, ops.dequantize_blocks):
            return _Product(call, *_stored(source, made))
    return None


def _stored(call: Call, made: Mapping[Var, object]) -> tuple[QuantFormat, tuple[Atom | None, ...]]:
    """The format of what a call dequantises, and its elements as they are stored, scales and zero points, which blocks have inside."""
    if call.op is ops.dequantize_blocks:
        return FORMATS[call.attrs["format"]], (call.args[0], None, None)
    attrs, codes = ops.dequantize.full_attrs(call.attrs), call.args[0]
    source = made.get(codes) if isinstance(codes, Var) else None
    elements, packing = codes, None
    if isinstance(source, Call) and source.op is ops.unpack_int4:
        elements, packing = source.args[0], ops.unpack_int4.full_attrs(source.attrs)["axis"]
    format = recognise(
        tensor_type(codes).dtype,
        packing=packing,
        group_size=attrs["group_size"],
        symmetric=call.args[2] is None,
        axis=attrs["axis"],
        format=attrs["format"],
    )
    return format, (elements, *call.args[1:3])


class _Rounding(Mutator):
    """Rewrites one function."""

    def __init__(self, function: Function, refuses: Refuses) -> None:
        super().__init__()
        self.refuses = refuses
        self.made = {b.var: b.value for b in walk_bindings(function.bindings)}

    def binding(self, binding: Binding) -> list[Binding]:
        value = binding.value
        product = _product(value, self.made) if isinstance(value, Call) else None
        if product is None or product.format is None or product.reason(self.refuses):
            return list(super().binding(binding))
        assert isinstance(value, Call)
        x, _, bias = value.args
        group_size = None if product.format.block else product.format.group_size
        attrs = {"format": product.format.name, "group_size": group_size}
        call = canonical_call(ops.linear_int8, (x, *product.stored, bias), attrs)
        return list(super().binding(binding.with_value(call)))
