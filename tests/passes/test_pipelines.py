# SPDX-License-Identifier: Apache-2.0
"""Pipelines: what `compile` runs is listed with the others, made of declared passes, and written out when asked."""

from __future__ import annotations

import pytest
from pass_checks import module

from nnfront.backends.registry import backend_of, targets
from nnfront.compiler import compile
from nnfront.ir import first_difference, parse
from nnfront.passes import PASSES, PIPELINES, run
from nnfront.passes.base import step_name

TEXT = """
def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] attrs(special_cases=({"n": 1},)) {
    h: float32[n, 4] = linear(x, w)
    y: float32[n, 4] = silu(h)
    return y
}
"""


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_made_of_declared_passes(name):
    assert {step_name(step) for step in PIPELINES[name]} <= PASSES.keys()


@pytest.mark.parametrize("target", targets())
def test_every_target_has_a_pipeline(target):
    assert [step_name(step) for step in backend_of(target).passes(target)] in [
        [step_name(step) for step in steps] for steps in PIPELINES.values()
    ]


def test_compile_runs_the_pipeline_of_its_target_and_writes_its_steps_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("NNFRONT_DUMP", str(tmp_path))
    executable = compile(module(TEXT), target="cpu")
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [f"{i:02}_{step_name(step)}.nnir" for i, step in enumerate(PIPELINES["cpu"])]
    last = parse((tmp_path / written[-1]).read_text())
    assert first_difference(last, executable.ir) is None
    monkeypatch.delenv("NNFRONT_DUMP")
    assert first_difference(run(module(TEXT), "cpu"), executable.ir) is None
    assert first_difference(module(TEXT), executable.ir) is not None
