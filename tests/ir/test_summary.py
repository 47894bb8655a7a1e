# SPDX-License-Identifier: Apache-2.0
"""The summary says what a module holds, and fits on two screens whatever that is."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from ir_modules import modules
from nnfront_models import llama

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.dims import Dim
from nnfront.ir import FunctionBuilder, IRModule, TensorType, parse


def fits(text: str) -> bool:
    """Whether a text fits on two screens."""
    lines = text.split("\n")
    return len(lines) <= 100 and max(map(len, lines)) <= 120


LAYER = "layer(kv_heads=2, head_size=16, dtype=bfloat16, batch=batch, max_seq=max_seq"
TEXT = f"""
private def block[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {{
    a: float32[n, 4] = matmul(x, w)
    b: float32[n, 4] = relu(a)
    return b
}}
def prefill[batch, seq: 1..64 % 16, vocab, max_seq](
    tokens: input int64[batch, seq],
    embed: weight float32[vocab, 4],
    layers.0.w: weight float32[4, 4],
    layers.1.w: weight float32[4, 4],
    layers.3.w: weight float32[4, 4],
    cache: state cache(3 * {LAYER}), {LAYER}, window=8)),
) -> (float32[batch, seq, 4], cache(3 * {LAYER}), {LAYER}, window=8))) {{
    x: float32[batch, seq, 4] = take(embed, tokens, axis=0)
    flat: float32[batch*seq, 4] = reshape(x, shape=(batch*seq, 4))
    y: float32[batch*seq, 4] = @block(flat, layers.0.w)
    z: float32[batch*seq, 4] = @block(y, layers.1.w)
    both: (float32[batch, seq, 4], cache(3 * {LAYER}), {LAYER}, window=8))) = (x, cache)
    return both
}}
def logits[batch, seq: 1..32](tokens: input int64[batch, seq]) -> int64[batch, seq] {{
    return tokens
}}
"""


def test_tables() -> None:
    assert (
        parse(TEXT).summary()
        == """\
methods
  prefill: 5 bindings
    tokens  input  int64[batch, seq]
    cache   state  cache of 4 layers (3 * full, window 8): 2 heads of 16 bfloat16[batch, max_seq]
    -> (float32[batch, seq, 4], cache of 4 layers (3 * full, window 8): 2 heads of 16 bfloat16[batch, max_seq])
    runs 2 matmul, 2 relu, 1 reshape, 1 take
  logits: 0 bindings
    tokens  input  int64[batch, seq]
    -> int64[batch, seq]

dims
  name     facts                bound by  used in
  batch    any                  inputs    prefill, logits
  seq      1..64 % 16 or 1..32  inputs    prefill, logits
  vocab    any                  weights   prefill
  max_seq  any                  cache     prefill

weights
  name               count  type               bytes             role
  embed              1      float32[vocab, 4]  symbolic          weight
  layers.{0..1,3}.w  3      float32[4, 4]      192 B             weight
  total              4                         192 B + symbolic  weight

functions
  name   kind     bindings  called by   runs
  block  private  2         prefill 2x  1 matmul, 1 relu"""
    )


def test_dim_of_a_match_shape_is_bound_by_it() -> None:
    module = parse("""
        def f[fresh n: 1..8](x: input float32[4]) -> float32[n] {
            y: float32[n] = match_shape(x, float32[n])
            return y
        }
    """)
    assert "  n     1..8   match_shape  f" in module.summary().split("\n")


def test_weights_of_one_pattern_but_two_types_have_two_rows() -> None:
    module = parse("""
        def f(a.0: weight int8[4], a.1: weight int8[4], a.2: weight int8[1024, 3], a.b.0.c: weight int8[2], a.b.7.c: weight int8[2])
            -> int8[4] { return a.0 }
    """)
    rows = [line.split() for line in module.summary().split("\n") if line.strip().startswith("a.")]
    assert rows == [
        ["a.{0..1}", "2", "int8[4]", "8", "B", "weight"],
        ["a.2", "1", "int8[1024,", "3]", "3.00", "KiB", "weight"],
        ["a.b.{0,7}.c", "2", "int8[2]", "4", "B", "weight"],
    ]


def test_weights_before_and_after_a_transform_are_totalled_apart() -> None:
    module = parse("""
        transform def t(a: weight float32[4]) -> {a: float32[4]} { r: {a: float32[4]} = {a: a} return r }
        def f(a: transformed float32[2]) -> float32[2] { return a }
    """)
    totals = [line.split() for line in module.summary().split("\n") if "total" in line]
    assert totals == [["total", "1", "16", "B", "weight"], ["total", "1", "8", "B", "transformed"]]


def test_eighty_layers_of_llama_fit() -> None:
    config = dataclasses.replace(llama.TINY, num_hidden_layers=80)
    text = llama.build(config).export(llama.export_spec(config)).summary()
    assert fits(text)
    assert "model.layers.{0..79}.mlp.up_proj.weight" in text
    assert "80x" in text


def test_many_of_everything_fit() -> None:
    functions = []
    for i in range(30):
        builder = FunctionBuilder(f"method_{i}" * 5)
        for j in range(30):
            builder.param(
                f"input_{i}_{j}" * 8, TensorType((Dim(f"dim_{i}_{j}"), Dim("n")), "float32"), "input"
            )
            builder.param(f"weight_{i}_{j}" * 8, TensorType((j,), "float32"), "weight")
        functions.append(builder.finish(builder.params[0], "private" if i % 2 else "public"))
    text = IRModule(functions).summary()
    assert fits(text)
    assert len(text.split("\n")) > 80
    assert "... and 10 more: method_10" in text
    assert "... and 428 more" in text


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(modules())
def test_any_module_has_a_summary_that_fits(module: IRModule) -> None:
    assert fits(module.summary())


@pytest.mark.parametrize("count", [0, 1])
def test_empty_sections_are_left_out(count: int) -> None:
    module = parse("def f() -> int64(1) { return 1 }" * count)
    assert module.summary() == "methods\n  f: 0 bindings\n    -> int64(1)" * count


def test_what_weights_say_only_as_a_product_is_bound_by_inputs() -> None:
    ir = parse(
        """
        def one[m, n, d](x: input float32[m], w: weight float32[m*n], v: weight float32[d]) -> float32[m] { return x }
        def two[d, e](x: input float32[4], q: weight float32[d*e]) -> float32[4] { return x }
        """
    )
    rows = [line.split() for line in ir.summary().split("\n") if line.startswith("  ")]
    binders = {row[0]: row[2] for row in rows if row[1] == "any"}
    assert binders == {"m": "inputs", "n": "inputs", "d": "weights", "e": "weights"}
