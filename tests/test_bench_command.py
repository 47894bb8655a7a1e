# SPDX-License-Identifier: Apache-2.0
"""`nnfront bench`: what it measures is what passes, and comes as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import nnfront as nn
from nnfront.cli import main
from nnfront.cli.plot import Panel, plot
from nnfront.llm import timings

FOLDER = str(Path(nn.__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m")
SMALL = ["--lengths", "8,24", "--batches", "1,2", "-n", "3", "--repeats", "1"]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_for_every_length_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", FOLDER, *SMALL]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["prompt", "batch", "prefill", "ms", "tokens/s", "decode", "ms", "tokens/s"]
    assert [row.split()[:2] for row in rows] == [["8", "1"], ["24", "1"], ["8", "2"], ["24", "2"]]


def test_json_and_a_picture_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "speed.svg"
    assert main(["bench", FOLDER, *SMALL, "--json", "--plot", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["target"], found["max_new_tokens"]) == ("pylib-3m", "cpu", 3)
    for each in found["results"]:
        tokens = each["prompt_tokens"] * each["batch"]
        assert each["prefill_seconds"] * each["prefill_tokens_per_second"] == pytest.approx(tokens)
        assert each["decode_seconds"] * each["decode_tokens_per_second"] == pytest.approx(each["batch"])
    picture = ElementTree.parse(file).getroot()
    texts = {element.text for kind in ("text", "tspan") for element in picture.iter(f"{SVG}{kind}")}
    assert {"pylib-3m on cpu", "prefill, tokens/s", "decode, tokens/s", "batch 1", "batch 2"} <= texts
    assert len([*picture.iter(f"{SVG}polyline")]) == 4


def test_times_are_those_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = nn.LLM.load(FOLDER)
    slept = {"prefill": 0.03, "decode": 0.01}
    generate, now = llm.generate_ids, [0.0]

    def slow(ids: torch.Tensor, count: int) -> Any:
        found = generate(ids, count)
        for phase, seconds in slept.items():  # as if the model had taken so much longer
            now[0] += seconds * (1 if phase == "prefill" else count - 1)
            llm.phases.end(phase)
        return found

    monkeypatch.setattr(timings, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(llm, "generate_ids", slow)
    (found,) = nn.measure_speed(llm, [16], [2], new_tokens=4, repeats=1)
    assert found.prefill_seconds == pytest.approx(0.03)
    assert found.decode_seconds == pytest.approx(0.01)
    assert found.decode_tokens_per_second == pytest.approx(2 / found.decode_seconds)


def test_points_lie_where_their_numbers_are() -> None:
    picture = ElementTree.fromstring(plot("<a>", "x", [Panel("p", {"l": [(1, 10), (4, 20), (2, 0)]})]))
    places = [
        (float(c.get("cx", "")), float(c.get("cy", ""))) for c in picture.iter(f"{SVG}circle")
    ]  # by x: 1, 2, 4
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[1][1] - places[0][1] == pytest.approx(places[0][1] - places[2][1], abs=0.2)
    assert places[2][1] < places[0][1]  # more is higher up
    assert any(element.text == "<a>" for element in picture.iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lengths", "600"],
            "error: the prompts do not fit\n  600 tokens and 32 new ones, the context holds 512\n  help: give shorter --lengths, or fewer --max-new-tokens\n",
        ),
        (
            ["-n", "1"],
            "error: there is nothing to measure\n  1 new tokens in 3 runs, expected 2 or more in 1 or more\n",
        ),
        (
            [*SMALL, "--plot", "/nowhere/a.svg"],
            "error: /nowhere/a.svg cannot be written: No such file or directory\n",
        ),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", FOLDER, *arguments]) == 1
    assert capsys.readouterr().err == message


def test_lengths_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", FOLDER, "--lengths", "8,-1"])
    assert caught.value.code == 2
    assert "'8,-1' is no list of numbers such as 32,128,512,2048" in capsys.readouterr().err
