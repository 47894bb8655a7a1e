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
from contextlib import suppress
from typing import Any

from nnfront import ops
from nnfront.cases.attributes import DECLARED, LISTED
from nnfront.cases.conditions import (
    GENERAL,
    Case,
    Conditions,
    case_text,
    from_plain,
    joined,
    read_case,
    to_plain,
)
from nnfront.cases.coverage import refuse_unreachable
from nnfront.errors import PassError
from nnfront.ir import Binding, Call, Function, IRModule, Mutator, Names, reached, walk_exprs
from nnfront.passes.base import module_pass
from nnfront.passes.bind_dims import chosen_functions
from nnfront.passes.inline import inline
from nnfront.passes.specializing.dispatch import Dispatch
from nnfront.passes.specializing.report import SpecialCasesReport, describe
from nnfront.passes.specializing.variant import private, specialised

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
        count = len(read) + len(method.attrs.get(LISTED, ()))
        if count > MOST_CASES:
            raise PassError(
                f"{name} has {count} special cases, {MOST_CASES} are the most",
                help="let ranges and multiple_of(number) stand for several",
            )
        new = _specialised(method, read, done) if read else [_undeclared(method)]
        done = done.with_functions(f for old in done.functions for f in (new if old is method else [old]))
    return done


@special_cases.reports
def _report(
    ir: IRModule, function: str | None = None, cases: Sequence[Mapping[str, Any]] | None = None
) -> SpecialCasesReport:
    """Say which variants there would be, what each check costs, which cases overlap and which are never reached. Printable."""
    plan = _plan(ir, function, cases)
    return SpecialCasesReport(tuple(describe(name, read) for name, read in plan.items() if read))


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
    if LISTED not in ir[name].attrs:
        return ir
    inside = [
        callee
        for callee in reached(ir, [ir[name]])
        if any(isinstance(e, Call) and e.op is ops.enter_case for e in walk_exprs(ir[callee]))
    ]
    # Of what this pass is given, primitive functions withheld.
    return inline.rewrite(ir, inside) if inside else ir


def _undeclared(method: Function, **more: Any) -> Function:
    attrs = {key: value for key, value in method.attrs.items() if key != DECLARED}
    return method.with_(attrs={**attrs, **more})


def _specialised(method: Function, cases: Sequence[Case], ir: IRModule) -> list[Function]:
    """The variants, the general function, and the dispatch among them."""
    names = Names(ir)
    variants = [
        specialised(method, case, names.unique(f"{method.name}_case_{i}"), ir) for i, case in enumerate(cases)
    ]
    general = private(method, names.unique(f"{method.name}_general"))
    inner: Mapping[str, Any] = method.attrs.get(LISTED, {})
    entered = [_entered(method, case, inner) for case in cases]
    if inner:
        variants = [_relabelled(variant, its) for variant, its in zip(variants, entered, strict=True)]
    dispatch = Dispatch(method, cases, variants, general, ir, enters=not inner).function()
    listed = {case_text(c): to_plain(c) for its in entered for c in its.values()}
    return [*variants, general, _undeclared(dispatch, **{LISTED: {**listed, **inner}})]


def _entered(method: Function, case: Case, inner: Mapping[str, Any]) -> dict[str, Conditions]:
    """What holds where a case's variant enters a text.

    A function that has cases already has them inside of each variant: those come first there, and then the case by itself.
    """
    found: dict[str, Conditions] = {}
    for text, conditions in inner.items():
        both = joined(case.conditions, from_plain(conditions))
        with suppress(PassError):  # no input meets both
            read_cases(method, [both])
            found[text] = both
    return {**found, GENERAL: case.conditions}


def _relabelled(variant: Function, entered: Mapping[str, Conditions]) -> Function:
    """The variant of a function that has cases: what it enters has the variant's case in its text."""

    class Relabel(Mutator):
        def binding(self, binding: Binding) -> Sequence[Binding]:
            value = binding.value
            if isinstance(value, Call) and value.op is ops.enter_case and value.attrs["case"] in entered:
                call = Call(value.op, (), {"case": case_text(entered[value.attrs["case"]])})
                return (binding.with_value(call),)
            return super().binding(binding)

    return Relabel().function(variant)
