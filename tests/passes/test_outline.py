# SPDX-License-Identifier: Apache-2.0
"""Outlining: what fits a pattern becomes a primitive function, everything else stays, and inlining undoes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from pass_checks import expect_same_results, module
from random_modules import modules
from rewrite_checks import check, main

from nnfront import ops
from nnfront.ir import first_difference, verify
from nnfront.passes import Pattern, inline, outline
from nnfront.passes.patterns import apply

EVERYTHING = (
    Pattern("sum_of_product", (apply(ops.add, apply((ops.matmul, ops.multiply)), None, commutes=True),)),
    Pattern("thin", (apply(ops.tanh, apply(ops.permute_dims)),)),
)
PRODUCT = "x: input float32[4, 4], w: input float32[4, 4]"


@settings(max_examples=20, deadline=None, derandomize=True)
@given(modules())
def test_results_stay_the_same_and_inlining_undoes_it(ir):
    outlined = outline(ir, EVERYTHING)
    expect_same_results(ir, outlined)
    assert first_difference(outline(outlined, EVERYTHING), outlined) is None
    fused = [f.name for f in outlined.functions if f.kind == "fused"]
    back = inline(outlined, fused) if fused else outlined
    verify(back)
    expect_same_results(ir, back)
    assert [len(f.bindings) for f in back.functions] == [len(f.bindings) for f in ir.functions]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = silu(h) return y", ["product"]),
        ("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = add(h, x) return y", ["product"]),
        ("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = add(x, h) return y", ["product"]),
        ("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = tanh(h) return y", []),
        ("h: float32[4, 4] = exp(x) y: float32[4, 4] = silu(h) return y", []),
        (
            "h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = silu(h) z: float32[4, 4] = multiply(y, h) return z",
            [],
        ),
        ("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = add(h, h) return y", []),
    ],
    ids=[
        "activation",
        "residual",
        "residual first",
        "another op",
        "another operand",
        "read twice",
        "read twice by one",
    ],
)
def test_what_is_outlined(body, names):
    ir = module(main(body, PRODUCT))
    after = outline(ir)
    assert [f.name for f in after.functions if f.kind == "fused"] == names
    assert (after is ir) == (not names)
    expect_same_results(ir, after)


def test_a_value_read_in_a_branch_is_not_inside_a_region_outside_it():
    ir = module(
        main(
            """
            h: float32[4, 4] = matmul(x, w)
            y: float32[4, 4] = if flag {
                s: float32[4, 4] = silu(h)
                yield s
            } else {
                p: float32[4, 4] = matmul(x, w)
                q: float32[4, 4] = silu(p)
                yield q
            }
            return y
            """,
            PRODUCT + ", flag: input bool",
        )
    )
    after = outline(ir)
    (branches,) = [b.value for b in after["main"].bindings if b.var.name == "y"]
    assert [len(branches.then.bindings), len(branches.otherwise.bindings)] == [1, 1]
    assert after["main"].bindings[0].value.op.name == "matmul"
    expect_same_results(ir, after)


def test_equal_regions_share_a_function_and_others_get_their_own():
    ir = module(
        main(
            """
            a: float32[n, 4] = linear(x, w, None)
            b: float32[n, 4] = silu(a)
            c: float32[n, 4] = linear(b, w, None)
            d: float32[n, 4] = silu(c)
            e: float32[n, 4] = linear(d, w, None)
            f: float32[n, 4] = gelu(e)
            return f
            """,
            "x: input float32[n, 4], w: input float32[4, 4]",
            "float32[n, 4]",
            "[n]",
        )
    )
    after = outline(ir)
    assert list(after) == ["product", "product_1", "main"]
    assert [b.value.function for b in after["main"].bindings] == ["product"] * 2 + ["product_1"]
    expect_same_results(ir, after)


def test_a_dim_that_no_operand_of_a_region_defines_is_handed_to_it():
    pattern = Pattern("wide", (apply(ops.multiply, apply(ops.zeros), None, commutes=True),))
    check(
        lambda ir: outline(ir, [pattern]),
        """
        def main[n](x: input float32[n], s: input float32[1]) -> float32[n] {
            z: float32[n] = zeros(shape=(n,))
            y: float32[n] = multiply(z, s)
            r: float32[n] = add(x, y)
            return r
        }
        """,
        """
        fused def wide[n](arg_0: input float32[1], n: input int64(n)) -> float32[n] attrs(region="wide", operands=()) {
            zeros: float32[n] = zeros(shape=(n,))
            multiply: float32[n] = multiply(zeros, arg_0)
            return multiply
        }
        def main[n](x: input float32[n], s: input float32[1]) -> float32[n] {
            y: float32[n] = @wide(s, dim(n))
            r: float32[n] = add(x, y)
            return r
        }
        """,
    )
