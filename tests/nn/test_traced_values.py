# SPDX-License-Identifier: Apache-2.0
"""A traced value means something in its own trace only, keeps its class there, and a trace leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import TraceError
from nnfront.ir import OPS
from nnfront.nn.functional import OpFunction, Vocabulary

X = {"forward": {"x": spec.Tensor(["n", 4])}}


def module_of(forward: Any, **attributes: Any) -> Any:
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


# Names of ops.


def test_no_op_changes_the_ops_that_are_used_after_it() -> None:
    vocabulary = Vocabulary()
    for name in OPS:
        getattr(vocabulary, name)
    x = torch.tensor([0.0, 0.0])
    assert vocabulary.softmax(x, axis=0).tolist() == [0.5, 0.5]
    assert vocabulary.concat([x, x]).tolist() == [0.0] * 4
    assert vocabulary.any(x) == vocabulary.all(x) == torch.tensor(False)
    assert vocabulary.cond(True, int, float) == 0


def test_every_op_is_found_under_its_name() -> None:
    for name, declared in OPS.items():
        function = getattr(op, name)
        written_out = ("astype", "cache_append", "cache_read", "cache_write", "extern", "scan")
        assert name in written_out or (isinstance(function, OpFunction) and function.op is declared)


# State.


def test_a_value_that_a_method_binds_to_a_parameter_is_refused_and_not_bound() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.w.data = torch.ones(4)
        return x * self.w

    module = module_of(forward, w=nn.Parameter([4]))
    with pytest.raises(
        TraceError, match=r"(?s)attribute 'data' of w changes.*method 'forward' \(.*values\.py:"
    ):
        module.export(X)
    assert module.w.data is None
    torch.testing.assert_close(module(torch.full((2, 4), 3.0)), torch.full((2, 4), 3.0))


def test_a_list_that_keeps_a_traced_tensor_is_named_with_the_line_that_made_it() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = x * 2.0
        self.seen.append(y)
        return y

    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(
        TraceError, match=rf"(?s)'layer\.seen\.0' keeps <Tensor float32\[n, 4\] traced>.*values\.py:{line}"
    ):
        module_of(lambda self, x: self.layer(x), layer=module_of(forward, seen=[])).export(X)


@pytest.mark.parametrize("add", [nn.Linear(4, 4), nn.Parameter([4])], ids=["module", "parameter"])
def test_a_list_that_grows_while_a_method_is_traced_is_named(add: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.items.append(add)
        return x

    with pytest.raises(TraceError, match=r"'items\.0.*' keeps .* which was put there"):
        module_of(forward, items=[]).export(X)


def test_lists_of_plain_numbers_are_the_author_s_own() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.calls.append(1)
        return x * 1.0

    module_of(forward, calls=[]).export(X)


# Where a traced tensor means something.


def kept_tensor() -> Any:
    kept: list[Any] = []
    module_of(lambda self, x: kept.append(x * 2.0) or x).export(X)
    return kept[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1.0,
        lambda t: op.relu(t),
        lambda t: op.concat([nn.Parameter(["n", 4]), t]),
        lambda t: module_of(lambda self, x: x + t).export(X),
        lambda t: module_of(lambda self, x: t).export(X),
        lambda t: module_of(lambda self, x: op.cond(op.any(x > 0), lambda: t, lambda: x)).export(X),
        lambda t: module_of(lambda self, x: x + t)(torch.ones(2, 4)),
    ],
    ids=["operator", "op", "formula", "another trace", "a result", "a branch", "an eager run"],
)
def test_a_traced_tensor_is_refused_after_its_trace(use: Any) -> None:
    with pytest.raises(TraceError, match=r"(?s)is used where it has no meaning.*at .*values\.py:\d+.*help:"):
        use(kept_tensor())


def test_a_tensor_of_a_branch_is_refused_after_it() -> None:
    def forward(self: Any, x: Any) -> Any:
        kept: list[Any] = []
        y = op.cond(op.any(x > 0), lambda: kept.append(x * 2.0) or kept[0], lambda: x)
        return y + kept[0]

    with pytest.raises(TraceError, match=r"a branch of op\.cond that has ended"):
        module_of(forward).export(X)


class Adds(nn.Module):
    def __init__(self, context: Any) -> None:
        self.context = context

    def forward(self, x: Any) -> Any:
        return x + self.context["shift"]


def test_layers_that_read_a_tensor_of_the_method_around_them_are_traced_in_place() -> None:
    context: dict[str, Any] = {}

    def forward(self: Any, x: Any) -> Any:
        context["shift"] = x * 2.0
        for layer in self.layers:
            x = layer(x)
        context.clear()
        return x

    ir = module_of(forward, layers=[Adds(context), Adds(context)]).export(X)
    assert list(ir) == ["forward"]
    x = torch.randn(2, 4)
    torch.testing.assert_close(nn.compile(ir).load({})["forward"](x), x * 5)


# Classes of opaque values.


class Table(nn.Object):
    def look_up(self, keys: Any) -> Any:
        return op.extern("traced.look_up", [self, keys], nn.Tensor.placeholder([keys.shape[0], 2], "float32"))


class Other(nn.Object):
    """Of another class, under the same name."""


Other.__qualname__ = "Table"


class Layer(nn.Module):
    def forward(self, keys: Any, table: Any) -> Any:
        assert isinstance(table, Table)
        return table.look_up(keys), table


KEYS = spec.Tensor(["n"], "int64")


def looked_up(ir: Any, *tables: Any) -> Any:
    nn.register_extern("traced.look_up", _look_up)
    return nn.compile(ir).load({})["forward"](torch.tensor([1]), *tables)


def _look_up(table: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return table[keys]


def test_an_object_keeps_its_class_in_shared_layers_and_out_of_them() -> None:
    def forward(self: Any, keys: Any, table: Any) -> Any:
        total = 0.0
        for layer in self.layers:
            y, table = layer(keys, table)
            total = total + y
        return total + table.look_up(keys)

    module = module_of(forward, layers=[Layer(), Layer()])
    ir = module.export({"forward": {"keys": KEYS, "table": spec.Object(Table)}})
    assert list(ir) == ["Layer", "forward"]
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(looked_up(ir, data), data[1:] * 3)


def test_an_object_keeps_its_class_in_a_tuple_and_out_of_a_branch() -> None:
    def forward(self: Any, keys: Any, tables: Any) -> Any:
        a, b = tables
        chosen = op.cond(op.any(keys > 0), lambda: a, lambda: b)
        return chosen.look_up(keys)

    ir = module_of(forward).export(
        {"forward": {"keys": KEYS, "tables": [spec.Object(Table), spec.Object(Table)]}}
    )
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(looked_up(ir, (data, data * 2)), data[1:])


def test_layers_that_get_objects_of_two_classes_share_no_body() -> None:
    class Asks(nn.Module):
        def forward(self, x: Any, table: Any) -> Any:
            return x * (2.0 if isinstance(table, Table) else 3.0)

    def forward(self: Any, x: Any, a: Any, b: Any) -> Any:
        return self.layers[1](self.layers[0](x, a), b)

    arguments = {"x": spec.Tensor(["n", 4]), "a": spec.Object(Table), "b": spec.Object(Other)}
    ir = module_of(forward, layers=[Asks(), Asks()]).export({"forward": arguments})
    assert list(ir) == ["Asks", "Asks_1", "forward"]


# Arrays of torch and numpy beside traced tensors.

_OPERATORS = (
    "a + b, a - b, a * b, a / b, a // b, a % b, abs(a) ** b, a < b, a <= b, a > b, a >= b, a == b, a != b"
)


@pytest.mark.parametrize("expression", _OPERATORS.split(", "))
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_operators_with_an_array_on_the_left_are_those_of_the_array(expression: str, library: str) -> None:
    a, b = torch.tensor([3.0, -5.0, 2.0, 1.0]), torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    array = a if library == "torch" else a.numpy()
    ir = module_of(lambda self, x: eval(expression, {"a": array, "b": x})).export(X)
    torch.testing.assert_close(nn.compile(ir).load({})["forward"](b), eval(expression, {"a": a, "b": b}))


def test_what_is_added_in_place_to_an_array_leaves_the_array_as_it_was() -> None:
    table = torch.ones(4)

    def forward(self: Any, x: Any) -> Any:
        y = table
        y += x
        return y * np.float32(2.0)

    ir = module_of(forward).export(X)
    torch.testing.assert_close(nn.compile(ir).load({})["forward"](torch.ones(1, 4)), torch.full((1, 4), 4.0))
    assert torch.equal(table, torch.ones(4))
