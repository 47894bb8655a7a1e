# SPDX-License-Identifier: Apache-2.0
"""Text from outside costs what its length says: bombs are refused, and what a model may be is not."""

from __future__ import annotations

import base64
import contextlib
import re
from pathlib import Path

import pytest
from hostile import limits

import nnfront as nn
import nnfront.ir.tokens
from nnfront import op
from nnfront.errors import NnfrontError, ParseError, VerifyError
from nnfront.ir import admit, parse, release
from nnfront.ir.budget import MAX_BINDINGS, MAX_DEPTH

TYPE = "float32[n, 4]"


def function(
    body: str, name: str = "f", kind: str = "", params: str = f"x: input {TYPE}", dims: str = "n"
) -> str:
    return f"{kind}def {name}[{dims}]({params}) -> {TYPE} {{\n{body}\n}}\n"


def tower(height: int, calls: int) -> str:
    """Functions each of which calls the next several times."""
    parts = []
    for i in range(height):
        lines = [f"  v{c + 1}: {TYPE} = @g{i + 1}({'x' if c == 0 else f'v{c}'})" for c in range(calls)]
        parts.append(function("\n".join([*lines, f"  return v{calls}"]), f"g{i}", "private "))
    parts.append(function(f"  v: {TYPE} = relu(x)\n  return v", f"g{height}", "private "))
    return "".join(parts) + function(f"  v: {TYPE} = @g0(x)\n  return v")


def branches(depth: int) -> str:
    text = "yield x"
    for i in range(depth):
        text = f"v{i}: {TYPE} = if b {{\n{text}\n}} else {{\nyield x\n}}\n{'yield' if i < depth - 1 else 'return'} v{i}"
    return function(text, params=f"x: input {TYPE}, b: input bool[]")


def test_a_tower_of_calls_is_refused_before_it_is_built() -> None:
    with limits(), pytest.raises(VerifyError) as error:
        admit(tower(60, 2))
    assert str(error.value) == (
        "g44: it has 196606 bindings, with those of the functions that it calls; 100000 are the most"
    )
    assert MAX_BINDINGS == 100_000


def test_what_a_function_stands_for_is_counted_with_every_call() -> None:
    assert len(admit(tower(3, 10))) == 5


@pytest.mark.parametrize("text", [tower(MAX_DEPTH, 1), branches(MAX_DEPTH)], ids=["calls", "branches"])
def test_deep_calls_and_branches_are_refused(text: str) -> None:
    with pytest.raises(VerifyError, match=r"calls and branches are 6[56] levels deep; 64 are the most"):
        admit(text)


@pytest.mark.parametrize("text", [tower(60, 1), branches(60)], ids=["calls", "branches"])
def test_what_is_admitted_is_shallow_enough_to_be_lowered(text: str) -> None:
    nn.compile(admit(text))


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ("aliases=3", "the attribute 'aliases' of a module maps names to names"),
        ("aliases={a: 3}", "the attribute 'aliases' of a module maps names to names"),
        ('unread="w"', "the attribute 'unread' of a module is a tuple of names"),
    ],
)
def test_attributes_of_a_module_are_of_their_kind(attrs: str, expected: str) -> None:
    with pytest.raises(VerifyError) as error:
        admit(f"module({attrs})\n\n" + function("  return x"))
    assert str(error.value) == expected


@pytest.mark.parametrize("value", ["3", '"f"', '"nothing"', "{a: 1}"])
def test_a_transform_that_is_named_is_there(value: str) -> None:
    text = function("  return x").replace(" {\n", f" attrs(transform={value}) {{\n", 1)
    with pytest.raises(VerifyError) as error:
        admit(text)
    assert str(error.value) == "f: the attribute 'transform' names a transform of the module"


def test_a_parameter_that_is_transformed_is_made_by_a_transform() -> None:
    text = function("  return x", params=f"x: input {TYPE}, w: transformed float32[4]")
    with pytest.raises(VerifyError) as error:
        nn.compile(parse(text))
    assert str(error.value) == "f: no transform makes the parameter 'w'"
    named = (
        "transform def t(v: weight float32[4]) -> {v: float32[4]} { y: {v: float32[4]} = {v: v} return y }\n"
    )
    text = named + text.replace(" {\n", ' attrs(transform="t") {\n', 1)
    with pytest.raises(VerifyError, match=r"^f: no transform makes the parameter 'w'$"):
        nn.compile(parse(text))
    nn.compile(parse(text.replace("w: transformed", "v: transformed")))


BOMBS = {
    "a product of sums": f"z: input float32[{'*'.join(['(n+m+k+1)'] * 150)}]",
    "a long minimum": f"z: input float32[min({', '.join(f'n+{i}' for i in range(300))})]",
    "a long product": f"z: input float32[{'*'.join(['n'] * 900)}]",
    "nested brackets": f"z: input {'(' * 5000}{')' * 5000}",
    "brackets without end": f"z: input {'(' * 100_000}",
    "a large constant": "z: input float32[99999999999999999999999999999999]",
    "a number of many digits": f"z: input float32[{'9' * 5000}]",
    "many axes": f"z: input float32[{', '.join(['n'] * 5000)}]",
    "a cache of many layers": "z: state cache(999999999 * layer(kv_heads=1, head_size=4, dtype=float32, batch=n, max_seq=m))",
    "nested layers": f"z: state cache({'9999 * (' * 90}{')' * 90})",
}


@pytest.mark.parametrize("param", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_go_off_quickly_or_not_at_all(param: str) -> None:
    text = function("  return x", params=f"x: input {TYPE}, {param}", dims="n, m, k")
    with limits(room_bytes=256 << 20), contextlib.suppress(NnfrontError):
        nn.compile(admit(text))


def chain(count: int) -> str:
    """Functions each of which calls the next."""
    return tower(count, 1)


def squares(count: int, size: str) -> str:
    """Functions each of which calls the next with its dim squared."""
    head = "private def g{}[n](x: input float32[n]) -> float32[1] {{ {} return y }}\n"
    call = "a: float32[n*n] = zeros(shape=(n*n,)) y: float32[1] = @g{}(a)"
    parts = [head.format(i, call.format(i + 1)) for i in range(count)]
    last = head.format(count, "y: float32[1] = zeros(shape=(1,))")
    own = "y: float32[1] = @g0(x) return y"
    params = f"x: input float32[{size}], p: input float32[n, m]"
    return "".join([*parts, last, f"def f[n, m]({params}) -> float32[1] {{ {own} }}"])


def sizes(left: str, right: str) -> str:
    """A sum of two vectors that have to be of one size."""
    names = sorted(set(re.findall(r"[a-z]+[0-9]*", left + right)) - {"min", "max"})
    params = f"x: input float32[{left}], y: input float32[{right}], p: input float32[{', '.join(names)}]"
    return function(f"  v: float32[{left}] = add(x, y)\n  return p", params=params, dims=", ".join(names))


def minima(count: int, width: int) -> str:
    return "+".join(
        f"min({', '.join(f'n{(i * width + j) % 40}' for j in range(width))})" for i in range(count)
    )


CONSTANT = base64.b64encode(bytes(4 << 20)).decode()
TEXTS = {
    "many functions": chain(10_000),
    "deep calls": chain(1_000),
    "dims squared again and again": squares(20, "n"),
    "sums squared again and again": squares(20, "n + m"),
    "minima of minima": sizes(minima(20, 10), minima(21, 9)),
    "sums of quotients": sizes(
        "+".join(f"(a{i}+b)//(c{i}+1)" for i in range(50)), "+".join(f"(a{i}+c)//(d{i}+1)" for i in range(50))
    ),
    "products of quotients": sizes(
        "*".join(f"(a{i}//3+1)" for i in range(10)), "*".join(f"(a{i}//4+1)" for i in range(10))
    ),
    "long minima": sizes(
        "min(" + ",".join("*".join(["(a+b+c)"] * 5) + f"+{i}" for i in range(40)) + ")", "a"
    ),
    "comments behind one word": "def" + "# at x (f:1)\n" * 200_000,
    "a long string": function('  v: () = print_(x, format="' + "a" * 10_000_000 + '")\n  return x'),
    "a long string of escapes": function(
        '  v: () = print_(x, format="' + "\\n" * 5_000_000 + '")\n  return x'
    ),
    "a string without end": 'module(a="' + "\\a" * 1_000_000,
    "a long word": "def " + "a" * 1_000_000,
    "parts without number": function(
        "  v: float32[1] = split(z, indices_or_sections=100000000)\n  return x",
        params=f"x: input {TYPE}, z: input float32[100000000]",
    ),
    "chunks without number": function(
        "  v: float32[1] = chunk(z, chunks=100000000)\n  return x",
        params=f"x: input {TYPE}, z: input float32[0]",
    ),
    "many axes": function("  return x", params=f"x: input {TYPE}, z: input float32[{'1, ' * 20_000}]"),
    "a wide tuple": function(f"  v: ({'float32[1], ' * 100_000}) = (x,)\n  return x"),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_texts_that_stand_for_too_much_are_refused_quickly(text: str) -> None:
    with limits(room_bytes=256 << 20), pytest.raises(NnfrontError):
        nn.compile(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        function(f'  v: float32[1048576] = relu(const(float32[1048576], "{CONSTANT}"))\n  return x'),
        function("# at x (f:1)\n" * 200_000 + "  return x"),
        function("".join(f"  v{i}: {TYPE} = relu(x)\n" for i in range(5_000)) + "  return x"),
    ],
    ids=["a constant of 4 MB", "200,000 comments", "5,000 bindings"],
)
def test_texts_that_are_merely_long_are_read(text: str) -> None:
    with limits(room_bytes=64 << 20):
        assert list(parse(text)) == ["f"]


@pytest.mark.parametrize("room", ["characters", "tokens"])
def test_what_a_text_may_hold_is_said(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnfront.ir.tokens, f"MAX_{room.upper()}", 10)
    with pytest.raises(ParseError) as error:
        parse(function("  return x"))
    assert (
        error.value.what
        == {
            "characters": "a text has at most 10 characters, this has 65",
            "tokens": "line 1, column 26: a text has at most 10 words, numbers and signs",
        }[room]
    )


def test_released_text_is_admitted_and_stays_the_same() -> None:
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, flag: nn.Tensor) -> nn.Tensor:
            return op.cond(flag, lambda: x * 2.0, lambda: x + 1.0)

    given = {"x": nn.spec.Tensor(["n"]), "flag": nn.spec.Tensor([], "bool")}
    module = Model().export({"forward": given})
    text = release(module)
    assert admit(text) == module
    assert release(admit(text)) == text
    assert text.count("# at test_untrusted_text.py:") >= 3
    assert str(Path(__file__).parent) in module.text(provenance=True)
    assert str(Path(__file__).parent) not in text
    assert admit(text)["forward"].bindings[0].provenance == nn.ir.Provenance(
        "", "test_untrusted_text.py", int(text.split("test_untrusted_text.py:")[1].split()[0])
    )
