# SPDX-License-Identifier: Apache-2.0
"""What lifting never does, for any module: change a result, take more memory, or do something else the second time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lift_claims import CASES, check, check_runs, lift
from pass_checks import sizes_for, weight
from pass_evaluator import run_function
from random_modules import modules

from nnfront.ir import IRModule
from nnfront.passes import lift_transform_params

PROPERTY = settings(max_examples=15, deadline=None, derandomize=True)


def resident_bytes(ir: IRModule, lifted: IRModule) -> tuple[int, int]:
    """Bytes that the methods of `ir` read as weights, and that the transforms of `lifted` return in their place."""
    named = {p.name: weight(p.name, p.type, sizes_for(f, {})) for f in ir.methods for p in f.weights}
    before = after = 0
    for transform in [f for f in lifted.functions if f.kind == "transform"]:
        methods = [f.name for f in lifted.methods if f.attrs["transform"] == transform.name]
        read = {p.name for name in methods for p in ir[name].params if p.role == "weight"}
        before += sum(named[name].nbytes for name in read)
        results = run_function(lifted, transform, [named[p.name] for p in transform.params])
        after += sum(result.nbytes for result in results if hasattr(result, "nbytes"))
    return before, after


@settings(PROPERTY, max_examples=15)
@given(CASES)
def test_a_module_stays_what_it_is_when_it_is_lifted_printed_parsed_and_lifted_again(case):
    check(case, artefact=False)


@settings(PROPERTY, max_examples=5)
@given(CASES)
def test_a_lifted_module_runs_from_an_artefact(case):
    check_runs(case[0], lift(*case))


@PROPERTY
@given(modules(wide=True), st.booleans())
def test_memory_never_grows_unasked(ir, shared):
    before, after = resident_bytes(ir, lift_transform_params(ir, shared_transform=shared))
    assert after <= before


@PROPERTY
@given(modules(), st.booleans())
def test_nothing_that_needs_weights_alone_and_shrinks_stays(ir, shared):
    # With growth allowed, what is left of a method reads no weight work that could have moved.
    lifted = lift_transform_params(ir, shared_transform=shared, allow_growth=True)
    for method in lifted.methods:
        known = {p for p in method.params if p.role == "transformed"}
        for binding in method.bindings:
            operands = getattr(binding.value, "args", ())
            reads_only_weights = operands and all(a in known for a in operands)
            is_op = hasattr(binding.value, "op")
            assert not (is_op and reads_only_weights) or binding.value.op.name == "stop_lift_params"
