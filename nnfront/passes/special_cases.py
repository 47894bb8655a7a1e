# SPDX-License-Identifier: Apache-2.0
"""Give a function variants for special cases, and choose among them when it is called.

example: special_cases(ir, "main", [{"n": 4}])
before:
    def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
        y: float32[n, 4] = linear(x, w, None)
        return y
    }
after:
    private def main_case_0(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
        y: float32[4, 4] = linear(x, w, None)
        return y
    }
    private def main_general[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
        y: float32[n, 4] = linear(x, w, None)
        return y
    }
    def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] attrs(cases=("n == 4",)) {
        is_case_0: bool = within(dim(n), ranges=((4, 4, None),))
        case: float32[n, 4] = if is_case_0 {
            x_0: float32[4, 4] = match_shape(x, float32[4, 4])
            main_case_0: float32[4, 4] = @main_case_0(x_0, w)
            yield main_case_0
        } else {
            main_general: float32[n, 4] = @main_general(x, w)
            yield main_general
        }
        return case
    }

Cases are asked in order; the general function comes last. Inside a variant the facts of its case hold: dims that are known to be
one number are numbers, others have a narrower range or a divisor; values that are known are constants. `nnfront.passes.conditions`
says what a case may ask.

keeps:   the public signature; one set of weights and one transform for all variants.
leaves:  the cases in words in the function's attribute `cases`, in order.
raises:  PassError for functions, dims and arguments that are not there, and for a case that can never hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnfront import ops
from nnfront.dims import Size, Symbol, as_symbol, of_symbol, same
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    MatchShape,
    Mutator,
    Names,
    Param,
    Projection,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    branch,
    join,
    sizes_of,
    substitute_type,
)
from nnfront.passes.base import module_pass
from nnfront.passes.bind_dims import bind_symbols, chosen_functions
from nnfront.passes.conditions import Case, ValueCase, read_case
from nnfront.passes.conditions import zeros as all_zeros


@module_pass()
def special_cases(ir: IRModule, function: str, cases: Sequence[Mapping[str, Any]]) -> IRModule:
    """Put a dispatch among variants in the place of a public function's body; conditions in one case hold together."""
    (name,) = chosen_functions(ir, [function])
    method = ir[name]
    read = [read_case(method, conditions) for conditions in cases]
    if not read:
        return ir
    names = Names(ir)
    sizes = [_sizes(case) for case in read]
    variants = [
        _variant(method, case, sizes[i], names.unique(f"{name}_case_{i}"), ir) for i, case in enumerate(read)
    ]
    general = _private(method, names.unique(f"{name}_general"))
    dispatch = _Dispatch(method, read, sizes, variants, general, ir).function()
    functions: list[Function] = []
    for old in ir.functions:
        functions += [*variants, general, dispatch] if old is method else [old]
    return ir.with_functions(functions)


def _private(method: Function, name: str) -> Function:
    attrs = {key: value for key, value in method.attrs.items() if key != "transform"}
    return method.with_(name=name, kind="private", attrs=attrs)


def _sizes(case: Case) -> dict[Symbol, Size]:
    """What the dims are in a case: numbers, or themselves with narrower facts."""
    sizes: dict[Symbol, Size] = {
        d.symbol: of_symbol(d.symbol) if d.value is None else d.value for d in case.dims
    }
    for given in case.values:
        size = given.param.type.value if isinstance(given.param.type, ScalarType) else None
        symbol = None if size is None else as_symbol(size)
        if symbol is not None and isinstance(given.value, int):
            sizes[symbol] = given.value
    return sizes


def _variant(
    method: Function, case: Case, sizes: Mapping[Symbol, Size], name: str, functions: Mapping[str, Function]
) -> Function:
    """The function with what its case knows put in."""
    bound = bind_symbols(_private(method, name), sizes, functions)
    values = {given.param.name: given for given in case.values}
    mutator = Mutator()
    first: list[Binding] = []
    for param in bound.params:
        if param.name in values:
            mutator.replaced[param] = _known(param, values[param.name], first)
    body = mutator.block(bound.body)
    params = tuple(p for p in bound.params if p.name not in values)
    return bound.with_(params=params, bindings=(*first, *body.bindings), result=body.result)


def _known(param: Param, given: ValueCase, first: list[Binding]) -> Atom:
    """What stands for a parameter whose value is known; a tensor of zeros is made ahead of the body."""
    if isinstance(given.value, bool | int | float):
        return Scalar(given.value)
    assert isinstance(param.type, TensorType)
    attrs = ops.zeros.canonical_attrs([], {"shape": param.type.shape, "dtype": param.type.dtype})
    var = Var(param.name, param.type)
    first.append(Binding(var, Call(ops.zeros, (), attrs)))
    return var


class _Dispatch:
    """Writes the function that asks which case it is and calls the variant."""

    def __init__(
        self,
        method: Function,
        cases: Sequence[Case],
        sizes: Sequence[Mapping[Symbol, Size]],
        variants: Sequence[Function],
        general: Function,
        ir: IRModule,
    ) -> None:
        self.method = method
        self.cases = cases
        self.sizes = sizes
        self.variants = variants
        self.general = general
        functions = {**ir, **{f.name: f for f in (*variants, general)}}
        self.builder = FunctionBuilder(method.name, functions)
        for param in method.params:
            self.builder.params.append(param)
            self.builder.names.unique(param.name)

    def function(self) -> Function:
        """Return the function."""
        result = self._choose(0)
        attrs = {key: value for key, value in self.method.attrs.items() if key != "derived"}
        attrs["cases"] = tuple(case.text for case in self.cases)
        return self.builder.finish(result, self.method.kind, attrs)

    def _choose(self, index: int) -> Atom:
        """Emit the choice among the cases from this one on."""
        builder = self.builder
        if index == len(self.cases):
            call = FunctionCall(self.general.name, self.method.params)
            return builder.emit(call, self.general.name)
        condition = self._condition(index)
        with builder.block() as then:
            special = self._call(index)
        with builder.block() as otherwise:
            rest = self._choose(index + 1)
        return builder.emit(If(condition, branch(then, special), branch(otherwise, rest)), "case")

    def _condition(self, index: int) -> Atom:
        """Emit the question whether a case applies."""
        builder, case = self.builder, self.cases[index]
        operands: list[Atom] = [Scalar(of_symbol(self._own(d.symbol))) for d in case.dims]
        ranges: list[tuple[Any, ...]] = [d.bounds for d in case.dims]
        for given in case.values:
            if given.value is all_zeros:
                differs = builder.call(ops.not_equal, given.param, Scalar(0))
                operands.append(builder.call(ops.any, differs))
                ranges.append((0, 0, None))
            else:
                operands.append(given.param)
                number = int(given.value) if isinstance(given.value, bool) else given.value
                ranges.append((number, number, None))
        attrs = ops.within.canonical_attrs([a.type for a in operands], {"ranges": tuple(ranges)})
        return builder.emit(Call(ops.within, tuple(operands), attrs), f"is_case_{index}")

    def _own(self, symbol: Symbol) -> Symbol:
        """The symbol with the facts that it has in the method."""
        return next(own for own in self.method.symbols if own == symbol)

    def _call(self, index: int) -> Atom:
        """Emit the call of a variant, its arguments and result under the types that fit."""
        builder, variant = self.builder, self.variants[index]
        numbers = {symbol: size for symbol, size in self.sizes[index].items() if isinstance(size, int)}
        params = {param.name: param for param in self.method.params}
        args = tuple(self._narrow(params[p.name], p.type, numbers, index) for p in variant.params)
        # The variant's dims are called like the method's, which does not know what holds in the case.
        type = substitute_type(variant.result_type, {own: of_symbol(own) for own in self.method.symbols})
        result = builder.emit(FunctionCall(variant.name, args), variant.name, None, type)
        return self._widen(result, self.general.result_type)

    def _narrow(self, arg: Param, wanted: Type, numbers: Mapping[Symbol, Size], index: int) -> Atom:
        """Return an argument under the sizes that it has in this case."""
        if all(same(mine, its) for mine, its in zip(sizes_of(wanted), sizes_of(arg.type), strict=True)):
            return arg
        if isinstance(wanted, ScalarType):
            assert wanted.value is not None
            return Scalar(wanted.value)
        type = substitute_type(arg.type, numbers)
        return self.builder.emit(MatchShape(arg, type), f"{arg.name}_{index}")

    def _widen(self, value: Atom, general: Type) -> Atom:
        """Return a result under a type that the general one covers."""
        builder = self.builder
        if join(value.type, general) == general:
            return value
        if isinstance(general, TupleType):
            fields = [builder.emit(Projection(value, i)) for i in range(len(general.fields))]
            widened = [self._widen(field, type) for field, type in zip(fields, general.fields, strict=True)]
            return builder.emit(Tuple(tuple(widened), general.names), "results")
        return builder.emit(MatchShape(value, general), "general")
