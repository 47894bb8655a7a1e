# SPDX-License-Identifier: Apache-2.0
"""Equality ignores local names and provenance, and every other difference is found and named by its path."""

from __future__ import annotations

import pytest

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.ir import IRModule, first_difference, parse, parse_function

TEXT = """\
module(aliases={b: "a"}, depth=2)

private def g[n](x: input float32[n, 4]) -> float32[n, 4] {
    y: float32[n, 4] = relu(x)
    return y
}

private def h[n](x: input float32[n, 4]) -> float32[n, 4] {
    return x
}

def f[n, m: 1..64](
    x: input float32[n, 4],
    flag: input bool[],
    w: weight float32[m],
) -> {a: float32[n, 4], b: float32[n, 4]} attrs(note="old") {
    sum: float32[n, 4] = add(x, 0.5)
    soft: float32[n, 4] = softmax(sum, axis=0)
    shaped: float32[4*n] = reshape(soft, shape=(4*n,))
    called: float32[n, 4] = @g(x)
    chosen: float32[n, 4] = if flag {
        first: float32[n, 4] = relu(called)
        yield first
    } else {
        yield x
    }
    pair: (float32[n, 4], float32[n, 4]) = (chosen, sum)
    one: float32[n, 4] = pair[0]
    known: float32[n, 4] = match_shape(one, float32[n, 4])
    data: float32[2] = const(float32[2], [1.0, 2.0])
    clipped: float32[n, 4] = clip(x, None, 1.0)
    out: {a: float32[n, 4], b: float32[n, 4]} = {a: known, b: one}
    return out
}"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("x, 0.5", "x, 1.5", "f.bindings[0] (sum).args[1]: 0.5 != 1.5"),
        ("x, 0.5", "x, -0.5", "f.bindings[0] (sum).args[1]: 0.5 != -0.5"),
        ("x, 0.5", "x, x", "f.bindings[0] (sum).args[1]: 0.5 != x"),
        ("x, 0.5", "x, 0.5, 1", "f.bindings[0] (sum).args: 2 != 3"),
        ("add(", "subtract(", "f.bindings[0] (sum).op: add != subtract"),
        ("axis=0", "axis=1", "f.bindings[1] (soft).attrs['axis']: 0 != 1"),
        ("axis=0", "axis=False", "f.bindings[1] (soft).attrs['axis']: 0 != False"),
        ("axis=0", "axes=0", "f.bindings[1] (soft).attrs['axis']: 0 != nothing"),
        ("sum, axis=0", "sum", "f.bindings[1] (soft).attrs['axis']: 0 != nothing"),
        ("(4*n,)", "(n*m,)", "f.bindings[2] (shaped).attrs['shape']: (4*n,) != (m*n,)"),
        ("shaped: float32[4*n]", "shaped: float32[n*4 + 1]", "f.bindings[2] (shaped).type: float32[4*n] != float32[4*n + 1]"),
        ("@g(x)", "@h(x)", "f.bindings[3] (called).function: g != h"),
        ("@g(x)", "@g(sum)", "f.bindings[3] (called).args[0]: x != sum"),
        ("@g(x)", "relu(x)", "f.bindings[3] (called): FunctionCall != Call"),
        ("if flag", "if True", "f.bindings[4] (chosen).condition: flag != True"),
        ("relu(called)", "abs(called)", "f.bindings[4] (chosen).then.bindings[0] (first).op: relu != abs"),
        ("yield first", "yield called", "f.bindings[4] (chosen).then.result: first != called"),
        ("yield x", "yield sum", "f.bindings[4] (chosen).otherwise.result: x != sum"),
        ("(chosen, sum)", "(chosen, x)", "f.bindings[5] (pair).fields[1]: sum != x"),
        ("pair[0]", "pair[1]", "f.bindings[6] (one).index: 0 != 1"),
        ("match_shape(one, float32[n", "match_shape(one, float32[m", "f.bindings[7] (known).type: float32[n, 4] != float32[m, 4]"),
        ("match_shape(one, float32[n, 4])", "one", "f.bindings[7] (known): MatchShape != Var"),
        ("[1.0, 2.0]", "[1.0, 3.0]", "f.bindings[8] (data).data: byte 6: 0 != 64"),
        ("[1.0, 2.0]", "[1.0]", "f.bindings[8] (data).data: 8 bytes != 4 bytes"),
        ("const(float32[2]", "const(float32[3]", "f.bindings[8] (data).type: float32[2] != float32[3]"),
        ("clip(x, None", "clip(x, 0.0", "f.bindings[9] (clipped).args[1]: nothing != 0.0"),
        ("= {a: known, b: one}", "= {a: known, c: one}", "f.bindings[10] (out).names: ('a', 'b') != ('a', 'c')"),
        ("    return y", "    z: int64 = 1 return y", "g.bindings: 1 != 2"),
        ("    return y", "    return x", "g.result: y != x"),
        ("def f[", "private def f[", "f.kind: 'public' != 'private'"),
        ("x: input float32[n, 4],\n    flag", "x: state float32[n, 4],\n    flag", "f.params[0]: input 'x' != state 'x'"),
        ("w: weight", "v: weight", "f.params[2]: weight 'w' != weight 'v'"),
        ("w: weight float32[m]", "w: weight float16[m]", "f.params[2] (w).type: float32[m] != float16[m]"),
        ("    w: weight float32[m],\n", "", "f.params: 3 != 2"),
        ("1..64", "1..65", "f.dims: n, m: 1..64 != n, m: 1..65"),
        ("m: 1..64", "fresh m: 1..64", "f.dims: n, m: 1..64 != n, fresh m: 1..64"),
        ('note="old"', 'note="new"', 'f.attrs[\'note\']: "old" != "new"'),
        ("depth=2", "depth=3", ".attrs['depth']: 2 != 3"),
        ('b: "a"', 'c: "a"', ".attrs['aliases']: {b: \"a\"} != {c: \"a\"}"),
    ],
)  # fmt: skip
def test_difference_is_named_by_its_path(old: str, new: str, expected: str) -> None:
    assert TEXT.count(old) == 1
    a, b = parse(TEXT), parse(TEXT.replace(old, new))
    assert first_difference(a, b) == expected
    assert first_difference(b, a) is not None
    assert a != b


def test_names_of_local_variables_do_not_matter() -> None:
    other = TEXT
    for name in (
        "sum",
        "soft",
        "shaped",
        "called",
        "chosen",
        "first",
        "pair",
        "one",
        "known",
        "data",
        "clipped",
        "out",
    ):
        other = other.replace(f"    {name}:", f"    my_{name}:").replace(f"({name}", f"(my_{name}")
        other = other.replace(f", {name})", f", my_{name})").replace(f" {name}\n", f" my_{name}\n")
        other = other.replace(f"{name}[", f"my_{name}[") if name == "pair" else other
        other = other.replace(f": {name},", f": my_{name},").replace(f": {name}}}", f": my_{name}}}")
    assert other != TEXT
    assert parse(other) == parse(TEXT)


def test_provenance_does_not_matter() -> None:
    text = TEXT.replace("relu(x)", "relu(x)  # at model.act (a.py:3)")
    assert parse(text).text(provenance=True) != parse(TEXT).text(provenance=True)
    assert parse(text) == parse(TEXT)


def test_order_of_attributes_does_not_matter() -> None:
    a = parse_function('def f() -> int64(1) attrs(a=1, b="x") { return 1 }')
    b = parse_function('def f() -> int64(1) attrs(b="x", a=1) { return 1 }')
    assert a == b


def test_order_and_names_of_functions_matter() -> None:
    a = parse(TEXT)
    swapped = IRModule(reversed(a.functions), a.attrs)
    assert first_difference(a, swapped) == "functions: g, h, f != f, h, g"
    assert first_difference(a["g"], a["h"]) == "g.name: 'g' != 'h'"


def test_one_variable_read_twice_differs_from_two_variables() -> None:
    text = "def f() -> int64(1) {{ a: int64 = 1 b: int64 = 1 c: (int64, int64) = (a, {}) return 1 }}"
    a, b = parse_function(text.format("a")), parse_function(text.format("b"))
    assert first_difference(a, b) == "f.bindings[2] (c).fields[1]: a != b"


def test_other_classes_are_not_equal() -> None:
    module = parse(TEXT)
    assert module != TEXT
    assert module["f"] != TEXT
