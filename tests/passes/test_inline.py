# SPDX-License-Identifier: Apache-2.0
"""Inlining: names, dims, places, nesting, and which functions go."""

from __future__ import annotations

import pytest
from pass_checks import expect_same_results, module
from rewrite_checks import check

from nnfront.errors import PassError
from nnfront.passes import inline

NESTED = """
private def inner(x: input float32[4]) -> float32[4] {
    y: float32[4] = exp(x)  # at act (m.py:3)
    return y
}
private def outer(x: input float32[4]) -> float32[4] {
    a: float32[4] = @inner(x)  # at mlp (m.py:7)
    y: float32[4] = @inner(a)  # at mlp (m.py:8)
    return y
}
def main(x: input float32[4]) -> float32[4] {
    y: float32[4] = @outer(x)  # at layers.3 (m.py:20)
    z: float32[4] = @inner(y)
    return z
}
"""


def test_nested_calls_are_inlined_from_the_innermost():
    check(
        inline,
        NESTED,
        """
        def main(x: input float32[4]) -> float32[4] {
            a: float32[4] = exp(x)
            y: float32[4] = exp(a)
            z: float32[4] = exp(y)
            return z
        }
        """,
    )


def test_the_place_is_the_caller_s_then_the_callee_s():
    after = inline(module(NESTED))
    assert [str(b.provenance) for b in after["main"].bindings] == [
        "layers.3.mlp.act (m.py:3)",
        "layers.3.mlp.act (m.py:3)",
        "act (m.py:3)",
    ]


def test_only_the_named_functions_are_inlined_and_others_that_call_them_too():
    ir = module(NESTED)
    after = inline(ir, ["inner"])
    assert list(after) == ["outer", "main"]
    expect_same_results(ir, after)


@pytest.mark.parametrize("name", ["main", "nobody"])
def test_only_private_and_fused_functions_can_be_inlined(name):
    with pytest.raises(PassError) as caught:
        inline(module(NESTED), [name])
    assert str(caught.value) == (
        f"'{name}' cannot be inlined: it is no private or fused function\n  those are inner, outer"
    )


def test_dims_become_those_of_each_call():
    check(
        inline,
        """
        private def flat[n, k](x: input float32[n, k]) -> float32[n*k] {
            y: float32[n*k] = reshape(x, shape=(n*k,))
            return y
        }
        def main[n, m](a: input float32[m, n], b: input float32[2, m]) -> (float32[m*n], float32[2*m]) {
            p: float32[m*n] = @flat(a)
            q: float32[2*m] = @flat(b)
            r: (float32[m*n], float32[2*m]) = (p, q)
            return r
        }
        """,
        """
        def main[n, m](a: input float32[m, n], b: input float32[2, m]) -> (float32[m*n], float32[2*m]) {
            p: float32[m*n] = reshape(a, shape=(m*n,))
            q: float32[2*m] = reshape(b, shape=(2*m,))
            r: (float32[m*n], float32[2*m]) = (p, q)
            return r
        }
        """,
    )


def test_attributes_are_canonical_for_the_sizes_of_the_call():
    check(
        inline,
        """
        private def firsts[n](x: input float32[n]) -> float32[min(n, 4)] {
            y: float32[min(n, 4)] = getitem(x, index=((0, min(n, 4), 1),))
            return y
        }
        def main(x: input float32[4], y: input float32[8]) -> (float32[4], float32[4]) {
            p: float32[4] = @firsts(x)
            q: float32[4] = @firsts(y)
            r: (float32[4], float32[4]) = (p, q)
            return r
        }
        """,
        """
        def main(x: input float32[4], y: input float32[8]) -> (float32[4], float32[4]) {
            p: float32[4] = getitem(x, index=())
            q: float32[4] = getitem(y, index=((0, 4, 1),))
            r: (float32[4], float32[4]) = (p, q)
            return r
        }
        """,
    )


def test_dims_that_a_body_defines_do_not_meet():
    ir = module(
        """
        private def checked[k](x: input float32[4]) -> float32[] {
            y: float32[k] = match_shape(x, float32[k])
            s: float32[] = sum(y)
            return s
        }
        def main[k](x: input float32[4], z: input float32[k]) -> float32[k] {
            a: float32[] = @checked(x)
            b: float32[] = @checked(x)
            c: float32[] = add(a, b)
            d: float32[k] = add(z, c)
            return d
        }
        """
    )
    after = inline(ir)
    expect_same_results(ir, after)
    assert [str(b.var.type.shape) for b in after["main"].bindings] == [
        "(Dim('k_1'),)",
        "()",
        "(Dim('k_2'),)",
        "()",
        "()",
        "(Dim('k'),)",
    ]


def test_a_body_that_returns_its_parameter_or_a_constant_leaves_nothing():
    check(
        inline,
        """
        private def same(x: input float32[4]) -> float32[4] { return x }
        private def one() -> float32[] { return const(float32[], [1.0]) }
        def main(x: input float32[4]) -> float32[4] {
            a: float32[4] = @same(x)
            b: float32[] = @one()
            y: float32[4] = add(a, b)
            return y
        }
        """,
        """
        def main(x: input float32[4]) -> float32[4] {
            y: float32[4] = add(x, const(float32[], [1.0]))
            return y
        }
        """,
    )


def test_fused_functions_are_inlined_and_external_ones_are_not():
    ir = module(
        """
        private def inner(x: input float32[4]) -> float32[4] { y: float32[4] = exp(x) return y }
        fused def kernel(x: input float32[4]) -> float32[4] { y: float32[4] = @inner(x) return y }
        external def plugin(x: input float32[4]) -> float32[4] { y: float32[4] = @inner(x) return y }
        def main(x: input float32[4]) -> float32[4] {
            a: float32[4] = @kernel(x)
            y: float32[4] = @plugin(a)
            return y
        }
        """
    )
    after = inline(ir)
    assert list(after) == ["inner", "plugin", "main"]
    assert after["plugin"] is ir["plugin"]
    expect_same_results(ir, after)


def test_calls_in_branches_are_inlined_in_place():
    check(
        inline,
        """
        private def twice(x: input float32[4]) -> float32[4] {
            a: float32[4] = exp(x)
            y: float32[4] = exp(a)
            return y
        }
        def main(x: input float32[4], flag: input bool) -> float32[4] {
            y: float32[4] = if flag {
                p: float32[4] = @twice(x)
                yield p
            } else {
                a: float32[4] = tanh(x)
                yield a
            }
            return y
        }
        """,
        """
        def main(x: input float32[4], flag: input bool) -> float32[4] {
            y: float32[4] = if flag {
                a_1: float32[4] = exp(x)
                p: float32[4] = exp(a_1)
                yield p
            } else {
                a: float32[4] = tanh(x)
                yield a
            }
            return y
        }
        """,
    )
