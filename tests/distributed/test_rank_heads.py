# SPDX-License-Identifier: Apache-2.0
"""Heads that guess further tokens, of models that ranks divide: all compute them together, and texts stay those of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from few_of import few_of
from rank_threads import Threads

import nnfront as nn
from nnfront.distributed.ranks import Ranks
from nnfront.engine.runner import Runner
from nnfront.engine.speculate import Pay

sys.path.append(str(Path(__file__).parents[1] / "serve"))


class Meeting(Ranks):
    """A rank among threads."""

    def __init__(self, rank: int, threads: Threads) -> None:
        super().__init__(rank, threads.world)
        self.threads = threads

    def from_first(self, value: Any) -> Any:
        self.threads.shared[self.rank] = value
        self.threads.barrier.wait()
        found = self.threads.shared[0]
        self.threads.barrier.wait()
        return found


@pytest.mark.parametrize(
    ("model_type", "is_artefact"),
    few_of([("deepseek_v3", True), ("deepseek_v3", False), ("qwen3_next", False)], 1),
)
def test_texts_with_a_head_are_those_of_one_process_without(
    model_type: str, is_artefact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model_folders import random_folder

    path = random_folder(tmp_path / "model", model_type, "float32", mtp=True)
    prompts = [torch.tensor([5, 6, 7, 8] * 3), torch.tensor([9] * 5)]
    expected = [text.tolist() for text in nn.LLM.load(path, mtp=True).generate_ids(prompts, 12)]
    folder = nn.compile_folder(path, ranks=2, methods=nn.Methods.DRAFT)
    if is_artefact:
        nn.artefact.export(path, tmp_path / "made", ranks=2, mtp=True)
    threads, runners = Threads(2, monkeypatch), set[Runner]()
    step = Runner._guess
    monkeypatch.setattr(Runner, "_guess", lambda self: (runners.add(self), step(self))[1])
    # Each has its own opinion about what pays, by its own clock; that of the first one counts.
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: threads.here.rank == 0)

    def texts(rank: int) -> list[list[int]]:
        session = (
            nn.load(tmp_path / "made", rank=rank, ranks=2)
            if is_artefact
            else folder.executable.of_rank(rank).load(folder.checkpoint)
        )
        assert folder.text is not None
        llm = nn.LLM(session, folder.text, folder.config, path, files=folder.folder)
        llm.ranks = Meeting(rank, threads)
        return [text.tolist() for text in llm.generate_ids(prompts, 12, spec="mtp:2")]

    assert threads.run(texts) == [expected, expected]
    assert len({runner.drafted for runner in runners}) == 1
    assert next(iter(runners)).drafted > 8
    assert threads.record[0] == threads.record[1]
