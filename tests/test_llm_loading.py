# SPDX-License-Identifier: Apache-2.0
"""What loading a folder says, and what it keeps for the next time: `LLM.load` and `nnfront run --cache`."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import pytest
import torch

import nnfront as nn
from nnfront.cli import loading, main
from nnfront.cli import progress as bar
from nnfront.errors import LoadError
from nnfront.transform.plan import TransformPlan
from nnfront.weights import transform_store as cache_module

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"


def test_a_second_load_with_a_cache_computes_nothing_that_the_first_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "SMALL_BYTES", 1)  # the model is small
    computed: list[str] = []
    stream = cache_module.stream_transform

    def noting(*args, **kwargs):
        for name, value in stream(*args, **kwargs):
            computed.append(name)
            yield name, value

    monkeypatch.setattr(cache_module, "stream_transform", noting)
    ids = torch.tensor([[5, 6, 7]])
    expected = nn.LLM.load(FOLDER, dtype="float32").logits(ids)
    for is_first in (True, False):
        computed.clear()
        llm = nn.LLM.load(FOLDER, dtype="float32", cache=tmp_path / "cache")
        assert bool(computed) == is_first
        assert torch.equal(llm.logits(ids), expected)


def test_the_plan_is_told_before_anything_is_read_and_progress_to_the_end() -> None:
    events: list[object] = []
    nn.LLM.load(FOLDER, dtype="float32", plan=events.append, progress=lambda *step: events.append(step))
    first, *steps = events
    assert isinstance(first, TransformPlan)
    assert first.peak_kept_bytes >= first.resident_bytes > 10_000_000  # 3 million floats
    assert steps[-1] == (len(steps), len(steps))


def test_an_artefact_takes_no_cache(tmp_path: Path) -> None:
    nn.LLM.load(FOLDER).save(tmp_path / "out")
    text = "is an artefact: its weights are made already\n  help: leave the cache out"
    with pytest.raises(LoadError, match=text):
        nn.LLM.load(tmp_path / "out", cache=tmp_path / "cache")


@pytest.mark.parametrize("cached", [False, True])
def test_run_says_what_loading_takes_if_it_is_much(cached: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    arguments = ["run", str(FOLDER), "-p", "x = ", "-n", "2", "--dtype", "float32"]
    arguments += ["--cache", str(tmp_path / "cache")] if cached else []
    assert main(arguments) == 0
    assert "loading takes" not in capsys.readouterr().err
    monkeypatch.setattr(loading, "WORTH_SAYING_BYTES", 1)
    plans: list[TransformPlan] = []
    nn.LLM.load(FOLDER, dtype="float32", plan=plans.append)
    peak = plans[0].peak_bytes if cached else plans[0].peak_kept_bytes
    assert main(arguments) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"loading takes at most {peak / 1e6:.1f} MB of memory besides mapped files\n")
    assert cached == (tmp_path / "cache" / "results").exists()


def test_a_cache_that_cannot_be_is_one_line_and_exit_code_1(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["run", str(FOLDER), "-p", "x", "--cache", str(tmp_path / "file")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {tmp_path}/file/results: the cache cannot be made: Not a directory\n"


class Terminal(io.StringIO):
    """A stderr that people look at."""

    def isatty(self) -> bool:
        return True


class TestBar:
    def test_on_a_terminal_it_shows_how_far_the_work_is(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        monkeypatch.setattr(bar, "SECONDS", 0)
        monkeypatch.setattr(
            "tqdm.std.time", itertools.count().__next__
        )  # more often than ten times a second it is not drawn
        show = bar.progress_bar("weights", "step")
        assert show is not None
        for _ in range(2):  # one transform after another
            for done in (1, 2, 4):
                show(done, 4)
        assert terminal.getvalue().count("weights:  50%") == 2

    def test_work_that_is_done_at_once_shows_none(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        show = bar.progress_bar("weights", "step")
        assert show is not None
        show(4, 4)
        assert not terminal.getvalue().strip()

    def test_where_nobody_looks_there_is_none(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert bar.progress_bar("weights") is None

    def test_without_tqdm_there_is_none(self, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setitem(sys.modules, "tqdm", None)
        assert bar.progress_bar("weights") is None


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_what_a_folder_holds_now_is_read_as_it_was_loaded(dtype: str | None) -> None:
    llm = nn.LLM.load(FOLDER, dtype=dtype)
    read = llm.read()
    for name, value in llm.session.weights.items():
        if name in read:
            assert torch.equal(read[name], value), name
    assert set(llm.session.update(read)) <= set(llm.session.weights)
    golden = nn.LLM.load(Path(__file__).parent / "weights" / "golden" / "llama-1")
    with pytest.raises(LoadError, match="is an artefact, whose weights are made already"):
        golden.read()
