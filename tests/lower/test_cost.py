# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes against formulas worked out by hand, and the table that shows them."""

import pytest

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.backends.lowering import lower
from nnfront.ir import parse
from nnfront.lower import Run
from nnfront.lower.cost import bytes_of, flops_of
from nnfront.lower.explain import explain

LAYER = "layer(kv_heads=2, head_size=8, dtype=float16, batch=n, max_seq=s)"


@pytest.mark.parametrize(
    ("params", "call", "result", "flops", "size"),
    [
        (
            "x: input float32[n, 4], w: input float32[6, 4]",
            "linear(x, w)",
            "float32[n, 6]",
            "48*n",
            "40*n + 96",
        ),
        (
            "x: input float16[n, m, 4], w: input float16[n, 4, 3]",
            "matmul(x, w)",
            "float16[n, m, 3]",
            "24*m*n",
            "14*m*n + 24*n",
        ),
        ("x: input float32[n, m], w: input float32[m]", "add(x, w)", "float32[n, m]", "m*n", "8*m*n + 4*m"),
        ("x: input float32[n, m]", "sum(x, axis=(1,))", "float32[n]", "m*n", "4*m*n + 4*n"),
        ("x: input float32[n, m]", "permute_dims(x, axes=(1, 0))", "float32[m, n]", "0", "0"),
        ("x: input float32[n, m]", "repeat(x, repeats=2, axis=0)", "float32[2*n, m]", "0", "12*m*n"),
        # Two rows of the table are read, not all of it; positions are 8 bytes.
        ("x: input float32[n, 4], i: input int64[2]", "take(x, i, axis=0)", "float32[2, 4]", "0", "80"),
        (
            f"q: input float16[n, m, 4, 8], k: input float16[n, m, 2, 8], c: state {LAYER}",
            "attention(q, k, k, c)",
            f"(float16[n, m, 4, 8], {LAYER})",
            "128*m*m*n",
            # q and the result, k twice as it is also v, and both buffers of the cache
            "192*m*n + 64*n*s",
        ),
        (
            # Two experts of five for each token: 2 * (12 * 4 + 4 * 6) operations for each.
            "x: input float32[n, 4], g: input float32[5, 12, 4], d: input float32[5, 4, 6], e: input int64[n, 2], w: input float32[n, 2]",
            "moe_mlp(x, g, d, e, w)",
            "float32[n, 4]",
            "288*n",
            "56*n + 1440",
        ),
        ("x: input float32[n, m]", 'astype(x, dtype="float16")', "float16[n, m]", "0", "6*m*n"),
    ],
)
def test_costs_are_those_of_the_formula(params, call, result, flops, size):
    text = f"def main[n, m, s]({params}) -> {result} {{ y: {result} = {call} return y }}"
    if "state" in params:
        text = text.replace("return y", f"z: ({result}, {LAYER}) = (y, c) return z").replace(
            f") -> {result}", f") -> ({result}, {LAYER})"
        )
    method = lower(parse(text)).methods["main"]
    (run,) = [i for i in method.body.instructions if isinstance(i, Run)]
    assert str(flops_of(run, method.slots)) == flops
    assert str(bytes_of(run, method.slots)) == size


TEXT = """
private def layer[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
    t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    y: float32[n, 4] = matmul(x, t)                    # at proj
    z: float32[n, 4] = if True { yield y } else { e: float32[n, 4] = exp(y) yield e }
    return z
}
def main[n](x: input float32[n, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[n, 4] {
    y: float32[n, 4] = @layer(x, a)                    # at layers.0
    z: float32[n, 4] = @layer(y, b)                    # at layers.1
    return z
}
"""


def test_explain_is_a_table_with_equal_lines_counted():
    expected = """\
method  op         kernel        bytes      flops  module                    why
main    linear     linear_plain  32*n + 64  32*n   layers.0.proj and 1 more  the weight as it is stored, no transpose; not linear_bfloat16: weight is float32; not linear_float32: the weight has fewer than 1048576 elements
main    else: exp  exp           32*n       4*n    layers.0 and 1 more       reference
"""
    assert explain(lower(parse(TEXT)), {}) == expected


def test_explain_fills_in_numbers_for_dims():
    lines = explain(lower(parse(TEXT)), {"n": 1000}).splitlines()
    assert "32,064" in lines[1]
    assert "32,000" in lines[1]
