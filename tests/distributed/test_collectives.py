# SPDX-License-Identifier: Apache-2.0
"""Collectives as ops: nothing moves, merges or drops them, no data decide about them, and alone they say what is missing."""

from __future__ import annotations

import os
import re

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.cli import main
from nnfront.distributed.ranks import take_gpu
from nnfront.errors import LoadError, RunError, VerifyError


class Twice(nn.Module):
    """Adds up the same value twice; nobody reads the second sum, nor what is gathered."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = op.all_reduce(x, 2)
        op.all_reduce(x, 2)
        op.all_gather(x, 0, 2)
        op.all_to_all(op.concat([x, x]), 2)
        return y


def exported(model: nn.Module, dtype: str = "float32") -> nn.ir.IRModule:
    return model.export({"forward": {"x": spec.Tensor(["n", 4], dtype)}})


def collectives(module: nn.ir.IRModule) -> list[str]:
    return re.findall(r"= (all_\w+)\(", str(module["forward"]))


def test_no_pass_drops_merges_or_moves_a_collective() -> None:
    module = exported(Twice())
    expected = ["all_reduce", "all_reduce", "all_gather", "all_to_all"]
    assert collectives(module) == expected
    for pipeline in nn.passes.PIPELINES:
        assert collectives(nn.passes.run(module, pipeline)) == expected, pipeline
    kernels = [run.op for run in nn.compile(module).program.methods["forward"].body.instructions]
    assert [name for name in kernels if name.startswith("all_")] == expected


class Sum(nn.Module):
    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.all_reduce(x, 2)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        self.inner = Sum()

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.cond(op.any(op.greater(x, 0.0)), lambda: self.inner(x), lambda: x)


def test_no_data_decide_whether_ranks_meet() -> None:
    with pytest.raises(VerifyError) as error:
        exported(Sometimes())
    lines = str(error.value).split("\n")
    assert lines[0] == "V22: all_reduce is under a condition that data decide"
    assert "  ranks might decide differently, and then one waits for others that do not come" in lines
    assert lines[-1] == "  help: take it out of the branch, or let sizes decide"


def test_sizes_may_decide_whether_ranks_meet() -> None:
    cases = [{"n": nn.multiple_of(2)}]
    module = Sum().export({"forward": {"x": spec.Tensor(["n", 4], "float32"), "$": {"special_cases": cases}}})
    module = nn.passes.run(module, "cpu")
    nn.ir.verify(module)
    assert re.search(r"within\(.*\n.* if ", str(module))


def test_a_process_alone_says_how_ranks_are_started() -> None:
    session = nn.compile(exported(Twice())).load({})
    with pytest.raises(RunError) as error:
        session["forward"](torch.ones(1, 4))
    assert str(error.value).startswith("all_reduce is among 2 ranks, but this process is one of 1\n")
    assert "help: start it with nnfront run --tp 2, or with torchrun --nproc-per-node 2" in str(error.value)


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(LoadError, match=re.escape("rank 2 is none of 2: they are 0 to 1")):
        nn.compile(exported(Twice())).of_rank(2)


@pytest.mark.parametrize(
    ("x", "attrs", "expected"),
    [
        ([6, 4], {"axis": 0, "world": 2}, [[0, 1, 2], [3, 4, 5]]),
        ([5, 4], {"axis": 0, "world": 2}, [[0, 1, 2], [3, 4, None]]),
        ([6, 4], {"axis": 0, "world": 2, "blocks": [(2, 2), (4, 2)]}, [[0, 2, 3], [1, 4, 5]]),
        ([6, 4], {"axis": 0, "world": 4, "blocks": [(4, 4), (2, 2)]}, [[0, 4], [1, 4], [2, 5], [3, 5]]),
    ],
)
def test_ranks_hold_these_rows(
    x: list[int], attrs: dict[str, object], expected: list[list[int | None]]
) -> None:
    """Row i is all i + 1, so that rows that are filled up are 0."""
    rows = torch.arange(1.0, x[0] + 1)[:, None].expand(x)
    for rank, found in enumerate(expected):
        part = op.shard(rows, torch.tensor(rank), **attrs)
        assert part[:, 0].tolist() == [0 if i is None else i + 1 for i in found]
        across = op.shard(rows.T, torch.tensor(rank), **{**attrs, "axis": 1})
        assert torch.equal(across.T, part)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LoadError) as error:
        take_gpu(1, 2)
    assert str(error.value) == (
        "there are 2 ranks, but 1 GPUs\n  help: start as many ranks as there are GPUs, or use --device cpu"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "x"], "nnfront show runs in one process, and 2 were started"),
        (
            ["run", "x", "-p", "y", "--tp", "3"],
            "--tp is 3, but 2 processes were started\n  help: leave --tp out under torchrun",
        ),
    ],
)
def test_commands_say_how_many_processes_they_want(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", codes.append)
    main(arguments)
    assert (codes, capfd.readouterr().err) == ([1], f"error: {said}\n")
