# SPDX-License-Identifier: Apache-2.0
"""Specs are read without being changed, and every mistake in them is reported at once, in the user's words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import DimError, InferError, SpecError


class Model(nn.Module):
    def forward(self, x: nn.Tensor, mask: Any = None, y: Any = None, scale: float = 2.0) -> Any:
        z = x * scale
        if mask is not None:
            z = z + mask
        return z if y is None else z - y

    def wants_keyword(self, x: nn.Tensor, *, flag: bool = False, y: Any = None) -> Any:
        return x if y is None else x + y

    def count(self, x: nn.Tensor, n: Any) -> Any:
        return op.broadcast_to(x, (n, x.shape[0])), n


T = spec.Tensor(["n", 4], "float32")


def test_arguments_left_out_keep_their_defaults_and_the_others_their_places() -> None:
    ir = Model().export({"forward": {"y": T, "x": T}})
    assert [p.name for p in ir["forward"].inputs] == ["x", "y"]
    assert [b.value.op.name for b in ir["forward"].bindings] == ["multiply", "subtract"]


def test_keyword_only_arguments_can_be_given() -> None:
    assert [p.name for p in Model().export({"wants_keyword": {"x": T, "y": T}})["wants_keyword"].inputs] == [
        "x",
        "y",
    ]


def test_all_mistakes_of_all_methods_come_in_one_error() -> None:
    raw = {
        "forward": {"X": T, "mask": 3.5, "$": {"param_mode": "packt", "mode": 1}},
        "foward": {"x": T},
        "count": {"x": T},
    }
    with pytest.raises(SpecError) as caught:
        Model().export(raw)
    text = str(caught.value)
    for part in (
        "forward: 'x' is missing",
        "forward: 'X' is not an argument",
        "forward: 'mask' has the spec 3.5, which is none",
        "'$' 'param_mode' is 'packt', not one of 'plain', 'packed', 'none'",
        "'$' has the unknown key 'mode'",
        "Model has no method 'foward'; did you mean 'forward'?",
        "count: 'n' is missing",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (3, "the spec is 3, not a dict from method names to specs"),
        ({"forward": 3}, "forward: the spec is 3, not a dict from argument names to specs"),
        ({3: {}}, "Model has no method 3"),
        ({"forward": {"x": str}}, "'x' has the spec <class 'str'>, which is none"),
        ({"forward": {"x": T, "$": 1}}, "'\\$' is 1, not a dict"),
    ],
)
def test_a_spec_that_is_no_spec_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Model().export(raw)


def test_a_spec_is_left_as_it_was_and_may_be_used_again() -> None:
    raw = {"forward": {"x": T, "$": {"param_mode": "packed", "effect_mode": "none"}}}
    before = copy.copy(raw["forward"])
    first = str(Model().export(raw))
    assert raw["forward"] == before
    assert str(Model().export(raw)) == first


@pytest.mark.parametrize("raw", [int, "int", spec.Int(), spec.Int], ids=repr)
def test_an_int_argument_is_a_dim_inside_the_method(raw: Any) -> None:
    ir = Model().export({"count": {"x": spec.Tensor([4], "float32"), "n": raw}})
    assert str(ir["count"].result_type.fields[0].shape[0]) == "n"


def test_tuples_come_as_tuples() -> None:
    class Pairs(nn.Module):
        def forward(self, pair: Any) -> Any:
            a, (b, c) = pair
            return a + b * c

    for raw in ([T, [T, T]], (T, (T, T)), spec.Tuple("pair", [T, spec.Tuple("inner", [T, T])])):
        assert len(Pairs().export({"forward": {"pair": raw}})["forward"].inputs) == 1


def test_facts_given_in_two_places_are_combined() -> None:
    a = spec.Tensor([nn.Dim("n", min=2), 4], "float32")
    b = spec.Tensor([nn.Dim("n", max=64, multiple_of=2), 4], "float32")
    (symbol,) = Model().export({"forward": {"x": a, "y": b}})["forward"].symbols
    assert (symbol.min, symbol.max, symbol.multiple_of) == (2, 64, 2)


def test_contradicting_facts_name_both_places() -> None:
    a = spec.Tensor([nn.Dim("n", min=9), 4], "float32")
    b = spec.Tensor([nn.Dim("n", max=8), 4], "float32")
    with pytest.raises(DimError, match=r"(?s)argument 'x' of 'forward'.*argument 'y' of 'forward'"):
        Model().export({"forward": {"x": a, "y": b}})


def test_one_name_is_one_dim_across_inputs_and_weights() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            self.lm_head = nn.Linear(4, "vocab_size")

        def forward(self, x: nn.Tensor, bias: nn.Tensor) -> nn.Tensor:
            return self.lm_head(x) + bias

    ir = Head().export({"forward": {"x": T, "bias": spec.Tensor(["vocab_size"], "float32")}})
    assert str(ir["forward"].result_type.shape[1]) == "vocab_size"


def test_different_names_are_different_dims_and_the_error_says_where() -> None:
    with pytest.raises(
        InferError, match=r"(?s)sizes n and m do not broadcast.*method 'forward' \(.*test_spec\.py:\d+\)"
    ):
        Model().export({"forward": {"x": T, "y": spec.Tensor(["m", 4], "float32")}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec.Tensor("n", "float32"), "the shape is the text 'n', not a list"),
        (lambda: spec.Tensor(["n"], "float31"), "unknown dtype 'float31'"),
        (lambda: spec.Tensor(["2*"], "float32"), "2\\*"),
        (lambda: spec.Tensor([-1], "float32"), "-1"),
        (lambda: spec.Tensor([1.5], "float32"), "1.5"),  # type: ignore[list-item]
        (lambda: spec.Cache(2, 0, 8), "kv_heads is 0, not a positive int"),
        (lambda: spec.Cache(2, 1, 8, window=[4]), "2 layers but 1 windows"),
    ],
)
def test_wrong_specs_are_refused_when_they_are_made(make: Any, message: str) -> None:
    with pytest.raises((SpecError, DimError, InferError), match=message):
        make()


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([], "spec.State: layers is not a list of layers"),
        ([spec.Tensor([2])], "spec.State: layers is not a list of layers"),
        ([spec.Layer()], "spec.State: layer 0: it keeps nothing"),
        ([spec.KV(2, 4), spec.Layer({"a": spec.Tensor([])})], "spec.State: layer 1: 'a' has no axis, expected one at least of what is kept of each token"),
        ([spec.Layer({"a": spec.Tensor(["n"])})], "spec.State: layer 0: 'a' is Tensor([n], 'float32'), expected spec.Tensor of positive ints"),
        ([spec.Layer({"a": spec.Tensor([2])}, {"a": spec.Tensor([2])})], "spec.State: layer 0: 'a' is kept of tokens and of sequences"),
        ([spec.KV(2, 4, window=0)], "spec.State: layer 0: window is 0, expected a positive int or None"),
    ],
)  # fmt: skip
def test_what_a_state_cannot_keep_is_refused(layers, what) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError) as caught:
        spec.State(layers)
    assert caught.value.what == what
