# SPDX-License-Identifier: Apache-2.0
"""What every lift test asks: the text after, the same results, and that lifting again changes nothing."""

from __future__ import annotations

from typing import Any

from pass_checks import expect, expect_same_results, module

from nnfront.ir import IRModule, first_difference
from nnfront.passes import lift_transform_params


def check_lift(
    before: str, after: str | None = None, dims: dict[str, int] | None = None, **options: Any
) -> IRModule:
    """Lift the module that a text says; compare it with a text if there is one; return it."""
    ir = module(before)
    lifted = lift_transform_params(ir, **options)
    if after is not None:
        expect(lifted, after)
    expect_same_results(ir, lifted, dims)
    assert first_difference(lift_transform_params(lifted, **options), lifted) is None
    assert first_difference(lift_transform_params(lifted), lifted) is None
    return lifted
