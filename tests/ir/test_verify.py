# SPDX-License-Identifier: Apache-2.0
"""The verifier as a whole: a sound module, messages, speed."""

from __future__ import annotations

import pytest
from verify_checks import F2, HEADS, LAYER

from nnfront.errors import VerifyError
from nnfront.ir import (
    OPS,
    Call,
    FunctionBuilder,
    IRModule,
    Provenance,
    TensorType,
    parse,
    verify,
    violations,
)

SOUND = f"""
private def block[batch, seq, max_seq](
    q: input {HEADS},
    cache: state {LAYER},
    w: weight float32[8, 8],
) -> ({HEADS}, {LAYER}) {{
    flat: float32[batch, seq, 8] = reshape(q, shape=(batch, seq, 8))
    mixed: float32[batch, seq, 8] = matmul(flat, w)
    heads: {HEADS} = reshape(mixed, shape=(batch, seq, 2, 4))
    both: ({HEADS}, {LAYER}) = attention(heads, q, q, cache)
    return both
}}

def prefill[batch, seq: 1..64, max_seq, fresh rest](
    q: input {HEADS},
    flag: input bool[],
    other: input float32[seq, 4],
    cache: state cache(2 * {LAYER}),
    layers.0.w: weight float32[8, 8],
    layers.1.w: weight float32[8, 8],
) -> ({HEADS}, cache(2 * {LAYER})) {{
    layers: ({LAYER}, {LAYER}) = cache_split(cache)
    first: {LAYER} = layers[0]
    second: {LAYER} = layers[1]
    y: ({HEADS}, {LAYER}) = @block(q, first, layers.0.w)
    x: {HEADS} = y[0]
    first_1: {LAYER} = y[1]
    known: float32[rest, 4] = match_shape(other, float32[rest, 4])
    twice: float32[2*rest, 4] = concat(known, known)
    z: ({HEADS}, {LAYER}) = if flag {{
        written: ({HEADS}, {LAYER}) = @block(x, second, layers.1.w)
        yield written
    }} else {{
        half: {HEADS} = multiply(x, 0.5)
        pair: ({HEADS}, {LAYER}) = (half, second)
        yield pair
    }}
    out: {HEADS} = z[0]
    second_1: {LAYER} = z[1]
    joined: cache(2 * {LAYER}) = cache_join(first_1, second_1)
    results: ({HEADS}, cache(2 * {LAYER})) = (out, joined)
    return results
}}
"""


def test_a_module_with_everything_keeps_all_rules() -> None:
    assert violations(parse(SOUND)) == []
    verify(parse(SOUND))


def test_message_names_function_binding_and_provenance() -> None:
    builder = FunctionBuilder("prefill")
    x = builder.param("x", F2, "input")
    place = Provenance("model.layers.0.mlp", "llama.py", 41)
    y = builder.emit(Call(OPS["relu"], (x,)), "y", place, TensorType((3,), "float32"))
    with pytest.raises(VerifyError) as raised:
        verify(IRModule([builder.finish(y)]))
    assert str(raised.value).split("\n") == [
        "V18: 'y' has another type than its value",
        "  declared float32[3]",
        "  inferred float32[2]",
        "  at 'y' in prefill, from model.layers.0.mlp (llama.py:41)",
    ]


def test_all_functions_are_looked_at() -> None:
    module = parse("""
        def f(x: input float32[2]) -> float32[2] { y: float32[3] = relu(x) z: float32[3] = relu(x) return x }
        def g(x: input float32[2]) -> float32[2] { y: float32[3] = relu(x) return x }
    """)
    assert [error.where for error in violations(module)] == ["'y' in f", "'z' in f", "'y' in g"]
