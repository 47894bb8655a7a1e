# SPDX-License-Identifier: Apache-2.0
"""Profiles of calls: what is measured, that nothing of the call's state changes, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import RunError
from nnfront.lower import Run
from nnfront.runtime.profile import Clock

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(scope="module")
def session() -> nn.Session:
    ir = llama.build(llama.TINY).export(llama.export_spec(llama.TINY))
    torch.manual_seed(0)
    weights = {p.name: torch.randn(p.type.shape) / 8 for p in ir["logits"].weights}
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    return executable.load({**weights})


def test_a_profile_has_one_event_for_each_instruction_that_runs(session: nn.Session) -> None:
    args = session.random_arguments("decode", batch=2, max_seq=16)
    profile = session.profile("decode", *args)
    runs = [i for i in session["decode"].program.body.walk() if isinstance(i, Run)]
    assert [(e.op, e.kernel, e.module) for e in profile.events] == [(r.op, r.kernel, r.module) for r in runs]
    assert profile.dims == {"batch": 2, "max_seq": 16}
    assert profile.seconds > 0
    assert all(event.seconds > 0 for event in profile.events)


def test_bytes_and_flops_are_those_of_the_sizes_of_the_call(session: nn.Session) -> None:
    args = session.random_arguments("decode", batch=2, max_seq=16)
    head = session.profile("decode", *args).events[-1]
    hidden, vocabulary = llama.TINY.hidden_size, llama.TINY.vocab_size
    assert head.flops is not None
    assert head.flops >= 2 * 2 * hidden * vocabulary
    assert head.nbytes == 4 * (2 * hidden + hidden * vocabulary + 2 * vocabulary)


def test_profiling_leaves_caches_and_counts_of_cases_as_they_were(session: nn.Session) -> None:
    tokens, cache = session.random_arguments("decode", batch=2, max_seq=16, filled=5)
    again = cache.clone()
    session.profile("decode", tokens, cache)
    assert cache.lengths == [5, 5]
    assert torch.equal(session["decode"](tokens, cache), session["decode"](tokens, again))


def test_the_trace_is_one_event_after_the_other(session: nn.Session) -> None:
    profile = session.profile("decode", *session.random_arguments("decode", max_seq=16))
    events = json.loads(json.dumps(profile.trace()))["traceEvents"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert sum(event["dur"] for event in events) == pytest.approx(1e6 * profile.apart)
    assert {event["ph"] for event in events} == {"X"}


def test_random_arguments_take_sizes_and_fill_caches(session: nn.Session) -> None:
    tokens, cache = session.random_arguments("prefill", batch=3, seq=4, max_seq=20, filled=7)
    assert (tuple(tokens.shape), cache.batch, cache.max_seq, cache.lengths) == ((3, 4), 3, 20, [7, 7, 7])
    assert int(tokens.max()) < llama.TINY.vocab_size
    with pytest.raises(RunError, match="'sequence' is not a dim of prefill"):
        session.random_arguments("prefill", sequence=4)


def test_explain_of_a_session_is_that_of_the_executable_without_a_method(session: nn.Session) -> None:
    table = session.explain(batch=1, max_seq=8)
    assert isinstance(table, str)
    assert table.splitlines()[0].split() == ["method", "op", "kernel", "bytes", "flops", "module", "why"]


def test_the_command_prints_kernels_and_measures_a_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(FOLDER), "decode", "batch=1", "max_seq=64"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in table[1:]} == {"decode"}
    trace = tmp_path / "trace.json"
    command = ["explain", str(FOLDER), "decode", "batch=1", "max_seq=64", "--filled", "9"]
    assert main([*command, "--profile", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("decode(batch=1, max_seq=64): ")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decod"], "there is no method 'decod'"),
        (["decode", "batch=two"], "batch=two gives no number for a dim"),
        (["--profile"], "--profile measures one method"),
        (["decode", "--trace", "x"], "--trace without --profile has nothing to write"),
    ],
)
def test_what_the_command_cannot_do_is_one_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(FOLDER), *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_step_ends_when_the_device_has_done_its_work(kind, monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(getattr(torch, kind), "synchronize", waited.append)
    Clock(torch.device(kind, 1)).now()
    assert waited == [torch.device(kind, 1)]
