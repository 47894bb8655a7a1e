# SPDX-License-Identifier: Apache-2.0
"""What is written anew for a call of other sizes: tapes that read them, and nothing twice for layers that are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sequence import BASE, language_model, stepwise

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import tape as sequence
from nnfront.backends.cpu import tape_builder as writers
from nnfront.backends.cpu.extension import NATIVE
from nnfront.state.between import between_steps

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")


class Two(nn.Module):
    """Rows of two sizes, each multiplied and normalised, with a step of torch between them."""

    def __init__(self) -> None:
        self.first = nn.Linear(64, 64, bias=False, dtype="bfloat16")
        self.second = nn.Linear(64, 64, bias=False, dtype="bfloat16")
        self.norm = nn.RMSNorm(64, bias=False, dtype="bfloat16")

    def forward(self, x: nn.Tensor, y: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        x = op.erf(self.norm(self.first(x)))
        return x, self.second(self.norm(self.second(y)))


def noted(patch: pytest.MonkeyPatch, of: type, name: str, what: Callable[[Any], Any]) -> list[Any]:
    """What calls of a method are of, from now on."""
    method, found = getattr(of, name), []

    def note(self: Any, *args: Any) -> Any:
        found.append(what(*args, self))
        return method(self, *args)

    patch.setattr(of, name, note)
    return found


def test_a_tape_is_written_once_for_the_sizes_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"forward": {"x": spec.Tensor(["n", 64], "bfloat16"), "y": spec.Tensor(["m", 64], "bfloat16")}}
    shapes = {name: tuple(p.shape) for name, p in Two().named_parameters()}
    torch.manual_seed(0)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    executable = nn.compile(Two().export(methods))
    session, single = executable.load(weights), stepwise(lambda: executable.load(weights))
    written = noted(monkeypatch, writers.TapeBuilder, "tape", lambda builder: len(builder.rows))
    counts = []
    for n, m in ((3, 4), (3, 5), (2, 5), (2, 4)):
        given = torch.randn(n, 64).bfloat16(), torch.randn(m, 64).bfloat16()
        found = session["forward"](*given)
        counts.append(sum(rows > 1 for rows in written))
        assert all(map(torch.equal, found, single["forward"](*given)))
        written.clear()
    assert counts == [2, 1, 1, 0]


def test_instructions_of_layers_that_are_alike_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = noted(monkeypatch, sequence._Planner, "_count", lambda run, planner: run.kernel)
    found = []
    for layers in (2, 5):
        session = language_model(dataclasses.replace(BASE, num_hidden_layers=layers))()
        cache = session.make_cache(batch=1, max_seq=32)
        session["prefill"](torch.arange(4)[None], cache)
        asked.clear()
        session["decode"](torch.tensor([[7]]), cache)
        found.append(list(asked))
    assert found[0] == found[1]
    assert len(found[0]) > 5


def test_many_tokens_are_one_call_of_c_unless_something_is_done_between_steps(monkeypatch) -> None:
    tokens = 1 + sequence.MOST_HELD_BETWEEN // (2 * BASE.hidden_size)
    config = dataclasses.replace(BASE, num_hidden_layers=3, max_position_embeddings=tokens)
    session = language_model(config)()
    runs = noted(monkeypatch, writers.Tape, "run", lambda _, tape: len(tape.rows))
    between: list[int] = []

    def prompt() -> tuple[torch.Tensor, list[int]]:
        runs.clear()
        cache = session.make_cache(batch=1, max_seq=tokens)
        return session["prefill"](torch.arange(tokens)[None] % 259, cache), list(runs)

    expected, one = prompt()
    with between_steps(lambda: between.append(len(runs))):
        found, several = prompt()
    of_layers = 3 * config.num_hidden_layers
    assert max(several) < of_layers < max(one)
    assert len(set(between)) > of_layers
    assert torch.equal(found, expected)
