# SPDX-License-Identifier: Apache-2.0
"""What is claimed of lifting, for any module: checked in one place, by the short form in the suite and by longer runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from pass_checks import expect_same_results, random_value, sizes_for, weight
from pass_evaluator import run_method
from random_modules import modules

import nnfront
from nnfront.ir import IRModule, first_difference, parse, verify
from nnfront.passes import lift_transform_params

Mode: TypeAlias = bool | list[str]
Case: TypeAlias = tuple[IRModule, Mode, bool]

MODES = st.sampled_from([False, True, ["a"], ["c", "a"]])
ANY = st.tuples(st.booleans(), st.booleans()).flatmap(lambda options: modules(*options))
CASES = st.tuples(ANY, MODES, st.booleans())


def check(case: Case, artefact: bool = True) -> None:
    """Check every claim about one module and one way to lift it."""
    ir, mode, allow_growth = case
    verify(ir)
    lifted = lift(ir, mode, allow_growth)
    expect_same_results(ir, lifted)
    check_again(lifted, mode, allow_growth)
    check_text(ir, lifted, mode, allow_growth)
    check_another_way(ir, lifted)
    check_report(ir, lifted, mode, allow_growth)
    check_runs(ir, lifted, artefact)


def lift(ir: IRModule, mode: Mode, allow_growth: bool) -> IRModule:
    """Lift a module."""
    return lift_transform_params(ir, shared_transform=there(ir, mode), allow_growth=allow_growth)


def there(ir: IRModule, mode: Mode) -> Mode:
    """Return a mode without methods that a module does not have."""
    return mode if isinstance(mode, bool) else [name for name in mode if name in ir]


def check_again(lifted: IRModule, mode: Mode, allow_growth: bool) -> None:
    """Check that lifting again changes nothing."""
    assert first_difference(lift(lifted, mode, allow_growth), lifted) is None
    if mode is True:
        assert first_difference(lift(lifted, False, allow_growth), lifted) is None


def check_text(ir: IRModule, lifted: IRModule, mode: Mode, allow_growth: bool) -> None:
    """Check that a module's text is the module, before and after, and lifts to the same."""
    for each in (ir, lifted):
        assert first_difference(parse(str(each)), each) is None
    assert str(lift(parse(str(ir)), mode, allow_growth)) == str(lifted)
    assert first_difference(lift(parse(str(lifted)), mode, allow_growth), lifted) is None


def check_another_way(ir: IRModule, lifted: IRModule) -> None:
    """Check that what is lifted can be lifted in another way: the transforms are composed, or go on."""
    for mode in (False, True):
        expect_same_results(ir, lift_transform_params(lifted, shared_transform=mode))


def check_report(ir: IRModule, lifted: IRModule, mode: Mode, allow_growth: bool) -> None:
    """Check that the report tells what was done."""
    report = lift_transform_params.report(ir, shared_transform=there(ir, mode), allow_growth=allow_growth)
    told = {t.name: [*t.passed, *(m.name for m in t.moved)] for t in report.transforms}
    done = {f.name: f for f in lifted.functions if f.kind == "transform"}
    assert list(told) == sorted(done)
    for name, transform in done.items():
        fields = zip(transform.result_type.names, transform.result_type.fields, strict=True)
        assert len(told[name]) == len([n for n, type in fields if hasattr(type, "shape")])


def check_runs(ir: IRModule, lifted: IRModule, artefact: bool = True) -> None:
    """Check that the compiled module, and the artefact that it is saved as, compute what the references do."""
    sizes = {f.name: sizes_for(f, {}) for f in ir.methods}
    weights = {p.name: weight(p.name, p.type, sizes[f.name]) for f in ir.methods for p in f.weights}
    sessions = [nnfront.compile(each).load(weights) for each in (ir, lifted)]
    with tempfile.TemporaryDirectory() as folder:
        for i, session in enumerate(tuple(sessions) if artefact else ()):
            session.save(Path(folder) / str(i))
            sessions.append(nnfront.load(Path(folder) / str(i)))
    for method in ir.methods:
        generator = torch.Generator().manual_seed(0)
        inputs = {p.name: random_value(p.type, sizes[method.name], generator) for p in method.inputs}
        expected = run_method(ir, method.name, inputs, weights)
        for session in sessions:
            check_close(session[method.name](**inputs), expected)


def check_close(actual: Any, expected: torch.Tensor) -> None:
    """Check that two results are the same up to rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
