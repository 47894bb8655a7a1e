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
    def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] attrs(cases={"n == 4": {n: 4}}) {
        is_case_0: bool = within(dim(n), ranges=((4, 4, None),))
        case: float32[n, 4] = if is_case_0 {
            enter_case: () = enter_case(case="n == 4")
            main_case_0: float32[4, 4] = @main_case_0(x, w)
            yield main_case_0
        } else {
            enter_case_1: () = enter_case(case="general")
            main_general: float32[n, 4] = @main_general(x, w)
            yield main_general
        }
        return case
    }

Cases are asked in order; the general function comes last. Inside a variant the facts of its case hold: dims that are known to be
one number are numbers, others have a narrower range or a divisor; values that are known are expressions without the argument.
`nnfront.cases.conditions` says what a case may ask. What must read a tensor is asked only where the rest of its case holds.

A method may declare its cases in the spec, as `"$": {"special_cases": [...]}`: the attribute `special_cases`. Without a function this
pass does what all methods declare; cases that are given take the place of those declared, and an empty list drops them.

keeps:   the public signature; one set of weights and one transform for all variants.
leaves:  the cases in order, under their texts, in the function's attribute `cases`.
raises:  PassError for functions, dims and arguments that are not there, for a case that can never hold, and for one that the
         cases before it leave nothing to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnfront import ops
from nnfront.cases import (
    Case,
    ValueCase,
    case_text,
    from_plain,
    joined,
    read_case,
    refuse_unreachable,
    to_plain,
)
from nnfront.dims import Size, Symbol, as_symbol, of_symbol, substitute
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    IRModule,
    Mutator,
    Names,
    Param,
    Scalar,
    ScalarType,
    Type,
    Var,
    map_sizes,
    undefined_symbols,
    walk_bindings,
    walk_exprs,
)
from nnfront.passes.base import module_pass
from nnfront.passes.bind_dims import bind_symbols, chosen_functions
from nnfront.passes.effects import reached
from nnfront.passes.inline import inline
from nnfront.passes.sizes import SizeMap
from nnfront.passes.specializing.dispatch import GENERAL, Dispatch, known_value
from nnfront.passes.specializing.report import SpecialCasesReport, describe

DECLARED = "special_cases"
"""The attribute of a function whose spec declares cases."""

MOST_CASES = 60
"""Cases that a function may have: each is a branch inside another, and text from outside is read to a certain depth only."""


@module_pass()
def special_cases(
    ir: IRModule, function: str | None = None, cases: Sequence[Mapping[str, Any]] | None = None
) -> IRModule:
    """Put a dispatch among variants in the place of a public function's body; conditions in one case hold together.

    Without `cases` those that the spec declares, without `function` all functions that declare some.
    `special_cases.report(ir, ...)`, with the same options, says which variants there would be, which cases overlap, and what
    each check costs.
    """
    done = ir
    for name, read in _plan(ir, function, cases).items():
        refuse_unreachable(name, read)
        done = _with_own_cases(name, done)
        method = done[name]
        count = len(read) + len(method.attrs.get("cases", ()))
        if count > MOST_CASES:
            raise PassError(
                f"{name} has {count} special cases, {MOST_CASES} are the most",
                help="let ranges and multiple_of(number) stand for several",
            )
        new = _specialised(method, read, done) if read else [_undeclared(method)]
        done = done.with_functions(f for old in done.functions for f in (new if old is method else [old]))
    return done


def _report(
    ir: IRModule, function: str | None = None, cases: Sequence[Mapping[str, Any]] | None = None
) -> SpecialCasesReport:
    """Say which variants there would be, what each check costs, which cases overlap and which are never reached. Printable."""
    plan = _plan(ir, function, cases)
    return SpecialCasesReport(tuple(describe(name, read) for name, read in plan.items() if read))


special_cases.report = _report


def _plan(
    ir: IRModule, function: str | None, cases: Sequence[Mapping[str, Any]] | None
) -> dict[str, list[Case]]:
    """The cases of each function that changes; none for one whose declaration is dropped."""
    if function is None:
        if cases is not None:
            raise PassError(
                "these cases are for no function", help='name one: special_cases(ir, "decode", [...])'
            )
        return {f.name: read_cases(f, f.attrs[DECLARED]) for f in ir.methods if DECLARED in f.attrs}
    (name,) = chosen_functions(ir, [function])
    method = ir[name]
    if cases is None:
        if DECLARED not in method.attrs:
            raise PassError(
                f"{name} declares no special cases",
                help='give them here, or in the spec as "$": {"special_cases": [...]}',
            )
        cases = method.attrs[DECLARED]
    else:
        _refuse_lifted(method, cases, ir)
    read = read_cases(method, cases)
    return {name: read} if read or DECLARED in method.attrs else {}


def read_cases(method: Function, cases: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of a method, as a user or an attribute gives them. Raises PassError for those that mean nothing."""
    dims = {symbol.name: symbol for symbol in method.symbols}
    arguments = {param.name: param.type for param in method.inputs}
    return [
        read_case(method.name, from_plain(case) if isinstance(case, Mapping) else case, dims, arguments)
        for case in cases
    ]


def _refuse_lifted(method: Function, cases: Iterable[Mapping[str, Any]], ir: IRModule) -> None:
    """Refuse a case on a dim that only the transform needs."""
    transform = ir.get(method.attrs.get("transform", ""))
    if transform is None:
        return
    known = {*(symbol.name for symbol in method.symbols), *(param.name for param in method.inputs)}
    lost = {symbol.name for symbol in transform.symbols} - known
    for name in [name for case in cases if isinstance(case, Mapping) for name in case if name in lost]:
        raise PassError(
            f"nothing that {method.name} does in a call depends on '{name}'",
            details=[f"it is a dim of weights that only {transform.name} needs"],
            help="leave it out, or give the case before lifting",
        )


def _with_own_cases(name: str, ir: IRModule) -> IRModule:
    """The module in which the method itself enters the cases that it has, not a variant that it calls."""
    if "cases" not in ir[name].attrs:
        return ir
    inside = [
        callee
        for callee in reached([ir[name]], ir)
        if any(isinstance(e, Call) and e.op is ops.enter_case for e in walk_exprs(ir[callee]))
    ]
    return inline(ir, inside) if inside else ir


def _undeclared(method: Function, **more: Any) -> Function:
    attrs = {key: value for key, value in method.attrs.items() if key != DECLARED}
    return method.with_(attrs={**attrs, **more})


def _specialised(method: Function, cases: Sequence[Case], ir: IRModule) -> list[Function]:
    """The variants, the general function, and the dispatch among them."""
    names = Names(ir)
    inner: Mapping[str, Any] = method.attrs.get("cases", {})
    sizes = [_sizes(case, method) for case in cases]
    variants = [
        _variant(method, case, sizes[i], names.unique(f"{method.name}_case_{i}"), ir)
        for i, case in enumerate(cases)
    ]
    texts = _texts(method, cases, inner)
    if inner:
        variants = [_relabelled(v, texts[i]) for i, v in enumerate(variants)]
    general = _private(method, names.unique(f"{method.name}_general"))
    dispatch = Dispatch(method, cases, variants, general, ir, enters=not inner).function()
    listed = {text: plain for their in texts for text, plain in their.values()}
    listed |= inner
    return [*variants, general, _undeclared(dispatch, cases=listed)]


def _texts(
    method: Function, cases: Sequence[Case], inner: Mapping[str, Any]
) -> list[dict[str, tuple[str, Mapping[str, Any]]]]:
    """For each case, by the text that its variant's body enters, the text that it gets and its conditions.

    A function that has cases already has them inside of each variant: those come first there, and then the case by itself.
    """
    result = []
    for case in cases:
        found: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for text, conditions in inner.items():
            both = joined(case.conditions, from_plain(conditions))
            try:
                read_cases(method, [both])
            except PassError:  # no input meets both
                continue
            found[text] = case_text(both), to_plain(both)
        found[GENERAL] = case.text, to_plain(case.conditions)
        result.append(found)
    return result


def _relabelled(variant: Function, texts: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Function:
    """The variant of a function that has cases: what it enters has the variant's case in its text."""

    class Relabel(Mutator):
        def binding(self, binding: Binding) -> Sequence[Binding]:
            value = binding.value
            if isinstance(value, Call) and value.op is ops.enter_case and value.attrs["case"] in texts:
                call = Call(value.op, (), {"case": texts[value.attrs["case"]][0]})
                return (Binding(binding.var, call, binding.provenance),)
            return super().binding(binding)

    return Relabel().function(variant)


_OF_METHODS = ("transform", "cases", DECLARED)


def _private(method: Function, name: str) -> Function:
    attrs = {key: value for key, value in method.attrs.items() if key not in _OF_METHODS}
    return method.with_(name=name, kind="private", attrs=attrs)


def _sizes(case: Case, method: Function) -> dict[Symbol, Size]:
    """What the dims are in a case: numbers, or themselves with narrower facts."""
    sizes: dict[Symbol, Size] = {
        d.symbol: of_symbol(d.symbol) if d.value is None else d.value for d in case.dims
    }
    for given in case.values:
        size = given.type.value if isinstance(given.type, ScalarType) else None
        symbol = None if size is None else as_symbol(size)
        if symbol is not None and isinstance(given.values[0], int):
            sizes[symbol] = given.values[0]
    return sizes


def _variant(
    method: Function, case: Case, sizes: Mapping[Symbol, Size], name: str, functions: Mapping[str, Function]
) -> Function:
    """The function with what its case knows put in."""
    private = _private(method, name)
    bound = (b.var.name for b in walk_bindings(private.bindings))
    names = Names([*(p.name for p in private.params), *bound])
    first: list[Binding] = []
    known = {v.name: _known(v, lambda size: substitute(size, sizes), first, names) for v in case.values}
    variant = bind_symbols(private, sizes, functions, known)
    variant = variant.with_(bindings=(*first, *variant.bindings))
    # A tensor whose elements are known may be the only one that says what a dim is: then the dim is handed over.
    dims = (
        Param(names.unique(symbol.name), ScalarType("int64", of_symbol(symbol)), "input")
        for symbol in undefined_symbols(variant) or ()
    )
    return variant.with_(params=(*variant.params, *dims))


def _known(given: ValueCase, size: SizeMap, first: list[Binding], names: Names) -> Atom:
    """What stands for an argument whose value is known; a tensor is made ahead of the body."""
    value, whole = given.values[0], map_sizes(given.type, size)
    if isinstance(whole, ScalarType):
        assert isinstance(value, bool | int | float)
        return Scalar(value)

    def emit(call: Call, type: Type) -> Var:
        is_last = type == whole and all(b.var.name != given.name for b in first)
        var = Var(given.name if is_last else names.unique(given.name), type)
        first.append(Binding(var, call))
        return var

    return known_value(whole, value, emit)
