# SPDX-License-Identifier: Apache-2.0
"""Text from outside costs what its length says: bombs are refused, and what a model may be is not."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

import nnfront as nn
from nnfront import op
from nnfront.errors import NnfrontError, VerifyError
from nnfront.ir import admit, release
from nnfront.ir.admit import MAX_BINDINGS, MAX_DEPTH

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
    started = time.perf_counter()
    with pytest.raises(VerifyError) as error:
        admit(tower(60, 2))
    assert time.perf_counter() - started < 5
    assert str(error.value) == (
        "g41: it has 1572862 bindings, with those of the functions that it calls; 1000000 are the most"
    )
    assert MAX_BINDINGS == 1_000_000


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
    started = time.perf_counter()
    with contextlib.suppress(NnfrontError):
        nn.compile(admit(function("  return x", params=f"x: input {TYPE}, {param}", dims="n, m, k")))
    assert time.perf_counter() - started < 5


def test_released_text_is_admitted_and_stays_the_same() -> None:
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, flag: nn.Tensor) -> nn.Tensor:
            return op.cond(flag, lambda: x * 2.0, lambda: x + 1.0)

    given = {"x": nn.spec.Tensor(["n"]), "flag": nn.spec.Tensor([], "bool")}
    module = Model().export({"forward": given})
    text = release(module)
    assert admit(text) == module
    assert release(admit(text)) == text
    assert text.count("# at test_admit.py:") >= 3
    assert str(Path(__file__).parent) in module.text(provenance=True)
    assert str(Path(__file__).parent) not in text
    assert admit(text)["forward"].bindings[0].provenance == nn.ir.Provenance(
        "", "test_admit.py", int(text.split("test_admit.py:")[1].split()[0])
    )
