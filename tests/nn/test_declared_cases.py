# SPDX-License-Identifier: Apache-2.0
"""Special cases in a spec: recorded by export, applied by the pipeline of `compile`, mistakes said with all others."""

from __future__ import annotations

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import SpecError


class Layer(nn.Module):
    def __init__(self):
        self.up = nn.Linear(4, 4, bias=False)
        self.turned = op.permute_dims(self.up.weight)

    def forward(self, x, mask):
        return op.relu(op.matmul(x, self.turned)) + op.sum(mask)


class Model(nn.Module):
    def __init__(self):
        self.layers = [Layer() for _ in range(3)]

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return {"y": x, "n": x.shape[0]}

    def step(self, x, cache):
        b, s, _ = x.shape
        x = op.reshape(x, (b, s, 1, 4))
        return op.attention(x, x, x, cache=cache[0])


FORWARD = [{"n": 1}, {"n": (2, 8), "mask": nn.zeros}, {"n": nn.multiple_of(16)}, {"mask": nn.causal}]
STEP = [{"batch": 1, "seq": 1}, {"seq": [nn.multiple_of(2), (2, 6)]}]


def raw(forward=None, step=None):
    cache = spec.Cache(layers=1, kv_heads=1, head_size=4)
    n = nn.Dim("n", max=64)
    methods = {
        "forward": {"x": spec.Tensor([n, 4]), "mask": spec.Tensor(["n", "n"])},
        "step": {"x": spec.Tensor(["batch", "seq", 4]), "cache": cache},
    }
    for name, cases in (("forward", forward), ("step", step)):
        if cases is not None:
            methods[name]["$"] = {"special_cases": cases}
    return methods


def weights():
    return {f"layers.{i}.up.weight": torch.randn(4, 4) for i in range(3)}


def test_a_declaration_is_recorded_and_the_pass_that_applies_it_is_the_pass_called_by_hand():
    model = Model()
    declared, plain = model.export(raw(FORWARD, STEP)), model.export(raw())
    assert "special_cases" in declared["forward"].attrs
    assert [f.name for f in declared.functions] == [f.name for f in plain.functions]
    by_hand = nn.passes.special_cases(plain, "forward", FORWARD)
    by_hand = nn.passes.special_cases(by_hand, "step", STEP)
    applied = nn.passes.special_cases(declared)
    assert applied == by_hand
    assert str(applied) == str(by_hand)
    assert nn.passes.special_cases(applied) is applied


def test_the_declaration_survives_the_text_form_and_lifting():
    declared = Model().export(raw(FORWARD, STEP))
    again = nn.ir.parse(str(declared))
    assert again == declared
    assert str(again) == str(declared)
    lifted = nn.passes.lift_transform_params(declared, shared_transform=True)
    assert lifted["forward"].attrs["special_cases"] == declared["forward"].attrs["special_cases"]


@pytest.mark.parametrize("lifts", [False, True])
def test_compile_applies_what_is_declared_and_results_stay(lifts):
    values = weights()
    sessions = []
    for ir in (Model().export(raw(FORWARD, STEP)), Model().export(raw())):
        ir = nn.passes.lift_transform_params(ir, shared_transform=True) if lifts else ir
        sessions.append(nn.compile(ir).load(values))
    special, general = sessions
    assert general.hits("forward") == {}
    for n in (1, 2, 9, 32, 7):
        for mask in (torch.zeros(n, n), torch.full((n, n), -torch.inf).triu(1), torch.randn(n, n)):
            x = torch.randn(n, 4)
            torch.testing.assert_close(
                special["forward"](x, mask), general["forward"](x, mask), equal_nan=True
            )
    assert list(special.hits("forward").values()) == [3, 2, 3, 3, 4]
    for batch, seq in ((1, 1), (2, 4), (1, 6), (2, 1)):
        x = torch.randn(batch, seq, 4)
        caches = [s.make_cache(batch=batch, max_seq=8) for s in sessions]
        first, second = (s["step"](x, c) for s, c in zip(sessions, caches, strict=True))
        torch.testing.assert_close(first, second)
        assert caches[0].lengths == caches[1].lengths == [seq] * batch
    assert special.hits("step") == {
        "batch == 1 and seq == 1": 1,
        "seq % 2 == 0 and 2 <= seq <= 6": 2,
        "general": 1,
    }


def test_variants_share_weights_and_one_transform():
    ir = nn.passes.lift_transform_params(
        nn.passes.special_cases(Model().export(raw(FORWARD))), shared_transform=True
    )
    assert [f.name for f in ir.functions if f.kind == "transform"] == ["transform_params"]
    assert len(ir["forward"].weights) == 3


def test_cases_given_by_hand_take_the_place_of_those_declared():
    model = Model()
    declared, plain = model.export(raw(FORWARD)), model.export(raw())
    assert nn.passes.special_cases(declared, "forward", [{"n": 5}]) == nn.passes.special_cases(
        plain, "forward", [{"n": 5}]
    )
    assert nn.passes.special_cases(declared, "forward", []) == plain
    assert nn.passes.special_cases(declared, "forward") == nn.passes.special_cases(declared)


def test_binding_a_dim_settles_what_is_declared_of_it():
    declared = Model().export(raw(FORWARD, STEP))
    assert "special_cases" not in nn.passes.bind_dims(declared, {"n": 1}, ["forward"])["forward"].attrs
    nine = nn.passes.bind_dims(declared, {"n": 9}, ["forward"])
    assert nine["forward"].attrs["special_cases"] == ({"mask": ("causal", -float("inf"))},)
    sixteen = nn.passes.bind_dims(declared, {"n": 16}, ["forward"])
    assert "special_cases" not in sixteen["forward"].attrs
    renamed = nn.passes.bind_dims(declared, {"batch": "rows"}, ["step"])
    assert renamed["step"].attrs["special_cases"][0] == {"rows": 1, "seq": 1}
    assert renamed["step"].attrs["special_cases"][1] == declared["step"].attrs["special_cases"][1]
    nn.compile(nine).load(weights())["forward"](torch.randn(9, 4), torch.zeros(9, 9))


def test_a_dim_of_the_weights_may_be_asked_for():
    class Scaled(nn.Module):
        def __init__(self):
            self.scale = nn.Parameter(["features"], "float32")

        def forward(self, x):
            return x * self.scale

    methods = {"forward": {"x": spec.Tensor(["n", "features"]), "$": {"special_cases": [{"features": 4}]}}}
    executable = nn.compile(Scaled().export(methods))
    four, five = (executable.load({"scale": torch.ones(n)}) for n in (4, 5))
    four["forward"](torch.ones(2, 4))
    five["forward"](torch.ones(2, 5))
    assert (four.hits("forward"), five.hits("forward")) == (
        {"features == 4": 1, "general": 0},
        {"features == 4": 0, "general": 1},
    )


DIMS = "dims are n; arguments are x, mask"
SIGNATURE = "forward: signature: (x, mask)"


@pytest.mark.parametrize(
    ("cases", "lines"),
    [
        (
            [{"maks": 1}],
            [f"forward has no dim and no argument 'maks' ({DIMS}; did you mean 'mask'?)"],
        ),
        (
            [{"n": "1"}, {"q": 1}],
            [
                "'1' is no condition on dim 'n' of forward (give a number, a range (least, greatest), multiple_of(number), or a list of these)",
                f"forward has no dim and no argument 'q' ({DIMS})",
            ],
        ),
        ([{"n": 65}], ["'n == 65' never holds for forward (n is between 0 and 64)"]),
        (
            [{"n": (2, 8)}, {"n": 4}],
            [
                "case 1 of forward, 'n == 4', is never reached (case 0, '2 <= n <= 8', takes all of its inputs; put it first, or leave it out)"
            ],
        ),
        ([{}], ["a case of forward has no condition (the general case needs no mention)"]),
        ([3], ["a case of forward is 3, not a dict (the general case needs no mention)"]),
        (
            [{"mask": True}],
            [
                "True is no condition on argument 'mask' of forward (give zeros or causal for a tensor, or a number for a host argument or a tensor without axes)"
            ],
        ),
    ],
    ids=["near name", "two mistakes", "impossible", "covered", "empty", "no dict", "value"],
)
def test_mistakes_are_said_in_the_error_of_the_spec(cases, lines):
    with pytest.raises(SpecError) as caught:
        Model().export(raw(cases))
    assert caught.value.what == "the spec does not fit the module"
    assert list(caught.value.details) == [
        *(f"forward: '$' 'special_cases': {line}" for line in lines),
        SIGNATURE,
    ]


def test_mistakes_stand_with_those_of_other_entries():
    methods = raw()
    methods["forward"]["$"] = {"special_cases": "n == 1", "param_mod": 1}
    methods["forward"]["y"] = spec.Tensor([1])
    with pytest.raises(SpecError) as caught:
        Model().export(methods)
    assert list(caught.value.details) == [
        "forward: '$' has the unknown key 'param_mod'",
        "forward: 'y' is not an argument",
        "forward: '$' 'special_cases' is 'n == 1', not a list of cases",
        SIGNATURE,
    ]


def test_the_spec_is_left_as_it_was():
    methods = raw(FORWARD)
    before = repr(methods)
    Model().export(methods)
    assert repr(methods) == before
