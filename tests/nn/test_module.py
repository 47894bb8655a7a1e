# SPDX-License-Identifier: Apache-2.0
"""Module behaves as torch users expect, finds what stands in plain containers, and is rewritten by Mutator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import InferError, LoadError, RunError, TraceError


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        self.proj = nn.Linear(size, size)
        self.scale = 0.5

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.proj(x) * self.scale


class Tree(nn.Module):
    def __init__(self) -> None:
        self.embed = nn.Parameter((7, 4))
        self.blocks = [Block(), Block()]
        self.named = {"a": Block(), "b": (Block(), nn.Parameter((2,)))}
        self.listed = nn.ModuleList([Block()])
        self.keyed = nn.ModuleDict({"x": Block()})
        self.params = nn.ParameterList([nn.Parameter((3,))])
        self.param_dict = nn.ParameterDict({"w": nn.Parameter((5,))})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.listed(self.keyed["x"](x)))


NAMES = [
    "embed",
    *(f"blocks.{i}.proj.{n}" for i in (0, 1) for n in ("weight", "bias")),
    *(f"named.{k}.proj.{n}" for k in ("a", "b.0") for n in ("weight", "bias")),
    "named.b.1",
    *(f"listed.0.proj.{n}" for n in ("weight", "bias")),
    *(f"keyed.x.proj.{n}" for n in ("weight", "bias")),
    "params.0",
    "param_dict.w",
]


def test_parameters_are_found_by_attribute_path_in_every_container() -> None:
    assert [name for name, _ in Tree().named_parameters()] == NAMES
    assert list(Tree().state_dict()) == NAMES


def test_a_parameter_reached_twice_is_one_and_its_other_path_an_alias() -> None:
    assert Tree().aliases() == {"head.weight": "embed"}
    ir = Tree().export({"forward": {"x": spec.Tensor(["n", 4], "float32")}})
    assert ir.aliases == {"head.weight": "embed"}
    assert [w.name for w in ir["forward"].weights].count("embed") == 1


def test_modules_are_walked_as_in_torch() -> None:
    tree = Tree()
    paths = dict(tree.named_modules())
    assert paths[""] is tree
    assert paths["named.b.0"] is tree.named["b"][0]
    assert [name for name, _ in tree.named_children()] == ["blocks.0", "blocks.1", "named.a", "named.b.0", "listed", "keyed", "params", "param_dict", "head"]  # fmt: skip
    seen: list[nn.Module] = []
    assert tree.apply(seen.append) is tree
    assert seen[-1] is tree
    assert len(seen) == len(list(tree.modules()))


def test_a_tree_with_a_cycle_is_walked_once() -> None:
    block = Block()
    block.parent = block
    assert [name for name, _ in block.named_parameters()] == ["proj.weight", "proj.bias"]


def random_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn(tuple(p.shape)) for name, p in module.named_parameters()}


def test_a_state_is_bound_and_given_back() -> None:
    tree, state = Tree(), random_state(Tree())
    assert tree.load_state_dict(state) == ([], [])
    assert all(torch.equal(tree.state_dict()[name], value) for name, value in state.items())


def test_a_state_may_hold_both_names_of_a_tied_parameter_if_they_agree() -> None:
    tree, state = Tree(), random_state(Tree())
    tree.load_state_dict({**state, "head.weight": state["embed"].clone()})
    with pytest.raises(
        LoadError, match=r"head\.weight: the parameter is tied to 'embed', whose value differs"
    ):
        Tree().load_state_dict({**state, "head.weight": state["embed"] + 1})


def test_everything_wrong_with_a_state_comes_at_once_and_nothing_is_bound() -> None:
    tree, state = Tree(), random_state(Tree())
    del state["params.0"]
    state["blocks.0.proj.weigth"] = state.pop("blocks.0.proj.weight")
    state["embed"] = torch.randn(6, 4)
    state["named.b.1"] = torch.ones(2, dtype=torch.int64)
    with pytest.raises(LoadError) as caught:
        tree.load_state_dict(state)
    for part in (
        "missing: params.0",
        "missing: blocks.0.proj.weight",
        "unexpected: blocks.0.proj.weigth (did you mean 'blocks.0.proj.weight'?)",
        "embed: got float32[6, 4], expected float32[7, 4]",
        "named.b.1: got int64[2], expected float32[2]",
    ):
        assert part in str(caught.value)
    assert all(p.data is None for p in tree.parameters())


def test_a_partial_state_is_taken_when_it_is_said_to_be() -> None:
    tree = Tree()
    missing, unexpected = tree.load_state_dict(
        {"params.0": torch.zeros(3), "zzz": torch.zeros(1)}, strict=False
    )
    assert "embed" in missing
    assert "params.0" not in missing
    assert unexpected == ["zzz"]


def test_to_changes_float_parameters_and_their_values() -> None:
    tree = Tree()
    tree.steps = nn.Parameter((1,), "int64")
    tree.load_state_dict({**random_state(Tree()), "steps": torch.tensor([3])})
    assert tree.to("bfloat16") is tree
    assert {p.dtype for p in tree.parameters()} == {"bfloat16", "int64"}
    assert tree.embed.data is not None
    assert tree.embed.data.dtype == torch.bfloat16


def test_values_are_checked_when_they_are_bound() -> None:
    p = nn.Parameter(("n", 4))
    p.data = np.zeros((3, 4), np.float32)
    with pytest.raises(LoadError, match=re.escape("got float32[3, 5], expected float32[n, 4]")):
        p.data = torch.zeros(3, 5)
    with pytest.raises(LoadError, match="got float64"):
        p.data = np.zeros((3, 4))
    square = nn.Parameter(("n", "n"))
    with pytest.raises(LoadError, match=re.escape("expected float32[n, n]")):
        square.data = torch.zeros(3, 4)


def test_the_default_dtype_is_used_and_can_be_set() -> None:
    assert nn.get_default_dtype() == "float32"
    nn.set_default_dtype("bfloat16")
    try:
        assert nn.Linear(2, 2).weight.dtype == "bfloat16"
        assert nn.Linear(2, 2, dtype="float16").weight.dtype == "float16"
    finally:
        nn.set_default_dtype("float32")


def test_a_module_runs_eagerly_on_torch_tensors_only_when_its_parameters_have_values() -> None:
    tree = Tree()
    with pytest.raises(RunError, match=r"(?s)<Parameter float32\[4, 4\]> has no value.*load_state_dict"):
        tree(torch.randn(2, 4))
    tree.load_state_dict(random_state(tree))
    x = torch.randn(2, 4)
    y = tree(x)
    for block in [*tree.blocks, tree.keyed["x"], tree.listed[0]]:
        x = torch.nn.functional.linear(x, block.proj.weight.data, block.proj.bias.data) * 0.5
    torch.testing.assert_close(y, x @ tree.embed.data.T)


def test_the_text_form_shows_the_tree() -> None:
    text = repr(Tree())
    assert "(blocks.1): Block(scale=0.5" in text
    assert "weight: float32[7, 4]" in text


def test_lists_and_dicts_of_modules_behave_like_lists_and_dicts() -> None:
    layers = nn.ModuleList([Block()])
    layers.append(Block())
    layers.extend([Block()])
    layers.insert(0, Block())
    assert len(layers) == 4
    assert isinstance(layers[1:3], nn.ModuleList)
    assert [name for name, _ in layers[:2].named_parameters()] == [
        "0.proj.weight",
        "0.proj.bias",
        "1.proj.weight",
        "1.proj.bias",
    ]
    keyed = nn.ModuleDict({"a": Block()})
    keyed.update({"b": Block()})
    assert list(keyed) == ["a", "b"]
    assert "b" in keyed
    assert keyed.pop("b") is not None
    assert keyed.get("b") is None


class Half(nn.Module):
    """Takes the place of a Linear: its weight is a formula over what the checkpoint holds."""

    def __init__(self, linear: nn.Linear) -> None:
        self.stored = linear.weight
        self.weight = self.stored * 0.5

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.linear(x, self.weight)


class Halve(nn.Mutator):
    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_module(self, name: str, node: nn.Module) -> Any:
        if isinstance(node, nn.Linear):
            self.names.append(name)
            return Half(node)
        return super().visit_module(name, node)


def test_a_mutator_replaces_modules_everywhere_under_their_paths() -> None:
    tree = Tree()
    mutator = Halve()
    assert mutator.visit("", tree) is tree
    assert mutator.names == ["blocks.0.proj", "blocks.1.proj", "named.a.proj", "named.b.0.proj", "listed.0.proj", "keyed.x.proj", "head"]  # fmt: skip
    assert isinstance(tree.named["b"][0].proj, Half)
    assert tree.head.stored is tree.embed
    state = random_state(tree)
    tree.load_state_dict(state)
    x = torch.randn(2, 4)
    expected = x
    for path in ("blocks.0", "blocks.1", "keyed.x", "listed.0"):
        expected = expected @ state[f"{path}.proj.stored"].T * 0.25
    torch.testing.assert_close(tree(x), expected @ state["embed"].T * 0.5)


def test_a_mutator_visits_a_shared_module_once_and_replaces_it_everywhere() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Linear(4, 4)
            self.b = self.a

    module = Twice()
    mutator = Halve()
    mutator.visit("", module)
    assert mutator.names == ["a"]
    assert module.a is module.b


def test_a_mutator_may_replace_parameters() -> None:
    class Widen(nn.Mutator):
        def visit_param(self, name: str, node: nn.Parameter) -> Any:
            return nn.Parameter(node.shape, "float64")

    tree = Widen().visit("", Tree())
    assert {p.dtype for p in tree.parameters()} == {"float64"}
    assert tree.head.weight is tree.embed


OPERATORS: dict[str, Any] = {
    "matmul": lambda x, y: x @ y.T if isinstance(x, torch.Tensor) else x @ y.permute_dims(),
    "arithmetic": lambda x, y: -(x + 1) * y / 2 - 3 / (y * y + 1) + (1 - x),
    "power": lambda x, y: (x**2) ** 0.5 + 2**y,
    "floor and remainder": lambda x, y: x // 0.3 + y % 0.7,
    "comparisons": lambda x, y: (x < y) | (x >= 0.5) & (y != 0) ^ (x == y),
    "not and abs": lambda x, y: abs(x) * (~(x > y)),
    "slices": lambda x, y: x[1:, ::2] + y[None, :-1, [0][0] : 4 : 2][0],
    "ellipsis": lambda x, y: x[..., -1] * y[..., 0],
    "reflected": lambda x, y: 2 - x + 2 * y + 5 // (y * y + 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_torch_eager_and_exported(name: str) -> None:
    function = OPERATORS[name]

    class Model(nn.Module):
        def forward(self, x: nn.Tensor, y: nn.Tensor) -> Any:
            return function(x, y)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    t = spec.Tensor(["n", 4], "float32")
    run = nn.compile(
        Model().export(
            {"forward": {"x": spec.Tensor([3, 4], "float32"), "y": spec.Tensor([3, 4], "float32")}}
        )
    )
    torch.testing.assert_close(Model()(x, y), function(x, y), check_dtype=True)
    torch.testing.assert_close(run.load({})["forward"](x, y), function(x, y), check_dtype=True)
    assert Model().export({"forward": {"x": t, "y": t}}) is not None


def test_constants_and_numpy_values_mix_with_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.table = torch.arange(4.0)
            self.shift = np.float32(2.0)
            self.const = nn.Tensor.from_const(np.ones((4,), np.float32))

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return x * self.table + self.shift - self.const + nn.Tensor.from_scalar(1.0, "float32")

    x = torch.randn(3, 4)
    ir = Model().export({"forward": {"x": spec.Tensor(["n", 4], "float32")}})
    for y in (Model()(x), nn.compile(ir).load({})["forward"](x)):
        torch.testing.assert_close(y, x * torch.arange(4.0) + 2)


def test_ops_on_torch_tensors_alone_give_torch_tensors() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(op.softmax(x, axis=0), torch.softmax(x, 0))
    assert [tuple(t.shape) for t in op.split(x, 2, -1)] == [(3, 2), (3, 2)]


def test_what_is_no_operand_is_refused_by_name() -> None:
    with pytest.raises(InferError, match=r"(?s)relu: 'x' is not a tensor or a number.*test_module\.py:\d+"):
        op.relu("x")
    with pytest.raises(InferError, match="matmul: missing a required argument: 'b'"):
        op.matmul(torch.ones(2, 2))
    with pytest.raises(AttributeError, match=r"nnfront\.op has no function 'matmull'"):
        op.matmull  # noqa: B018
    with pytest.raises(TraceError, match=r"op\.cond is used outside a method"):
        op.cond(nn.Parameter((1,)), lambda: 1, lambda: 2)
