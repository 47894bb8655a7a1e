# SPDX-License-Identifier: Apache-2.0
"""The function that asks which case it is and calls the variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfront import ops
from nnfront.cases.conditions import GENERAL, Case, Causal, ValueCase, Zeros
from nnfront.dims import as_symbol, of_symbol
from nnfront.ir import (
    Atom,
    Block,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Param,
    Scalar,
    ScalarType,
    Var,
    canonical_call,
    substitute_type,
    tensor_type,
)
from nnfront.passes.specializing.variant import known_value


class Dispatch:
    """Writes the function. `enters`: it says itself which case runs; a variant that has cases of its own does so otherwise."""

    def __init__(
        self,
        method: Function,
        cases: Sequence[Case],
        variants: Sequence[Function],
        general: Function,
        ir: IRModule,
        *,
        enters: bool,
    ) -> None:
        self.method = method
        self.cases = cases
        self.variants = variants
        self.general = general
        self.enters = enters
        self.params = {param.name: param for param in method.params}
        functions = {**ir, **{f.name: f for f in (*variants, general)}}
        self.builder = FunctionBuilder(method.name, functions)
        for param in method.params:
            self.builder.params.append(param)
            self.builder.names.unique(param.name)

    def function(self) -> Function:
        """Return the function."""
        result = self._choose(0)
        attrs = {key: value for key, value in self.method.attrs.items() if key != "derived"}
        return self.builder.finish(result, self.method.kind, attrs)

    def _choose(self, index: int) -> Atom:
        """Emit the choice among the cases from this one on."""
        builder = self.builder
        if index == len(self.cases):
            self._enter(GENERAL)
            return builder.emit(FunctionCall(self.general.name, self.method.params), self.general.name)
        condition = self._condition(index)
        with builder.block() as then:
            self._enter(self.cases[index].text)
            special = self._call(self.variants[index])
        with builder.block() as otherwise:
            rest = self._choose(index + 1)
        choice = If(condition, Block(tuple(then), special), Block(tuple(otherwise), rest))
        return builder.emit(choice, "case", None, self.general.result_type)

    def _enter(self, text: str) -> None:
        if self.enters:
            self.builder.call(ops.enter_case, case=text)

    def _condition(self, index: int) -> Atom:
        """Emit the question whether a case applies; tensors are read only where the rest of it holds."""
        case, builder = self.cases[index], self.builder
        tensors = [given for given in case.values if given.reads_tensor]
        numbers = [given for given in case.values if not given.reads_tensor]
        operands: list[Atom] = [Scalar(of_symbol(d.own)) for d in case.dims]
        operands += [self.params[given.name] for given in numbers]
        ranges: list[tuple[Any, ...]] = [d.bounds for d in case.dims]
        ranges += [(given.number, given.number, None) for given in numbers]
        name = f"is_case_{index}"
        if not tensors:
            return self._within(operands, ranges, name)
        if not operands:
            return self._tensors_hold(tensors, name)
        first = self._within(operands, ranges, f"may_be_case_{index}")
        with builder.block() as then:
            second = self._tensors_hold(tensors, f"{name}_values")
        return builder.emit(If(first, Block(tuple(then), second), Block((), Scalar(False))), name)

    def _tensors_hold(self, tensors: Sequence[ValueCase], name: str) -> Var:
        """Emit the question whether tensors have the values of a case."""
        builder = self.builder
        differences: list[Atom] = []
        for param, value in [(self.params[given.name], value) for given in tensors for value in given.values]:
            expected: Atom = Scalar(0)
            if isinstance(value, Causal):
                expected = known_value(param.type, value, lambda call, type: builder.emit(call, type=type))
            elif not isinstance(value, Zeros):
                expected = Scalar(value)
            differs = builder.call(ops.not_equal, param, expected)
            has_axes = tensor_type(param).shape
            differences.append(builder.call(ops.any, differs) if has_axes else differs)
        return self._within(differences, [(0, 0, None)] * len(differences), name)

    def _within(self, operands: Sequence[Atom], ranges: Sequence[tuple[Any, ...]], name: str) -> Var:
        return self.builder.emit(canonical_call(ops.within, operands, {"ranges": tuple(ranges)}), name)

    def _call(self, variant: Function) -> Var:
        """Emit the call of a variant."""
        args = tuple(self.params.get(p.name) or self._dim(p) for p in variant.params)
        # The variant's dims are called like the method's, which does not know what holds in the case.
        type = substitute_type(variant.result_type, {own: of_symbol(own) for own in self.method.symbols})
        return self.builder.emit(FunctionCall(variant.name, args), variant.name, None, type)

    def _dim(self, param: Param) -> Scalar:
        """A dim that the variant is handed as a number, with the facts that it has in the method."""
        assert isinstance(param.type, ScalarType)
        symbol = None if param.type.value is None else as_symbol(param.type.value)
        return Scalar(of_symbol(next(own for own in self.method.symbols if own == symbol)))
