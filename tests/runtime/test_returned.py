# SPDX-License-Identifier: Apache-2.0
"""Functions that are not nnfront's own and return something else than declared: an error before anything reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.lowering import lower
from nnfront.errors import RunError
from nnfront.ir import TensorType, parse
from nnfront.session import Session

WIDE = 512


class Function:
    """The external function: `action` is what it does, which may be a lie."""

    action: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.action(*args)


@pytest.fixture
def function():
    ops.control._EXTERNS["test_returned.f"] = found = Function()
    yield found
    del ops.control._EXTERNS["test_returned.f"]


def session(text: str, **weights: torch.Tensor) -> Session:
    return Session(lower(parse(text)), weights)


PRODUCT = f"""
def main[n](x: input bfloat16[n, {WIDE}], w: weight bfloat16[8, {WIDE}]) -> bfloat16[n, 8] {{
    y: bfloat16[n, {WIDE}] = extern(x, name="test_returned.f", out=type(bfloat16[n, {WIDE}]))   # at model.lie (model.py:7)
    z: bfloat16[n, 8] = linear(y, w)
    return z
}}
"""


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


LIES: dict[str, tuple[Callable[[], Any], str]] = {
    "a size": (lambda: zeros(1, 1), "bfloat16[1, 1]"),
    "another dim": (lambda: zeros(2, WIDE), "bfloat16[2, 512]"),
    "more": (lambda: zeros(1, WIDE + 1), "bfloat16[1, 513]"),
    "rank": (lambda: zeros(WIDE), "bfloat16[512]"),
    "no axes": (lambda: zeros(), "bfloat16[]"),
    "nothing in it": (lambda: zeros(0, WIDE), "bfloat16[0, 512]"),
    "fewer bytes": (lambda: zeros(1, WIDE, dtype=torch.int8), "int8[1, 512]"),
    "more bytes": (lambda: zeros(1, WIDE, dtype=torch.float32), "float32[1, 512]"),
    "as many bytes": (lambda: zeros(1, WIDE, dtype=torch.float16), "float16[1, 512]"),
    "None": (lambda: None, "None"),
    "a list": (lambda: [zeros(1, WIDE)], "(bfloat16[1, 512],)"),
    "a long list": (lambda: [None] * 9, "a list of 9"),
    "a number": (lambda: 1.0, "a float"),
    "an array": (lambda: zeros(1, WIDE).float().numpy(), "a ndarray"),
    "another device": (lambda: zeros(1, WIDE).to("meta"), "bfloat16[1, 512] on meta"),
    "sparse": (lambda: zeros(1, WIDE).to_sparse(), "bfloat16[1, 512] (sparse_coo)"),
    "another class": (
        lambda: zeros(1, WIDE).as_subclass(type("Wrapped", (torch.Tensor,), {})),
        "a Wrapped bfloat16[1, 512]",
    ),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_refused_with_who_told_it_what_was_declared_and_where(function, kind):
    make, text = LIES[kind]
    function.action = lambda x: make()
    with pytest.raises(RunError) as caught:
        session(PRODUCT, w=torch.randn(8, WIDE).bfloat16())["main"](zeros(1, WIDE))
    assert str(caught.value) == (
        f"the external function 'test_returned.f' returned {text}\n"
        "  declared is bfloat16[n, 512] with n = 1\n"
        "  at model.lie in method 'main' (model.py:7)"
    )


TRUE = {
    "itself": lambda x: x,
    "one row for all": lambda x: x[:1].expand(len(x), -1),
    "one number for all": lambda x: x[:1, :1].expand_as(x),
    "turned": lambda x: x.T.contiguous().T,
    "rows that overlap": lambda x: torch.cat([x.flatten()] * 2).as_strided(x.shape, (1, 1)),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "behind others": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape),
    "a parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("kind", TRUE)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_way_to_lie_in_memory_is_taken_and_computed_with(function, kind, rows):
    function.action = TRUE[kind]
    w, x = torch.randn(8, WIDE).bfloat16(), torch.randn(rows, WIDE).bfloat16()
    expected = TRUE[kind](x).double() @ w.double().T
    found = session(PRODUCT, w=w)["main"](x)
    assert (found.double() - expected).abs().max() < 2e-2 * expected.abs().max()


AFTERWARDS = f"""
def main[n](x: input bfloat16[n, {WIDE}], w: weight bfloat16[{WIDE}, {WIDE}], v: weight bfloat16[{WIDE}]) -> bfloat16[n, {WIDE}] {{
    d: () = extern(x, w, v, name="test_returned.f", out=type(()))
    a: bfloat16[n, {WIDE}] = rms_norm(x, v, axes=(1,))
    b: bfloat16[n, {WIDE}] = linear(a, w)
    c: bfloat16[n, {WIDE}] = add(b, x)
    return c
}}
"""


@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "w", "v"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(1),
        lambda t: t.resize_(*(1 for _ in t.shape)),
        lambda t: t.resize_(0),
        lambda t: t.set_(torch.ones_like(t, dtype=torch.float32)[..., :1].bfloat16()),
        lambda t: setattr(t, "data", torch.ones(t.shape, dtype=torch.int8)),
        lambda t: setattr(t, "data", torch.ones(1, dtype=torch.bfloat16).expand(t.shape)),
    ],
    ids=["resized to a number", "resized", "emptied", "set", "another dtype", "expanded"],
)
def test_an_operand_that_a_function_has_changed_in_place_is_not_read_beyond_its_end(
    function, operand, change
):
    x, w, v = (torch.ones(s).bfloat16() for s in ((1, WIDE), (WIDE, WIDE), (WIDE,)))
    run = session(AFTERWARDS, w=w, v=v)["main"]
    function.action = lambda *operands: ()
    assert run(x).shape == (1, WIDE)

    def act(*operands: torch.Tensor) -> tuple[()]:
        change(operands[operand])
        return ()

    function.action = act
    try:  # what broadcasts is no fault of memory
        found = run(x)
    except RunError as error:
        assert "failed with" in error.what  # noqa: PT017
    else:
        assert found.shape[0] == 1


SEVERAL = """
def main[n](x: input float32[n, 4]) -> float32[n, 4] {
    y: (float32[n, 4], int64[2*n], (bool[],), int64) = extern(x, name="test_returned.f", out=type((float32[n, 4], int64[2*n], (bool[],), int64)))
    z: float32[n, 4] = y[0]
    return z
}
"""
RIGHT = (zeros(3, 4, dtype=torch.float32), torch.zeros(6, dtype=torch.int64), (torch.tensor(True),), 5)


def changed(*path: int, to: Any) -> Any:
    def put(value: Any, path: tuple[int, ...]) -> Any:
        if not path:
            return to
        return tuple(put(v, path[1:]) if i == path[0] else v for i, v in enumerate(value))

    return put(RIGHT, path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (RIGHT[0], "float32[3, 4]"),
        (RIGHT[:3], "(float32[3, 4], int64[6], (bool[],))"),
        ((*RIGHT, RIGHT), "(float32[3, 4], int64[6], (bool[],), an int, (float32[3, 4], int64[6], (bool[],), an int))"),
        (changed(1, to=torch.zeros(3, dtype=torch.int64)), "(float32[3, 4], int64[3], (bool[],), an int)"),
        (changed(2, 0, to=None), "(float32[3, 4], int64[6], (None,), an int)"),
        (changed(3, to=True), "(float32[3, 4], int64[6], (bool[],), a bool)"),
    ],
)  # fmt: skip
def test_each_of_several_results_and_their_number_is_checked(function, value, text):
    run = session(SEVERAL)["main"]
    function.action = lambda x: RIGHT
    assert run(torch.ones(3, 4)).shape == (3, 4)
    function.action = lambda x: value
    with pytest.raises(RunError) as caught:
        run(torch.ones(3, 4))
    assert caught.value.what == f"the external function 'test_returned.f' returned {text}"
    assert caught.value.details == ("declared is (float32[n, 4], int64[2*n], (bool[],), int64) with n = 3",)


ELSEWHERE = {
    "in a branch": """
def main[n](x: input float32[n, 4], flag: input bool) -> float32[n, 4] {
    r: float32[n, 4] = if flag {
        y: float32[n, 4] = extern(x, name="test_returned.f", out=type(float32[n, 4]))
        yield y
    } else { yield x }
    return r
}""",
    "ahead of a dim that its result defines": """
def main[n, k](x: input float32[n, 4], flag: input bool) -> float32[k, 4] {
    y: float32[n, 4] = extern(x, name="test_returned.f", out=type(float32[n, 4]))
    z: float32[k, 4] = match_shape(y, float32[k, 4])
    return z
}""",
    "with a dim that was defined on the way": """
def main[n, k](x: input float32[n, 4], flag: input bool) -> float32[k, 4] {
    y: float32[k, 4] = match_shape(x, float32[k, 4])
    z: float32[k, 4] = extern(y, name="test_returned.f", out=type(float32[k, 4]))
    return z
}""",
    "in a private function with dims of its own": """
private def inner[rows](x: input float32[rows, 4]) -> float32[rows, 4] {
    y: float32[rows, 4] = extern(x, name="test_returned.f", out=type(float32[rows, 4]))
    return y
}
def main[n](x: input float32[n, 4], flag: input bool) -> float32[n, 4] {
    y: float32[n, 4] = @inner(x)
    return y
}""",
}


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_it_is_checked_wherever_it_is_called(function, text):
    run = session(text)["main"]
    function.action = lambda x: x + 1
    assert torch.equal(run(torch.ones(3, 4), True), torch.full((3, 4), 2.0))
    function.action = lambda x: x[:2]
    with pytest.raises(
        RunError, match=r"'test_returned.f' returned float32\[2, 4\]\n  declared .* = 3\n  at method 'main'"
    ):
        run(torch.ones(3, 4), True)


class Derived(nn.Module):
    def __init__(self) -> None:
        self.weight = nn.Parameter(["d", 4], "float32")
        self.twice = op.extern(
            "test_returned.f", [self.weight], nn.Tensor.placeholder([self.weight.shape[0], 4], "float32")
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.linear(x, self.twice)


def test_formulas_of_weights_are_checked_when_they_are_made(function):
    ir = Derived().export({"forward": {"x": spec.Tensor(["n", 4], "float32")}})
    weights, x = {"weight": torch.ones(3, 4)}, torch.ones(1, 4)
    for made in (ir, nn.passes.lift_transform_params(ir, shared_transform=True)):
        function.action = lambda w: w * 2
        assert nn.compile(made).load(weights)["forward"](x).tolist() == [[8.0] * 3]
        function.action = lambda w: w[:2]
        with pytest.raises(
            RunError,
            match=r"'test_returned.f' returned float32\[2, 4\]\n  declared is float32\[d, 4\] with d = 3",
        ):
            nn.compile(made).load(weights)["forward"](x)


def test_eager_execution_checks_as_well(function):
    model = Derived()
    model.load_state_dict({"weight": torch.ones(3, 4)})
    function.action = lambda w: w * 2
    assert model(torch.ones(1, 4)).tolist() == [[8.0] * 3]
    function.action = lambda w: w[:2]
    with pytest.raises(RunError, match=r"'test_returned.f' returned float32\[2, 4\]"):
        model(torch.ones(1, 4))


def test_a_call_outside_of_every_method_is_checked_as_well(function):
    placeholder = nn.Tensor.placeholder([3, 4], "float32")
    function.action = lambda x: x * 2
    assert op.extern("test_returned.f", [torch.ones(3, 4)], placeholder).sum() == 24
    function.action = lambda x: x[:2]
    with pytest.raises(RunError, match=r"'test_returned.f' returned float32\[2, 4\]"):
        op.extern("test_returned.f", [torch.ones(3, 4)], placeholder)


def test_a_kernel_that_was_registered_is_checked():
    nn.register_kernel("exp", "test_returned_kernel", lambda run: lambda x: x[:1])
    try:
        run = session(
            "def main[n](x: input float32[n, 4]) -> float32[n, 4] { y: float32[n, 4] = exp(x) return y }"
        )["main"]
        assert run(torch.ones(1, 4)).shape == (1, 4)
        with pytest.raises(
            RunError, match=r"the kernel 'test_returned_kernel' of 'exp' returned float32\[1, 4\]"
        ):
            run(torch.ones(3, 4))
    finally:
        nn.unregister_kernel("test_returned_kernel")


def test_the_reference_of_an_op_that_others_declare_is_checked():
    @nn.ir.op(name="test_returned_op")
    def declared(x: TensorType) -> TensorType:
        return x

    declared.reference(lambda x: x[:1])
    try:
        run = session(
            "def main[n](x: input float32[n, 4]) -> float32[n, 4] { y: float32[n, 4] = test_returned_op(x) return y }"
        )["main"]
        assert run(torch.ones(1, 4)).shape == (1, 4)

        class Model(nn.Module):
            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return op.test_returned_op(x)

        for call in (run, Model()):
            with pytest.raises(RunError, match=r"the op 'test_returned_op' returned float32\[1, 4\]"):
                call(torch.ones(3, 4))
    finally:
        del nn.ir.OPS["test_returned_op"]


def test_a_handle_of_a_cache_must_be_the_one_that_was_given():
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
            y = op.reshape(x, (x.shape[0], x.shape[1], 1, 4))
            return op.attention(y, y, y, cache=cache[0])

    given = {"x": spec.Tensor(["batch", "n", 4], "float32"), "cache": spec.Cache(1, 1, 4, "float32")}
    other: list[Any] = []
    nn.register_kernel(
        "attention",
        "test_returned_attention",
        lambda run: lambda q, k, v, layer, sinks, bias: (q, (other or [layer])[0]),
    )
    try:
        run = nn.compile(Model().export({"forward": given})).load({})
        cache = run.make_cache(batch=1, max_seq=4)
        run["forward"](torch.ones(1, 1, 4), cache)
        other.append(run.make_cache(batch=1, max_seq=1)[0])
        with pytest.raises(RunError, match="the kernel 'test_returned_attention' of 'attention' returned"):
            run["forward"](torch.ones(1, 1, 4), cache)
    finally:
        nn.unregister_kernel("test_returned_attention")


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, WIDE]), max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.bool]),
    steps=st.lists(st.integers(0, 2), max_size=3),
)
def test_any_tensor_is_taken_or_refused(shape, dtype, steps):
    ops.control._EXTERNS["test_returned.f"] = lambda x: torch.zeros(WIDE * WIDE * 9, dtype=dtype).as_strided(
        shape, (steps + [1] * 3)[: len(shape)]
    )
    try:
        is_right = shape == [2, WIDE] and dtype == torch.bfloat16
        run = session(PRODUCT, w=zeros(8, WIDE))["main"]
        if is_right:
            assert not run(zeros(2, WIDE)).any()
            return
        with pytest.raises(RunError, match="declared is bfloat16"):
            run(zeros(2, WIDE))
    finally:
        del ops.control._EXTERNS["test_returned.f"]
