# SPDX-License-Identifier: Apache-2.0
"""What a manifest claims of a program is held against what the program says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import rehash

import nnfront as nn
from nnfront import spec
from nnfront.errors import LoadError, RunError


class Sums(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = spec.Tensor([nn.Dim("n", min=8, multiple_of=4), 2])
    nn.compile(Sums().export({"forward": {"x": x}})).load({}).save(tmp_path / "a")
    return tmp_path / "a"


def forge(folder: Path, **dims: int) -> None:
    file = folder / "nnfront.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dims": dims}))
    rehash(folder)


@pytest.mark.parametrize("number", [1, 9, 0])
def test_a_dim_that_a_method_does_not_take_is_refused(folder: Path, number: int) -> None:
    forge(folder, n=number)
    with pytest.raises(LoadError) as error:
        nn.load(folder)
    assert error.value.details == (
        f"the manifest says that dim 'n' is {number}",
        "  in forward it is at least 8, a multiple of 4",
    )


def test_a_dim_that_a_method_takes_is_what_it_says(folder: Path) -> None:
    forge(folder, n=12, other=3)
    session = nn.load(folder)
    assert session["forward"](torch.ones(12, 2)).shape == (12, 2)
    with pytest.raises(RunError, match="'n'"):
        session["forward"](torch.ones(8, 2))
