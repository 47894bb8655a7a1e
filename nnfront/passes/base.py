# SPDX-License-Identifier: Apache-2.0
"""What a pass is, and the driver that runs it.

A pass is a pure function from IRModule to IRModule, declared with `module_pass`. It never touches primitive functions: unless
its declaration asks for them, the driver puts a `Declaration` (parameters, result type, no body) in the place of each, and
whatever comes back, the functions themselves are what the caller gets. External functions come back as they were from every pass.

NNFRONT_CHECK=1 verifies the module after every pass that changes it. NNFRONT_DUMP=dir writes it to dir/NN_name.nnir after every pass of `run`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from nnfront.ir import Function, IRModule, Var, verify
from nnfront.passes.effects import Declaration, impure_functions

P = ParamSpec("P")
Report = TypeVar("Report")

PASSES: dict[str, Pass[...]] = {}


class Pass(Generic[P]):
    """A declared pass: call it with a module and its options. Where it has a `report`, that says what it would do."""

    report: Callable[..., Any]

    def __init__(self, rewrite: Callable[Concatenate[IRModule, P], IRModule], sees_primitive: bool) -> None:
        self.rewrite = rewrite
        self.name = rewrite.__name__
        self.sees_primitive = sees_primitive
        functools.update_wrapper(self, rewrite)

    def __call__(self, ir: IRModule, *args: P.args, **kwargs: P.kwargs) -> IRModule:
        """Return the rewritten module; the same object if nothing changes."""
        seen = self._seen(ir)
        result = self.rewrite(seen, *args, **kwargs)
        result = ir if result is seen else _restored(result, ir, self.sees_primitive)
        if result is not ir and os.environ.get("NNFRONT_CHECK") == "1":
            verify(result)
        return result

    def reports(
        self, describe: Callable[Concatenate[IRModule, P], Report]
    ) -> Callable[Concatenate[IRModule, P], Report]:
        """Declare the function behind `report`. It is given what the pass would see."""

        @functools.wraps(describe)
        def report(ir: IRModule, /, *args: P.args, **kwargs: P.kwargs) -> Report:
            return describe(self._seen(ir), *args, **kwargs)

        self.report = report
        return report

    def _seen(self, ir: IRModule) -> IRModule:
        return ir if self.sees_primitive else _withheld(ir)

    def __repr__(self) -> str:
        return f"<pass {self.name}>"


def module_pass(
    *, sees_primitive: bool = False
) -> Callable[[Callable[Concatenate[IRModule, P], IRModule]], Pass[P]]:
    """Declare a pass. `sees_primitive`: it is given the bodies of primitive functions, and may change those of fused ones."""

    def declare(rewrite: Callable[Concatenate[IRModule, P], IRModule]) -> Pass[P]:
        declared = Pass(rewrite, sees_primitive)
        assert declared.name not in PASSES, f"pass {declared.name} is declared twice"
        PASSES[declared.name] = declared
        return declared

    return declare


Step: TypeAlias = "Pass[...] | functools.partial[IRModule]"


def run_steps(ir: IRModule, steps: Iterable[Step]) -> IRModule:
    """Run passes in order; a step with options is a `functools.partial` of a pass."""
    directory = os.environ.get("NNFRONT_DUMP")
    for number, step in enumerate(steps):
        ir = step(ir)
        if directory:
            path = Path(directory)
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number:02}_{step_name(step)}.nnir").write_text(f"{ir}\n", encoding="utf-8")
    return ir


def step_name(step: Step) -> str:
    """Return the name of the pass that a step runs."""
    declared: Any = step.func if isinstance(step, functools.partial) else step
    name: str = declared.name
    return name


def _withheld(ir: IRModule) -> IRModule:
    """The module with primitive functions as declarations; the same object if there are none."""
    if not any(f.is_primitive for f in ir.functions):
        return ir
    impure = impure_functions(ir)
    return ir.with_functions(
        _declaration(f, f.name not in impure) if f.is_primitive else f for f in ir.functions
    )


def _declaration(f: Function, is_pure: bool) -> Declaration:
    return Declaration(
        f.name,
        f.params,
        (),
        Var("withheld", f.result_type),
        f.kind,
        f.attrs,
        f.is_outlined,
        f.callees,
        is_pure,
    )


def _restored(result: IRModule, original: IRModule, sees_primitive: bool) -> IRModule:
    """Put primitive functions back: all of them after a pass that does not see them, else the external ones that it kept."""
    own = {f.name: f for f in original.functions if f.is_primitive}
    functions = [
        own.get(f.name, f) if not sees_primitive or f.kind == "external" else f for f in result.functions
    ]
    if not sees_primitive:
        functions += [f for f in own.values() if f.name not in result]
    return IRModule(functions, result.attrs)
