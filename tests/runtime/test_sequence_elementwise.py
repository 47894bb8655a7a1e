# SPDX-License-Identifier: Apache-2.0
"""Sums, products and conversions between the products of a token: rows of the one call, bit for bit what torch computes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sequence import decoded, stepwise

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.session import Session

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]

BINARY = {"add": op.add, "multiply": op.multiply, "divide": op.divide}


class Steps(nn.Module):
    """A product, what steps make of it, and another product; then one that makes the result, which is a call of its own."""

    def __init__(self, width: int, steps: list[tuple[str, float | None]]) -> None:
        self.steps = steps
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: nn.Tensor) -> Any:
        x = start = self.first(x)
        for name, number in self.steps:
            if name in BINARY:
                x = BINARY[name](x, start if number is None else number)
            elif name == "square":
                x = op.square(x)
            else:
                x = op.astype(x, name)
        return self.head(self.last(op.astype(x, "bfloat16")))

    @staticmethod
    def load(width: int, steps: list[tuple[str, float | None]]) -> Session:
        torch.manual_seed(0)
        model = Steps(width, steps).to("bfloat16")
        ir = model.export({"forward": {"x": spec.Tensor(["batch", "seq", width], "bfloat16")}})
        return nn.compile(ir).load({n: torch.randn(p.shape).bfloat16() for n, p in model.named_parameters()})


def tapes(session: Session, method: str) -> list[tape.TapeStep]:
    return [step for step in session[method]._route.code.steps if isinstance(step, tape.TapeStep)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_steps_between_products_are_one_call_with_the_bits_of_torch(data):
    number = st.none() | st.sampled_from([0.3, 2.0, -1.7, 3])
    binary = st.tuples(st.sampled_from([*BINARY]), number)
    other = st.tuples(st.sampled_from(["square", "float32", "bfloat16"]), st.none())
    steps = data.draw(st.lists(binary | other, min_size=1, max_size=5))
    width, batch, seq = (
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
    )
    session, by_torch = Steps.load(width, steps), stepwise(lambda: Steps.load(width, steps))
    x = torch.randn(batch, seq, width).bfloat16()
    got, expected = session["forward"](x), by_torch["forward"](x)
    (one,) = session["forward"]._route.code.steps[-1:]
    assert isinstance(one, tape.TapeStep)
    assert len(tapes(session, "forward")) == 1
    ((part,),) = one.plans.values()
    assert isinstance(part, tape.TapePart)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected) or torch.equal(got.isnan(), expected.isnan())


NAMES = "arcee bamba deepseek_v3 exaone4 falcon_h1 gemma2 glm4 granite mamba2 mixtral nanochat nemotron olmo2 olmoe qwen2_moe qwen3_next"


def parts(session: Session, method: str) -> list[list[str]]:
    """What the calls of a method were made of, in order: kernels of torch, or [] for a tape."""
    found: list[list[str]] = []
    for step, run in session[method]._route.code:
        if not isinstance(step, tape.TapeStep):
            found.append([getattr(run, "kernel", "sizes")])
            continue
        *_, plan = step.plans.values()
        for part in plan:
            is_tape = isinstance(part, tape.TapePart)
            found.append([] if is_tape else [run.kernel for run in part.args[0].instructions])
    return found


@pytest.mark.parametrize("name", few_of(NAMES.split(), 4))
def test_all_layers_of_a_token_are_one_call(name):
    file = importlib.import_module(f"nnfront_models.{name}")

    def load() -> Session:
        config = dataclasses.replace(file.TINY, dtype="bfloat16")
        model = file.build(config)
        torch.manual_seed(0)
        named = model.named_parameters()
        weights = {n: (torch.randn(p.shape) * 0.1).to(getattr(torch, p.dtype)) for n, p in named}
        ir = nn.passes.lift_transform_params(model.export(file.export_spec(config)), shared_transform=True)
        return nn.compile(ir).load(weights)

    session = load()
    got = decoded(session, [3], 2)
    found = parts(session, "decode")
    # The tables of rope are made for all layers after the first projection of attention, by torch.
    tables = [i for i, part in enumerate(found) if "rope_tables" in part]
    assert found[tables[0] + 1 if tables else found.index([]) :] == [[]]
    expected = decoded(stepwise(load), [3], 2)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_is_broadcast_is_part_of_it():
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            self.scale = nn.Parameter((8,))
            self.proj = nn.Linear(8, 8, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.proj(self.proj(self.proj(self.proj(self.proj(x)) * self.scale)))

    model = Broadcast().to("bfloat16")
    ir = model.export({"forward": {"x": spec.Tensor(["n", 8], "bfloat16")}})
    weights = {n: torch.randn(p.shape).bfloat16() for n, p in model.named_parameters()}
    session = nn.compile(ir).load(weights)
    x = torch.randn(1, 8).bfloat16()
    w, scale = weights["proj.weight"], weights["scale"]
    y = (((x @ w.T) @ w.T) * scale) @ w.T @ w.T @ w.T
    torch.testing.assert_close(session["forward"](x), y, rtol=0.05, atol=2.0)
    assert parts(session, "forward") == [[]]
