# SPDX-License-Identifier: Apache-2.0
"""Move what only weights determine into a function that runs once, when weights are loaded.

before:
    def main[n](x: input float32[n, 4], gate: weight float32[8, 4], up: weight float32[8, 4]) -> float32[n, 16] attrs(derived=("gate_up",)) {
        gate_up: float32[16, 4] = concat(gate, up)
        gate_up_t: float32[4, 16] = permute_dims(gate_up, axes=(1, 0))
        y: float32[n, 16] = matmul(x, gate_up_t)
        return y
    }
after:
    transform def main_transform_params(gate: weight float32[8, 4], up: weight float32[8, 4]) -> {gate_up_t: float32[4, 16]} {
        gate_up: float32[16, 4] = concat(gate, up)
        gate_up_t: float32[4, 16] = permute_dims(gate_up, axes=(1, 0))
        results: {gate_up_t: float32[4, 16]} = {gate_up_t: gate_up_t}
        return results
    }
    def main[n](x: input float32[n, 4], gate_up_t: transformed float32[4, 16]) -> float32[n, 16] attrs(transform="main_transform_params") {
        y: float32[n, 16] = matmul(x, gate_up_t)
        return y
    }

A binding can move if weights, constants and other such bindings are all that it reads, weights define its dims, and it has no
effect. It does move if its tensor was declared in a module, or if the bytes that stay in memory for all sharing functions
together do not grow. `nnfront.passes.lifting` says how.

keeps:   names, order and types of inputs; results; weights by their checkpoint names, those that are needed as they are too.
leaves:  weights of the lifted functions as `transformed` parameters, and the transform's name in their attribute `transform`.
raises:  PassError for functions that cannot be lifted or cannot share, and for a dim that nothing defines any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.errors import PassError
from nnfront.ir import Function, IRModule, Names, given_to_ops, reached, used_vars
from nnfront.passes.base import module_pass
from nnfront.passes.lifting.analyse import Analyzer
from nnfront.passes.lifting.assemble import Assembly, Group
from nnfront.passes.lifting.report import LiftReport, describe
from nnfront.passes.lifting.split import Splitter

SUFFIX = "transform_params"


@module_pass()
def lift_transform_params(
    ir: IRModule,
    shared_transform: bool | Sequence[str] = False,
    allow_growth: bool = False,
    only_lifted: bool = False,
) -> IRModule:
    """Split functions with weights into `transform_params`, run once, and the work that needs inputs.

    shared_transform: False gives each function a transform of its own, `<name>_transform_params`, but functions that share
    one already go on sharing it. True gives all public functions with weights one, `transform_params`; a list, those named.
    allow_growth: move also what takes more bytes than the weights it is computed from.
    only_lifted: of functions that have a transform alone, where something is computed of weights alone.
    `lift_transform_params.report(ir, ...)`, with the same options, says what would move, what would stay and why.
    """
    analyzer = Analyzer(ir)
    plan = _plan(ir, shared_transform, only_lifted)
    if not plan:
        return ir
    lifted = {name for methods in plan.values() for name in methods}
    others = [f for f in ir.functions if f.name not in lifted and f.kind not in ("private", "transform")]
    in_use = {f.attrs["transform"] for f in others if "transform" in f.attrs}
    pinned = reached(ir, [*others, *(ir[name] for name in in_use)]) | given_to_ops(ir)
    names = Names(f.name for f in ir.functions if f.kind != "transform" or f.name in in_use)
    splitter = Splitter(analyzer, names, pinned)
    methods: dict[str, Function] = {}
    transforms: dict[str, Function] = {}
    for base, members in plan.items():
        group = _group(analyzer, ir, members, allow_growth)
        name = names.unique(base)
        assembly = Assembly(group, splitter, name)
        methods.update((scope.function.name, assembly.method(scope)) for scope in group.scopes)
        transforms[name] = assembly.transform()
    kept = pinned | in_use
    return ir.with_functions(_ordered(ir, kept, methods, transforms, splitter))


def _computes_of_weights(function: Function) -> bool:
    """Whether a method, or what it calls, computes something of weights alone."""
    if function.kind not in ("public", "private"):
        return False
    weights = {p for p in function.params if p.role in ("weight", "transformed")}
    reads = (set(used_vars(binding.value)) for binding in function.bindings)
    return any(read and weights.issuperset(read) for read in reads)


@lift_transform_params.reports
def _report(
    ir: IRModule,
    shared_transform: bool | Sequence[str] = False,
    allow_growth: bool = False,
    only_lifted: bool = False,
) -> LiftReport:
    """Say what would move, its bytes, who declared it, what would stay and why, and the bytes in memory. Printable."""
    plan = _plan(ir, shared_transform, only_lifted)
    analyzer = Analyzer(ir)
    return LiftReport(
        tuple(describe(name, _group(analyzer, ir, members, allow_growth)) for name, members in plan.items())
    )


def _plan(ir: IRModule, shared_transform: bool | Sequence[str], only_lifted: bool) -> dict[str, list[str]]:
    """Return the names of the functions to lift, by the name of the transform that they are to share."""
    if only_lifted and not any(map(_computes_of_weights, ir.functions)):
        return {}
    # A method that has a transform belongs to those that share it, even if no weight is left in it.
    members = sorted(f.name for f in ir.methods if (f.weights and not only_lifted) or "transform" in f.attrs)
    if shared_transform is False:
        plan: dict[str, list[str]] = {}
        for name in members:
            plan.setdefault(ir[name].attrs.get("transform", f"{name}_{SUFFIX}"), []).append(name)
        return plan
    if shared_transform is not True:
        _check_names(ir, shared_transform)
        members = [name for name in members if name in shared_transform]
    return {SUFFIX: members} if members else {}


def _check_names(ir: IRModule, names: Sequence[str]) -> None:
    public = [f.name for f in ir.methods]
    wrong = [names] if isinstance(names, str) else [name for name in names if name not in public]
    if wrong or not names:
        raise PassError(
            f"shared_transform names no public function: {', '.join(map(repr, wrong)) or 'the list is empty'}",
            details=[f"public functions are {', '.join(public)}"],
            help="use True for all, False for none, or a list of names",
        )


def _group(analyzer: Analyzer, ir: IRModule, members: Sequence[str], allow_growth: bool) -> Group:
    methods = [ir[name] for name in members]
    existing = dict.fromkeys(m.attrs["transform"] for m in methods if "transform" in m.attrs)
    return Group(analyzer, methods, [ir[name] for name in existing], allow_growth)


def _ordered(
    ir: IRModule,
    kept: set[str],
    methods: dict[str, Function],
    transforms: dict[str, Function],
    splitter: Splitter,
) -> list[Function]:
    """Put versions in the place of their private functions, and each transform before the first of its methods."""
    functions: list[Function] = []
    waiting = dict(transforms)
    for old in ir.functions:
        if old.name in methods:
            method = methods[old.name]
            transform = waiting.pop(method.attrs["transform"], None)
            functions += [method] if transform is None else [transform, method]
        elif old.kind in ("private", "transform"):
            functions += [old] if old.name in kept else []
            functions += splitter.made.get(old.name, [])
        else:
            functions.append(old)
    return functions
