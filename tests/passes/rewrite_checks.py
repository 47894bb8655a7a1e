# SPDX-License-Identifier: Apache-2.0
"""What tests of rewriting passes ask of one body: `check(pass, before, after)`."""

from __future__ import annotations

from typing import Any

from pass_checks import expect, expect_same_results, module

from nnfront.ir import IRModule, first_difference
from nnfront.passes import Pass


def check(
    rewrite: Pass[...],
    before: str,
    after: str | None = None,
    dims: dict[str, int] | None = None,
    **options: Any,
) -> IRModule:
    """Run a pass on a module's text and compare; None: nothing may change. The second run changes nothing."""
    ir = module(before)
    result = rewrite(ir, **options)
    if after is None:
        assert result is ir, str(result)
        return result
    expect(result, after)
    expect_same_results(ir, result, dims)
    assert first_difference(rewrite(result, **options), result) is None
    return result


def main(
    body: str, params: str = "x: input float32[4, 4]", result: str = "float32[4, 4]", dims: str = ""
) -> str:
    """The text of a module with one function."""
    return f"def main{dims}({params}) -> {result} {{\n{body}\n}}"
