# SPDX-License-Identifier: Apache-2.0
"""Lambdas over TE become ops and functions in TIR external ones: both against what TVM compiles of them; shapes are lists, modules convert."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnfront
from nnfront.compat.tvm import absent, nn, op, spec
from nnfront.errors import NnfrontError, RunError, WrongUse


class Late:
    """A module that is imported when something of it is used: TVM takes two seconds, which all who collect these tests would pay."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which pytest asks of all that it finds
            raise AttributeError(name)
        return getattr(importlib.import_module(self.name), name)


tvm, te, tirx, tir = map(Late, ("tvm", "tvm.te", "tvm.tirx", "tir_functions"))


def dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def exported(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The IR of a module whose method is `function` of these arguments."""
    names = ", ".join(given)
    scope: dict[str, Any] = {"function": function}
    exec(f"def forward(self, {names}): return function({names})", scope)
    return type("Ported", (nn.Module,), {"forward": scope["forward"]})().export({"forward": given})


def ran(function: Callable[..., Any], shapes: list[list[Any]], tensors: list[torch.Tensor]) -> Any:
    given = {
        f"x{i}": spec.Tensor(shape, dtype(x))
        for i, (shape, x) in enumerate(zip(shapes, tensors, strict=True))
    }
    return nnfront.compile(exported(function, given)).load({})["forward"](*tensors)


def compiled(function: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What TVM computes for tensors of these sizes."""
    placeholders = [te.placeholder(x.shape, dtype(x), f"x{i}") for i, x in enumerate(tensors)]
    results = function(*placeholders)
    outs = list(results) if isinstance(results, (list, tuple)) else [results]
    made = [torch.empty([int(n) for n in o.shape], dtype=getattr(torch, str(o.dtype))) for o in outs]
    tvm.compile(te.create_prim_func([*placeholders, *outs]), target="llvm")(*tensors, *made)
    return made


X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
BSD = ["b", "s", 4]


def last_token(x: Any) -> Any:
    b, s, d = x.shape
    return te.compute((b, 1, d), lambda i, _, k: x[i, s - 1, k])


def shifted(first: Any, x: Any) -> Any:
    return te.compute(x.shape, lambda i, j, k: tirx.if_then_else(j == 0, first[i, k], x[i, j - 1, k]))


def halves_turned(x: Any) -> Any:
    def element(i: Any, j: Any, k: Any) -> Any:
        angle = tirx.Var("angle", "float32")
        partner = tirx.if_then_else(k < 2, k + 2, k - 2)
        turned = x[i, j, k] * tirx.cos(angle) + x[i, j, partner] * tirx.sin(angle)
        return tirx.Let(angle, j.astype("float32") / tirx.const(3.0, "float32"), turned)

    return te.compute(x.shape, element)


def mask(m: Any) -> Any:
    b, s = m.shape
    return te.compute(
        (b, 1, s, s),
        lambda i, _, j, k: tirx.if_then_else(
            tirx.any(m[i, j] == 0, tirx.Not(m[i, k] != 0)),
            tirx.min_value("float16"),
            tirx.max_value("float16"),
        ),
    )


def reduced(join: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        r = te.reduce_axis((0, x.shape[1]), "r")
        return te.compute((x.shape[0], x.shape[2]), lambda i, k: getattr(te, join)(x[i, r, k], axis=r))

    return function


def two_stages(x: Any) -> Any:
    squares = te.compute(x.shape, lambda *i: x(*i) * x(*i))
    return [squares, te.compute(x.shape, lambda *i: tirx.sqrt(squares(*i)) + tirx.exp(x(*i)))]


INTS = torch.tensor([-7, -2, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "shapes", "tensors"),
    [
        (last_token, [BSD], [X]),
        (last_token, [[2, 5, 4]], [X.half()]),
        (shifted, [["b", 4], BSD], [X[:, 0] + 1, X]),
        (halves_turned, [BSD], [X]),
        (mask, [["b", "s"]], [torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.int32)]),
        (lambda x: te.compute((x.shape[2], x.shape[0]), lambda k, i: x[i, 1, k]), [BSD], [X]),
        (lambda x: te.compute(x.shape[:2], lambda _, j: j.astype("int32")), [BSD], [X]),
        (lambda x: te.compute((5, 4), lambda j, k: x[0, j, 3 - k] + x[1, j, (k % 2) * 2 + k // 2]), [BSD], [X]),
        (lambda x: te.compute(x.shape, lambda i: tirx.truncdiv(x[i], 3) * 10 + tirx.truncmod(x[i], 3)), [["n"]], [INTS]),
        (lambda x: te.compute(x.shape, lambda i: tirx.max(tirx.min(x[i], 4), -2) // 3), [["n"]], [INTS]),
        (lambda x: te.compute(x.shape, lambda i: tirx.Select(x[i] > 0, tirx.const(1, "float16"), tirx.const(2, "float16"))), [["n"]], [INTS]),
        (reduced("sum"), [BSD], [X]),
        (reduced("max"), [BSD], [X]),
        (reduced("min"), [BSD], [X]),
        (two_stages, [BSD], [X]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_lambda_over_te_is_ops_that_compute_what_tvm_does(
    function: Any, shapes: list[list[Any]], tensors: list[torch.Tensor]
) -> None:
    got = ran(lambda *xs: op.tensor_expr_op(function, "f", list(xs)), shapes, tensors)
    parts = list(got) if isinstance(got, tuple) else [got]
    for mine, theirs in zip(parts, compiled(function, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_reduction_takes_the_elements_of_its_condition_alone() -> None:
    def every_second(x: Any) -> Any:
        r = te.reduce_axis((0, 5), "r")
        return te.compute((2, 4), lambda i, k: te.sum(x[i, r, k], axis=r, where=r % 2 == 0))

    got = ran(lambda x: op.tensor_expr_op(every_second, "f", [x]), [[2, 5, 4]], [X])
    torch.testing.assert_close(got, X[:, ::2].sum(1))  # what TVM compiles of it leaves the condition out


def test_ops_of_a_lambda_need_no_tvm_where_they_run() -> None:
    ir = exported(lambda x: op.tensor_expr_op(last_token, "last", [x]), {"x": spec.Tensor(BSD, "float32")})
    assert "extern" not in str(ir)
    assert "getitem" in str(ir)


def test_a_lambda_may_name_dims_and_get_them_as_arguments() -> None:
    def function(x: Any) -> Any:
        n = x.shape[0]
        return op.tensor_expr_op(
            lambda t, size: te.compute((n + n,), lambda i: t[i % size] + n.__tvm_ffi_object__().astype("float32")),
            "twice",
            [x, n],
        )  # fmt: skip

    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(ran(function, [["n"]], [x]), torch.cat([x, x]) + 3)


def test_an_expression_that_no_op_computes_says_so() -> None:
    def counts(x: Any) -> Any:
        return te.compute(x.shape, lambda i: tirx.popcount(x[i]))

    with pytest.raises(WrongUse, match=r"tensor_expr_op 'bits': no op computes tirx\.popcount") as caught:
        exported(lambda x: op.tensor_expr_op(counts, "bits", [x]), {"x": spec.Tensor(["n"], "int32")})
    assert "register_lambda('bits', function of tensors)" in caught.value.help


ROWS = X[0]


def test_a_function_in_tir_is_an_external_one_that_tvm_compiles() -> None:
    def function(x: Any) -> Any:
        n = x.shape[0]
        out = nn.Tensor.placeholder((n, 4), "float32")
        three = tirx.IntImm("int64", 3)
        return op.tensor_ir_op(tir.scaled_rows, "rows", [x, three], out), op.tensor_ir_op(
            tir.scaled_rows, "rows", [x, n], out
        )

    by_three, by_size = ran(function, [["n", 4]], [ROWS])
    row = torch.arange(5.0)[:, None]
    torch.testing.assert_close(by_three, ROWS * 3 + row)
    torch.testing.assert_close(by_size, ROWS * 5 + row)


def test_functions_of_one_name_hint_stay_apart() -> None:
    def function(x: Any) -> Any:
        out = nn.Tensor.placeholder(x.shape, "float32")
        zero = tirx.IntImm("int64", 0)
        return op.tensor_ir_op(tir.negated, "same", x, out), op.tensor_ir_op(
            tir.scaled_rows, "same", [x, zero], out
        )

    given = {"x": spec.Tensor(["n", 4], "float32")}
    text = str(exported(function, given))
    assert 'name="tir.same"' in text
    assert 'name="tir.same_1"' in text
    assert str(exported(function, given)) == text
    minus, rows = ran(function, [["n", 4]], [ROWS])
    torch.testing.assert_close(minus, -ROWS)
    torch.testing.assert_close(rows, torch.arange(5.0)[:, None].expand(5, 4))


def test_what_is_changed_in_place_is_a_copy() -> None:
    def function(row: Any, x: Any) -> Any:
        return op.tensor_ir_inplace_op(
            tir.first_row_added, "add", [row, x], 1, nn.Tensor.placeholder(x.shape, "float32")
        )

    row, before = torch.ones(4), ROWS.clone()
    got = ran(function, [[4], ["n", 4]], [row, ROWS])
    torch.testing.assert_close(ROWS, before)
    torch.testing.assert_close(got, torch.cat([ROWS[:1] + 1, ROWS[1:]]))


def test_a_function_for_a_gpu_exports_and_says_where_it_runs_that_it_cannot_be_compiled() -> None:
    def function(x: Any) -> Any:
        return op.tensor_ir_op(tir.on_a_gpu, "on_a_gpu", [x], nn.Tensor.placeholder((8, 4), "float32"))

    with pytest.raises(RunError, match="TVM does not compile 'on_a_gpu' in TIR for the processor") as caught:
        ran(function, [[8, 4]], [torch.ones(8, 4)])
    assert "register_lambda('on_a_gpu', function of tensors)" in str(caught.value)


def test_without_tvm_a_lambda_is_an_error_that_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "find_spec", lambda name: None)
    for use in (
        lambda: op.tensor_expr_op(last_token, "f", []),
        lambda: nn.tensor_ir_op(tir.negated, "f", [], None),
        lambda: op.tensor_ir_inplace_op(tir.negated, "f", [], 0, None),
    ):
        with pytest.raises(WrongUse, match="are TVM's own, and TVM is not installed") as caught:
            use()
        assert "op.extern(name, args, out)" in caught.value.help


def test_a_shape_is_a_list_while_a_ported_module_is_exported() -> None:
    def function(x: Any) -> Any:
        n, size = x.shape
        assert x.shape == [n, 4]
        assert x.shape == (n, 4)
        assert x.shape[1:] == [size]
        assert x.shape != [n, 5]
        return op.reshape(x, x.shape + [1])  # noqa: RUF005

    assert ran(function, [["n", 4]], [ROWS]).shape == (5, 4, 1)
    assert nnfront.Tensor.placeholder((2, 3), "float32").shape != [2, 3]


class KeepsItsBias(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(4, 4)
        self.correction = nn.Parameter((4,), "float32")

    def to(self, dtype: str | None = None) -> None:  # type: ignore[override]
        super().to(dtype=dtype)
        self.correction.to("float32")


def test_modules_inside_convert_as_they_say() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            self.layers = nn.ModuleList([KeepsItsBias(), KeepsItsBias()])

    outer = Outer()
    outer.to("float16")
    dtypes = {name.split(".", 2)[2]: p.dtype for name, p in outer.named_parameters()}
    assert dtypes == {"correction": "float32", "linear.weight": "float16", "linear.bias": "float16"}


def test_rotary_frequencies_are_tvms_own_and_become_ops() -> None:
    from nnfront.compat.tvm.llm.position_embedding import llama_rope, switch_rope_freq_func

    frequencies = switch_rope_freq_func({})

    def turned(x: Any, positions: Any) -> Any:
        def element(b: Any, s: Any, d: Any) -> Any:
            cos, sin, variables = frequencies(positions[s], d, 4, 10000.0, "float32")
            partner = tirx.if_then_else(d < 2, -x[b, s, d + 2], x[b, s, d - 2])
            result = cos * x[b, s, d] + sin * partner
            for variable, value in variables.items():
                result = tirx.Let(variable, value, result)
            return result

        return te.compute(x.shape, element)

    positions = torch.tensor([0, 3, 4, 9, 11], dtype=torch.int32)
    got = ran(lambda x, p: op.tensor_expr_op(turned, "rope", [x, p]), [BSD, ["s"]], [X, positions])
    angles = positions[:, None] * torch.tensor([1.0, 10000.0**-0.5]).repeat(2)
    partner = torch.cat([-X[..., 2:], X[..., :2]], -1)
    torch.testing.assert_close(got, X * angles.cos() + partner * angles.sin(), rtol=1e-5, atol=1e-5)
    with pytest.raises(NnfrontError, match="llama_rope: TVM's function emits TVM's operators"):
        llama_rope()
