# SPDX-License-Identifier: Apache-2.0
"""The text form: what each construct looks like, and that it is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.dims import Dim, ceildiv
from nnfront.ir import (
    OPS,
    Binding,
    Buffer,
    Call,
    FunctionBuilder,
    FunctionType,
    IRModule,
    MatchShape,
    ObjectType,
    Provenance,
    Scalar,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    kv_layer,
    parse,
    type_text,
)

N, M = Dim("n"), Dim("m", max=64)
F2 = TensorType((2,), "float32")
FULL = kv_layer(2, 16, "float16", N, M)
NEAR = kv_layer(2, 16, "float16", N, M, 8)
LAYER = "layer(batch=n, max_seq=m, per_token={keys: float16[2, 16], values: float16[2, 16]}"

EXAMPLE = """\
module(aliases={lm_head.weight: "model.embed_tokens.weight"})

private def mlp[n](
    x: input float32[n, 4],
    up.weight: weight float32[4, 4],
) -> float32[n, 4] {
    matmul: float32[n, 4] = matmul(x, up.weight)
    return matmul
}

def prefill[batch, seq: 1..8192 % 16, max_seq: 0..64](
    tokens: input int64[batch, seq],
    flag: input bool,
    count: input int64(max_seq),
    model.embed_tokens.weight: weight float32[512, 4],
    model.layers.0.weight: weight float32[4, 4],
) -> {logits: float32[batch*seq, 4], length: int64(seq)} attrs(derived=("a",), shape=(batch, 2*seq + 1)) {
    take: float32[batch, seq, 4] = take(model.embed_tokens.weight, tokens, axis=0)
    flat: float32[batch*seq, 4] = reshape(take, shape=(batch*seq, 4))
    y: float32[batch*seq, 4] = if flag {
        mlp: float32[batch*seq, 4] = @mlp(flat, model.layers.0.weight)
        yield mlp
    } else {
        half: float32[batch*seq, 4] = multiply(flat, 0.5)
        yield half
    }
    pair: (float32[batch*seq, 4], float32[2]) = (y, const(float32[2], [0.1, -inf]))
    first: float32[batch*seq, 4] = pair[0]
    known: float32[batch*seq, 4] = match_shape(first, float32[batch*seq, 4])
    length: int64(seq) = dim(seq)
    out: {logits: float32[batch*seq, 4], length: int64(seq)} = {logits: known, length: length}
    return out
}"""


def test_example_of_everything_is_its_own_text() -> None:
    assert str(parse(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (TensorType((), "bool"), "bool[]"),
        (TensorType((N, 2 * N + 1, ceildiv(N, 16)), "float16"), "float16[n, 2*n + 1, ceildiv(n, 16)]"),
        (ShapeType((N, 2)), "shape[n, 2]"),
        (ScalarType("int64"), "int64"),
        (ScalarType("int64", N), "int64(n)"),
        (ScalarType("int64", -3), "int64(-3)"),
        (TupleType(()), "()"),
        (TupleType((F2,)), "(float32[2],)"),
        (TupleType((F2, F2)), "(float32[2], float32[2])"),
        (TupleType((), ()), "{}"),
        (TupleType((F2, F2), ("a", "the b")), '{a: float32[2], "the b": float32[2]}'),
        (ObjectType("Paged"), 'object("Paged")'),
        (FunctionType((F2,), TupleType(())), "fn(float32[2]) -> ()"),
        (FULL, f"{LAYER})"),
        (NEAR, f"{LAYER}, window=8)"),
        (
            StateLayerType((Buffer("latent", (576,), "int8"),), (Buffer("the ssm", (), "float32"),), N, M),
            'layer(batch=n, max_seq=m, per_token={latent: int8[576]}, per_sequence={"the ssm": float32[]})',
        ),
        (StateType(()), "cache()"),
        (StateType((FULL,)), f"cache({LAYER}))"),
        (StateType((FULL,) * 80), f"cache(80 * {LAYER}))"),
        (StateType((FULL, NEAR) * 3 + (FULL,)), f"cache(3 * ({LAYER}), {LAYER}, window=8)), {LAYER}))"),
        (
            StateType(((FULL,) * 5 + (NEAR,)) * 2),
            f"cache(2 * (5 * {LAYER}), {LAYER}, window=8)))",
        ),
    ],
    ids=str,
)
def test_type(type: Type, text: str) -> None:
    assert type_text(type) == text


def body(builder: FunctionBuilder) -> list[str]:
    """The lines of the bindings."""
    return [line.strip() for line in str(builder.finish(Scalar(0))).split("\n")[1:-2]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "bool = True"),
        (1, "int64(1) = 1"),
        (1.0, "float64 = 1.0"),
        (-0.0, "float64 = -0.0"),
        (1e-5, "float64 = 1e-05"),
        (0.1 + 0.2, "float64 = 0.30000000000000004"),
        (float("nan"), "float64 = nan"),
        (float("-inf"), "float64 = -inf"),
        (N, "int64(n) = dim(n)"),
        (N + 1, "int64(n + 1) = dim(n + 1)"),
    ],
)
def test_literal(value: object, text: str) -> None:
    builder = FunctionBuilder("f")
    builder.emit(Scalar(value), "x")  # type: ignore[arg-type]
    assert body(builder) == [f"x: {text}"]


@pytest.mark.parametrize("name", ["cache", "shape", "dim", "def", "model.layers.0.w", "_x", "state", "größe"])
def test_word_is_a_name_as_it_is(name: str) -> None:
    builder = FunctionBuilder("f")
    builder.emit(Scalar(1), name)
    assert body(builder) == [f"{name}: int64(1) = 1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("return", '"return"'),
        ("a b", '"a b"'),
        ("0.w", '"0.w"'),
        ("", '""'),
        ('say "hi"\n', '"say \\"hi\\"\\n"'),
        ("None", '"None"'),
        ("a..b", '"a..b"'),
    ],
)
def test_other_names_are_quoted(name: str, text: str) -> None:
    builder = FunctionBuilder("f")
    builder.append(Binding(Var(name, ScalarType("int64", 1)), Scalar(1)))
    assert body(builder) == [f"{text}: int64(1) = 1"]


def test_absent_operands_are_left_out_at_the_end_only() -> None:
    builder = FunctionBuilder("f")
    x = builder.param("x", F2, "input")
    builder.emit(Call(OPS["clip"], (x, None, None)), "a", type=F2)
    builder.emit(Call(OPS["clip"], (x, None, Scalar(1.0))), "b", type=F2)
    lines = str(builder.finish(x)).split("\n")
    assert lines[3:5] == ["    a: float32[2] = clip(x)", "    b: float32[2] = clip(x, None, 1.0)"]


def test_fresh_dims_of_one_name_print_apart() -> None:
    a, b, named = Dim.fresh("n", max=4), Dim.fresh("n"), Dim("n_1")
    builder = FunctionBuilder("f")
    x = builder.param("x", TensorType((named, 4), "float32"), "input")
    builder.emit(MatchShape(x, TensorType((a, b * named), "float32")))
    lines = str(builder.finish(x)).split("\n")
    assert lines[0] == "def f[n_1, fresh n: 0..4, fresh n_2]("
    assert lines[3] == "    value: float32[n, n_1*n_2] = match_shape(x, float32[n, n_1*n_2])"


def test_names_of_fresh_dims_do_not_depend_on_how_many_there_were_before() -> None:
    def text() -> str:
        builder = FunctionBuilder("f")
        x = builder.param("x", TensorType((Dim.fresh("n"), Dim.fresh("n")), "float32"), "input")
        return str(builder.finish(x))

    assert text() == text()


def test_long_tuple_takes_a_line_for_each_field() -> None:
    first, second = "first" * 12, "second" * 12
    builder = FunctionBuilder("f")
    x = builder.param("x", F2, "input")
    builder.emit(Tuple((x, x), (first, second)), "t")
    assert str(builder.finish(x)).split("\n")[3:-2] == [
        "    t: {",
        f"        {first}: float32[2],",
        f"        {second}: float32[2],",
        "    } = {",
        f"        {first}: x,",
        f"        {second}: x,",
        "    }",
    ]


def test_provenance_is_a_comment_behind_the_binding() -> None:
    builder = FunctionBuilder("f")
    builder.emit(Scalar(0), "w")
    builder.emit(Scalar(1), "x", Provenance("model.layers.0.mlp", "llama.py", 41))
    builder.emit(Scalar(2), "y", Provenance("", "llama.py", 42))
    function = builder.finish(Scalar(0))
    assert function.text(provenance=True).split("\n")[1:4] == [
        "    w: int64(0) = 0",
        "    x: int64(1) = 1  # at model.layers.0.mlp (llama.py:41)",
        "    y: int64(2) = 2  # at llama.py:42",
    ]
    assert "#" not in function.text()


def test_empty_module_has_no_text() -> None:
    assert str(IRModule()) == ""


def test_text_is_the_same_for_every_hash_seed() -> None:
    # Without ops, so that the processes need not import torch.
    text = """
        module(aliases={b: "a", c: "a"}, z=1, y=2)
        def f[b, a: 1.., c, fresh d](x: input float32[a*b + c, min(a, b, c), d], y: input int64(a)) -> {p: int64(a), q: int64} attrs(k=(a + b, c)) {
            n: int64(a + b*c) = dim(c*b + a)
            t: {p: int64(a), q: int64} = {p: y, q: n}  # at model.end (a.py:1)
            return t
        }
    """
    script = "import sys; from nnfront.ir import parse; m = parse(sys.stdin.read()); print(m.text(provenance=True), m.summary())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            input=text,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1
    assert "def f[a: 1.., b, c, fresh d](" in texts.pop()
