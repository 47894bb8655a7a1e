# SPDX-License-Identifier: Apache-2.0
"""Folders from outside are refused in words or opened: no other exception, no crash, no hang, no memory without end, no file of others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from artefact_cases import write_folder
from few_of import few_of

import nnfront as nn

HERE = Path(__file__).parent
COUNTS = {"checkpoint": 10, "artefact": 10, "kernels": 4}


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    """A whole folder of each kind."""
    place = Path(tmp_path_factory.mktemp("good"))
    folder = write_folder(place / "checkpoint")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = dict.fromkeys(nn.Checkpoint(folder), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    nn.LLM.load(folder).save(place / "artefact")
    shutil.copytree(HERE / "golden" / "kernels-2", place / "kernels")
    return place


def open_spoiled(counts: dict[str, int], good: Path, place: Path, first: int) -> None:
    """Open so many of each kind in a process of their own, so that a death of it is seen as well."""
    arguments = [str(HERE / "hostile_folders.py"), json.dumps(counts), str(good), str(place), str(first)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}, then exit code {done.returncode}\n{done.stderr[-3000:]}"
    assert len(lines) == 2 * sum(counts.values())
    results = (result for _, result in lines[1::2])
    for count in counts.values():
        assert [*islice(results, count)].count("opened") < 0.8 * count  # hostile values reach something


@pytest.mark.parametrize("times", few_of([1, 3]))
def test_a_hostile_folder_is_refused_or_opened(times: int, good: Path, tmp_path: Path) -> None:
    open_spoiled({kind: times * count for kind, count in COUNTS.items()}, good, tmp_path / "place", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_a_hostile_folder_is_refused_or_opened_two_thousand_times(
    kind: str, good: Path, tmp_path: Path
) -> None:
    open_spoiled({kind: 2000}, good, tmp_path / "place", 1000)
