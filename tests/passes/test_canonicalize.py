# SPDX-License-Identifier: Apache-2.0
"""Each rule of canonical form: where it applies and where it does not."""

from __future__ import annotations

import pytest
from pass_checks import expect, expect_same_results, module
from rewrite_checks import check, main

from nnfront.ir import first_difference
from nnfront.passes import canonicalize, eliminate_dead_code

# name -> a variable y that is x all along
IDENTITIES = {
    "an alias": "y: float32[4, 4] = x",
    "a chain of aliases": "a: float32[4, 4] = x y: float32[4, 4] = a",
    "a cast to its own dtype": 'y: float32[4, 4] = astype(x, dtype="float32")',
    "a cast to more and back": 'a: float64[4, 4] = astype(x, dtype="float64") y: float32[4, 4] = astype(a, dtype="float32")',
    "a reshape to its own shape": "y: float32[4, 4] = reshape(x, shape=(4, 4))",
    "a reshape and back": "a: float32[16] = reshape(x, shape=(16,)) y: float32[4, 4] = reshape(a, shape=(4, 4))",
    "a broadcast to its own shape": "y: float32[4, 4] = broadcast_to(x, shape=(4, 4))",
    "a transpose and back": "a: float32[4, 4] = permute_dims(x, axes=(1, 0)) y: float32[4, 4] = permute_dims(a, axes=(1, 0))",
    "a permutation that permutes nothing": "y: float32[4, 4] = permute_dims(x, axes=(0, 1))",
    "all of it": "y: float32[4, 4] = getitem(x, index=())",
    "a concatenation of one": "y: float32[4, 4] = concat(x)",
    "half of what halves were joined to": "a: float32[4, 4] = exp(x) b: float32[4, 8] = concat(a, x, dim=1) c: (float32[4, 4], float32[4, 4]) = split(b, indices_or_sections=2, axis=1) y: float32[4, 4] = c[1]",
    "a field of a tuple": "a: (float32[4, 4], float64) = (x, 1.0) y: float32[4, 4] = a[0]",
    "a shape that matches": "y: float32[4, 4] = match_shape(x, float32[4, 4])",
    "a branch always taken": "y: float32[4, 4] = if True { yield x } else { a: float32[4, 4] = exp(x) yield a }",
    "a branch never taken": "y: float32[4, 4] = if const(bool[], [False]) { a: float32[4, 4] = exp(x) yield a } else { yield x }",
}
KEPT = {
    "a cast to another dtype": 'y: float16[4, 4] = astype(x, dtype="float16")',
    "a transpose": "y: float32[4, 4] = permute_dims(x, axes=(1, 0))",
    "a reversed slice of equal size": "y: float32[4, 4] = flip(x, axis=(0,))",
    "a field of what a function returns": "a: (float32[2, 4], float32[2, 4]) = split(x, indices_or_sections=2) y: float32[2, 4] = a[0]",
    "half of what others were joined to": "s: (float32[2, 4], float32[2, 4]) = split(x, indices_or_sections=2) a: float32[2, 4] = s[0] b: float32[8, 4] = concat(a, x, a) c: (float32[4, 4], float32[4, 4]) = split(b, indices_or_sections=2) y: float32[4, 4] = c[1]",
    "half of what was joined along another axis": "a: float32[8, 4] = concat(x, x) b: (float32[8, 2], float32[8, 2]) = split(a, indices_or_sections=2, axis=1) y: float32[8, 2] = b[1]",
    "a part at a position": "a: float32[8, 4] = concat(x, x) b: (float32[4, 4], float32[4, 4]) = split(a, indices_or_sections=(4,)) y: float32[4, 4] = b[1]",
    "a branch that depends on the input": "c: bool[4, 4] = greater(x, 0.0) d: bool[] = all(c) y: float32[4, 4] = if d { yield x } else { a: float32[4, 4] = exp(x) yield a }",
}


@pytest.mark.parametrize("text", IDENTITIES.values(), ids=IDENTITIES)
def test_what_is_the_same_is_one_variable(text):
    before = module(main(f"{text} z: float32[4, 4] = tanh(y) return z"))
    after = canonicalize(before)
    expect_same_results(before, after)
    expect(eliminate_dead_code(after), main("z: float32[4, 4] = tanh(x) return z"))
    assert first_difference(canonicalize(after), after) is None


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_differs_stays(text):
    type = text.rsplit("y: ")[1].split(" =")[0]
    check(canonicalize, main(f"{text} return y", result=type))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("float32", "float16"),
        ("float32", "int64"),
        ("bfloat16", "float16"),
        ("int64", "float32"),
        ("int8", "float16"),
    ],
)
def test_a_cast_that_may_lose_something_stays(first, second):
    body = f'a: {second}[4, 4] = astype(x, dtype="{second}") y: {first}[4, 4] = astype(a, dtype="{first}") return y'
    check(canonicalize, main(body, f"x: input {first}[4, 4]", f"{first}[4, 4]"))


def test_three_permutations_become_one():
    check(
        canonicalize,
        main(
            """
            a: float32[4, 2, 3] = permute_dims(x, axes=(2, 0, 1))
            b: float32[2, 3, 4] = permute_dims(a, axes=(1, 2, 0))
            c: float32[3, 2, 4] = permute_dims(b, axes=(1, 0, 2))
            d: float32[3, 4, 2] = permute_dims(c, axes=(0, 2, 1))
            return d
            """,
            "x: input float32[2, 3, 4]",
            "float32[3, 4, 2]",
        ),
        main(
            """
            a: float32[4, 2, 3] = permute_dims(x, axes=(2, 0, 1))
            c: float32[3, 2, 4] = permute_dims(x, axes=(1, 0, 2))
            d: float32[3, 4, 2] = permute_dims(x, axes=(1, 2, 0))
            return d
            """,
            "x: input float32[2, 3, 4]",
            "float32[3, 4, 2]",
        ),
    )


def test_reshapes_in_a_row_become_one_with_symbolic_sizes():
    check(
        canonicalize,
        main(
            """
            a: float32[n*4] = reshape(x, shape=(n*4,))
            b: float32[4, n] = reshape(a, shape=(4, n))
            return b
            """,
            "x: input float32[n, 4]",
            "float32[4, n]",
            "[n]",
        ),
        main(
            """
            a: float32[n*4] = reshape(x, shape=(n*4,))
            b: float32[4, n] = reshape(x, shape=(4, n))
            return b
            """,
            "x: input float32[n, 4]",
            "float32[4, n]",
            "[n]",
        ),
    )


def test_a_branch_that_is_always_taken_is_put_in_place():
    check(
        canonicalize,
        main(
            """
            y: float32[4, 4] = if True {
                a: float32[4, 4] = exp(x)
                b: float32[4, 4] = a
                yield b
            } else {
                yield x
            }
            z: float32[4, 4] = tanh(y)
            return z
            """
        ),
        main("a: float32[4, 4] = exp(x) z: float32[4, 4] = tanh(a) return z"),
    )


def test_values_outside_a_branch_are_known_inside():
    check(
        canonicalize,
        main(
            """
            t: float32[4, 4] = permute_dims(x, axes=(1, 0))
            y: float32[4, 4] = if flag {
                u: float32[4, 4] = permute_dims(t, axes=(1, 0))
                a: float32[4, 4] = exp(u)
                yield a
            } else {
                yield t
            }
            return y
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
        main(
            """
            t: float32[4, 4] = permute_dims(x, axes=(1, 0))
            y: float32[4, 4] = if flag {
                a: float32[4, 4] = exp(x)
                yield a
            } else {
                yield t
            }
            return y
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
    )
