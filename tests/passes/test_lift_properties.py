# SPDX-License-Identifier: Apache-2.0
"""What lifting never does, for any module: change a result, take more memory, or do something else the second time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_checks import expect_same_results, weight
from pass_evaluator import run_function
from random_modules import modules

from nnfront.ir import IRModule, first_difference, parse, verify
from nnfront.passes import lift_transform_params

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
MODES = st.sampled_from([False, True, ["a"]])


def resident_bytes(ir: IRModule, lifted: IRModule) -> tuple[int, int]:
    """Bytes that the methods of `ir` read as weights, and that the transforms of `lifted` return in their place."""
    named = {
        p.name: weight(p.name, p.type, {"d": 5}) for f in ir.methods for p in f.params if p.role == "weight"
    }
    before = after = 0
    for transform in [f for f in lifted.functions if f.kind == "transform"]:
        methods = [f.name for f in lifted.methods if f.attrs["transform"] == transform.name]
        read = {p.name for name in methods for p in ir[name].params if p.role == "weight"}
        before += sum(named[name].nbytes for name in read)
        results = run_function(lifted, transform, [named[p.name] for p in transform.params])
        after += sum(result.nbytes for result in results if hasattr(result, "nbytes"))
    return before, after


@pytest.mark.parametrize("declares", [False, True], ids=["expressions", "derived tensors"])
def test_results_stay_the_same(declares):
    @PROPERTY
    @given(modules(declares), MODES, st.booleans())
    def check(ir, mode, allow_growth):
        verify(ir)
        expect_same_results(ir, lift_transform_params(ir, shared_transform=mode, allow_growth=allow_growth))

    check()


@PROPERTY
@given(modules(), st.booleans())
def test_memory_never_grows_unasked(ir, shared):
    before, after = resident_bytes(ir, lift_transform_params(ir, shared_transform=shared))
    assert after <= before


@PROPERTY
@given(modules(declares=True), MODES, st.booleans())
def test_lifting_twice_changes_nothing(ir, mode, allow_growth):
    lifted = lift_transform_params(ir, shared_transform=mode, allow_growth=allow_growth)
    assert (
        first_difference(
            lift_transform_params(lifted, shared_transform=mode, allow_growth=allow_growth), lifted
        )
        is None
    )


@PROPERTY
@given(modules(declares=True), MODES)
def test_the_text_of_a_module_lifts_to_the_same(ir, mode):
    assert str(lift_transform_params(parse(str(ir)), shared_transform=mode)) == str(
        lift_transform_params(ir, shared_transform=mode)
    )


@PROPERTY
@given(modules(), st.sampled_from([False, True]))
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
