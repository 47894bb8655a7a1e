# SPDX-License-Identifier: Apache-2.0
"""Loops: they do what Python's do, traced, lifted around, specialised, saved and eagerly; and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import ParseError, TraceError, VerifyError


class Recurrent(nn.Module):
    """A gated network: weights, a derived one, a tensor around the loop, a branch and a module in the body."""

    def __init__(self) -> None:
        self.inside, self.recur = nn.Linear(4, 4), nn.Parameter([4, 4])
        self.turned = op.permute_dims(self.recur)

    def forward(self, x: Any, h: Any) -> Any:
        level = op.mean(x, axis=(0, 1)) if x.shape[1] is not None else None

        def step(h: Any, x: Any) -> Any:
            new = op.tanh(self.inside(x) + op.matmul(h["h"], self.turned) + level)
            kept = op.cond(op.sum(new) > 0.0, lambda: new * 0.5, lambda: new)
            return {"h": kept, "count": h["count"] + 1}, (kept, op.sum(kept, axis=-1))

        start = {"h": h, "count": op.zeros([], "int64")}
        return op.scan(step, start, x, axis=1)


def by_hand(module: Recurrent, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight, bias, recur = (p.data for p in (module.inside.weight, module.inside.bias, module.recur))
    kept, sums = [], []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ weight.T + bias + h @ recur.T + x.mean((0, 1)))
        h = h * 0.5 if h.sum() > 0 else h
        kept.append(h)
        sums.append(h.sum(-1))
    return h, torch.tensor(x.shape[1]), torch.stack(kept, 1), torch.stack(sums, 1)


def leaves(result: Any) -> list[torch.Tensor]:
    (carry, (kept, sums)) = result
    return [carry["h"], carry["count"], kept, sums]


SPEC = {"forward": {"x": spec.Tensor(["b", "s", 4]), "h": spec.Tensor(["b", 4])}}


def bound(module: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    weights = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    module.load_state_dict(weights)
    return module, weights


def test_a_loop_does_what_pythons_does_on_every_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, weights = bound(Recurrent())
    ir = module.export(SPEC)
    cases = nn.passes.special_cases(ir, "forward", [{"s": 1}, {"b": 2}])
    lifted = nn.passes.lift_transform_params(cases)
    session = nn.compile(lifted).load(weights)
    session.save(tmp_path / "saved")
    nn.compile(ir, target="cuda:sm_90")
    sessions = nn.compile(ir).load(weights), session, nn.load(tmp_path / "saved")
    for batch, seq in ((2, 5), (1, 1), (3, 2)):
        x, h = torch.randn(batch, seq, 4), torch.randn(batch, 4)
        expected = by_hand(module, x, h)
        for path in (module, *(s["forward"] for s in sessions)):
            for got, other in zip(leaves(path(x, h)), expected, strict=True):
                assert_close(got, other)


def test_a_loop_without_steps_carries_what_comes_in() -> None:
    module, weights = bound(Recurrent())
    session = nn.compile(module.export(SPEC)).load(weights)
    h = torch.randn(2, 4)
    for path in (module, session["forward"]):
        carried, count, kept, sums = leaves(path(torch.empty(2, 0, 4), h))
        assert torch.equal(carried, h)
        assert (count, kept.shape, sums.shape) == (0, (2, 0, 4), (2, 0))


def test_weights_that_a_body_reads_are_computed_ahead_of_the_loop() -> None:
    ir = nn.passes.lift_transform_params(Recurrent().export(SPEC))
    assert [b.var.name for b in ir["forward_transform_params"].bindings] == ["turned", "results"]
    assert not ir["step"].weights


def test_text_with_loops_reads_back() -> None:
    ir = Recurrent().export(SPEC)
    assert str(nn.ir.parse(str(ir))) == str(ir)
    assert nn.ir.parse(str(ir)) == ir
    assert "body=@step" in str(ir)


class Nested(nn.Module):
    """Layers that share a body with a loop, in which is another loop."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(3, 3) for _ in range(2)]
        self.blocks = [Rows(layer) for layer in self.layers]

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Rows(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def forward(self, x: Any) -> Any:
        def row(total: Any, row: Any) -> Any:
            last, sums = op.scan(lambda c, e: (c + e, self.layer(c + e) * total[0]), total, row)
            return last, sums

        return op.scan(row, op.zeros((3,)), x)[1]


def test_loops_stand_in_loops_and_in_shared_layers() -> None:
    torch.manual_seed(0)
    module, weights = bound(Nested())
    ir = module.export({"forward": {"x": spec.Tensor(["a", "b", 3])}})
    assert [f.name for f in ir.functions].count("Rows") == 1
    x = torch.rand(2, 3, 3)
    assert_close(nn.compile(nn.passes.lift_transform_params(ir)).load(weights)["forward"](x), module(x))


class Sums(nn.Module):
    """Running sums, several at once where `size` is given."""

    def __init__(self, axis: int, size: int | None) -> None:
        self.axis, self.size = axis, size

    def forward(self, x: Any, start: Any) -> Any:
        def step(total: Any, x: Any) -> Any:
            return total + x, total + x

        def whole(total: Any, x: Any) -> Any:
            sums = op.cumsum(x, self.axis) + op.unsqueeze(total, self.axis)
            return total + op.sum(x, axis=self.axis), sums

        chunk = None if self.size is None else (self.size, whole)
        return op.scan(step, start, x, axis=self.axis, chunk=chunk)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 2), st.none() | st.integers(1, 4), st.booleans())
def test_chunks_and_the_rest_are_the_whole_loop(
    length: int, axis: int, size: int | None, is_known: bool
) -> None:
    shape: list[Any] = [2, 3]
    x = torch.randn(*shape[:axis], length, *shape[axis:])
    dims = list(x.shape)
    if not is_known:
        dims[axis] = "n"
    module = Sums(axis, size)
    ir = module.export({"forward": {"x": spec.Tensor(dims), "start": spec.Tensor(shape)}})
    assert nn.ir.parse(str(ir)) == ir
    start = torch.randn(*shape)
    sums = x.cumsum(axis) + start.unsqueeze(axis)
    total = start + x.sum(axis)
    for path in (nn.compile(ir).load({})["forward"], module):
        for got, expected in zip(path(x, start), (total, sums), strict=True):
            assert_close(got, expected)


def test_a_loop_keeps_its_dtypes_where_others_are_asked_for() -> None:
    module, weights = bound(Recurrent())
    ir = nn.passes.apply_dtype_policy(module.export(SPEC), "bfloat16")
    x, h = torch.randn(2, 3, 4), torch.randn(2, 4)
    got = leaves(nn.compile(ir).load(weights)["forward"](x, h))
    assert_close(got[2], by_hand(module, x, h)[2], rtol=0.05, atol=0.05)


def test_an_effect_in_a_body_happens_in_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(x: Any) -> Any:
        op.scan(lambda c, x: (op.print_(x, format="x is {}"), (c, None))[1], None, x)
        return x

    session = nn.compile(nn.passes.run(export(forward), "simplify")).load({})
    session["forward"](torch.tensor([1.0, 2.0]))
    assert capsys.readouterr().out == "x is 1.0\nx is 2.0\n"


# What is refused.


def export(function: Callable[[Any], Any], shape: Any = ("n",)) -> nn.ir.IRModule:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return function(x)

    return Model().export({"forward": {"x": spec.Tensor(shape)}})


def counting() -> Callable[[Any], Any]:
    count = 0

    def step(total: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return total + x * count, None

    return lambda x: op.scan(step, op.zeros([]), x)[0]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a Python value that changes": (
        counting(),
        "op.scan: the body is not the same when it is traced once more",
    ),
    "a carry of another type": (
        lambda x: op.scan(lambda c, x: (op.astype(c + x, "float64"), None), op.zeros([]), x),
        "op.scan: a step changes the type of what it carries",
    ),
    "a carry of another structure": (
        lambda x: op.scan(lambda c, x: ((c, x), None), op.zeros([]), x),
        "op.scan: a step changes the type of what it carries",
    ),
    "no pair": (lambda x: op.scan(lambda c, x: c + x, op.zeros([]), x), "op.scan: the body returns <Tensor"),
    "nothing to slice": (
        lambda x: op.scan(lambda c, x: (c, None), x, None),
        "op.scan: there is nothing to take slices of",
    ),
    "axes of different lengths": (
        lambda x: op.scan(lambda c, x: (c, None), None, (x, op.concat([x, x]))),
        "op.scan: how many steps there are is not known: n or 2*n",
    ),
    "no place for the axis": (
        lambda x: op.scan(lambda c, x: (c, op.sum(x)), None, op.unsqueeze(x, 0), axis=1),
        "op.scan: a step makes float32[], which has no place for axis 1",
    ),
    "a chunk of no size": (
        lambda x: op.scan(lambda c, x: (c, x), None, x, chunk=(0, lambda c, x: (c, x))),
        "op.scan: the size of a chunk must be an int of at least 1, got 0",
    ),
    "a chunk that makes something else": (
        lambda x: op.scan(lambda c, x: (c, x), None, x, chunk=(2, lambda c, x: (c, (x, x)))),
        "op.scan: a chunk makes something of another structure than the body",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loop_that_is_none_is_refused_where_it_is_written(case: str) -> None:
    function, text = REFUSED[case]
    with pytest.raises(TraceError) as caught:
        export(function)
    assert caught.value.what.startswith(text)
    assert "test_scan.py" in (caught.value.where or "")
    assert caught.value.help


def test_a_loop_is_part_of_a_method() -> None:
    with pytest.raises(TraceError, match=r"op\.scan is used outside a method"):
        op.scan(lambda c, x: (c, x), None, torch.ones(2))


def test_a_body_uses_no_cache() -> None:
    class Model(nn.Module):
        def forward(self, x: Any, cache: Any) -> Any:
            return op.scan(lambda c, q: (op.attention(q, q, q, cache=cache[0]), None), x, x[None])[0]

    cache = spec.Cache(layers=1, kv_heads=1, head_size=4, batch="b", max_seq="m")
    with pytest.raises(TraceError, match=r"op\.scan: the body uses a cache"):
        Model().export({"forward": {"x": spec.Tensor(["b", "s", 1, 4]), "cache": cache}})


LOOP = """
private def step(total: input float32[2], x: input float32[2]) -> (float32[2], float32[2]) {
    add: float32[2] = add(total, x)
    both: (float32[2], float32[2]) = (add, add)
    return both
}

def main[n](x: input float32[n, 2], total: input float32[2]) -> (float32[2], float32[n, 2]) {
    scan: (float32[2], float32[n, 2]) = scan(total, x, body=@step, out=type((float32[2], float32[n, 2])), carried=1, sliced=1, axis=0)
    return scan
}
"""


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("body=@step", "body=@other", "V11: there is no function 'other'"),
        ("body=@step", "body=@main", "V11: 'main' is public, so no function calls it"),
        ("x: input float32[2]) ->", "x: input float32[3]) ->", "V18: .*add"),
        ("private def step", "def step", "V11: 'step' is public"),
        ("both: (float32[2], float32[2]) = (add, add)\n    return both", "return add", "header of 'step'"),
    ],
)
def test_text_whose_loop_does_not_fit_its_body_is_refused(old: str, new: str, text: str) -> None:
    assert old in LOOP
    with pytest.raises((VerifyError, ParseError), match=text):
        nn.ir.verify(nn.ir.parse(LOOP.replace(old, new)))


def test_a_body_that_returns_another_type_is_refused() -> None:
    text = LOOP.replace("(float32[2], float32[2]) {", "(float32[2], float32[]) {").replace(
        "both: (float32[2], float32[2]) = (add, add)",
        "one: float32[] = sum(add)\n    both: (float32[2], float32[]) = (add, one)",
    )
    with pytest.raises(VerifyError, match=r"V18: scan: step returns .float32.2., float32..., expected"):
        nn.ir.verify(nn.ir.parse(text))


def test_a_body_that_takes_other_slices_is_refused() -> None:
    text = LOOP.replace("float32[n, 2]", "float32[n, 3]")
    with pytest.raises(VerifyError, match="step expects size 2 where the argument has 3"):
        nn.ir.verify(nn.ir.parse(text))


def test_a_function_that_is_its_own_body_is_refused() -> None:
    text = LOOP.replace(
        "add: float32[2] = add(total, x)",
        "rows: float32[1, 2] = reshape(x, shape=(1, 2))\n"
        "    again: (float32[2], float32[1, 2]) = scan(total, rows, body=@step, out=type((float32[2], float32[1, 2])), carried=1, sliced=1, axis=0)\n"
        "    add: float32[2] = add(total, x)",
    )
    with pytest.raises(VerifyError, match="V12: a function calls itself: step -> step"):
        nn.ir.verify(nn.ir.parse(text))
