# SPDX-License-Identifier: Apache-2.0
"""An artefact for ranks: one program for all, and of the weights each rank reads its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from few_of import few_of

import nnfront as nn
from nnfront.artefact.manifest import digest_of_fields
from nnfront.cli import main
from nnfront.errors import LoadError
from nnfront.llm.hf_folder import compile_folder

Ran = list[dict[str, Any]]
WEIGHTS = "nnfront-weights-*.safetensors"


@pytest.fixture(scope="module")
def made(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact for two ranks, made by the command."""
    out = tmp_path_factory.mktemp("artefacts") / "two"
    assert main(["export", str(folders["qwen3_moe"]), "--tp", "2", "-o", str(out)]) == 0
    return out


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_rank_holds_its_own_files_and_what_all_have(ran: Ran) -> None:
    for number, rank in enumerate(ran):
        for found in rank["artefacts"].values():
            common, *own = found["sizes"]
            assert len(own) == len(ran)
            assert 0.9 * own[number] < found["weights"] <= common + own[number]
            assert max(own) < 0.6 * sum(found["sizes"])


@pytest.mark.parametrize("quant", few_of([None, "int4"]))
def test_what_is_loaded_is_what_ranks_make_of_the_folder(
    quant: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    nn.artefact.export(folders["deepseek_v3"], tmp_path / "made", ranks=4, quant=quant)
    folder = compile_folder(folders["deepseek_v3"], quant=quant, ranks=4, methods=nn.Methods.EXTEND)
    for rank in range(4):
        loaded = nn.load(tmp_path / "made", rank=rank, ranks=4).weights
        expected = folder.executable.of_rank(rank).load(folder.checkpoint).weights
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_other_ranks_files_are_not_looked_at(copied: Path) -> None:
    files = sorted(copied.glob(WEIGHTS))
    with open(files[2], "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    nn.load(copied, rank=0, ranks=2)
    with pytest.raises(LoadError, match=rf"{files[2].name}: its content is not what was written"):
        nn.load(copied, rank=1, ranks=2)
    assert any(files[2].name in problem for problem in nn.artefact.check(copied))


class TestAnotherNumber:
    def test_one_process_is_refused(self, made: Path) -> None:
        with pytest.raises(LoadError) as raised:
            nn.LLM.load(made)
        assert str(raised.value) == (
            f"{made} was made for 2 ranks\n"
            "  got one process\n"
            "  help: load it with --tp 2, or export the model again without --tp"
        )

    def test_another_number_is_refused_with_both(self, made: Path) -> None:
        with pytest.raises(LoadError, match=r"made for 2 ranks\n  got 4 ranks\n.*again with --tp 4"):
            nn.load(made, rank=0, ranks=4)

    def test_an_artefact_of_one_process_is_refused_by_ranks(
        self, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        nn.artefact.export(folders["llama"], tmp_path / "one")
        assert json.loads((tmp_path / "one" / "nnfront.json").read_text())["schema"] == 1
        with pytest.raises(LoadError, match=r"made for one process\n  got 2 ranks\n  help: load it without"):
            nn.load(tmp_path / "one", rank=1, ranks=2)

    def test_a_manifest_that_says_another_number_than_the_program_is_refused(self, copied: Path) -> None:
        manifest = copied / "nnfront.json"
        fields = json.loads(manifest.read_text()) | {"ranks": 4}
        manifest.write_text(json.dumps(fields | {"sha256": digest_of_fields(fields)}))
        with pytest.raises(LoadError, match=r"not for as many ranks.*\n  got 2 ranks\n  expected 4 ranks"):
            nn.load(copied, rank=0, ranks=4)

    @pytest.mark.parametrize(("ranks", "schema"), [(1, 3), (0, 3), ("2", 3), (2, 2)])
    def test_a_manifest_whose_number_cannot_be_is_damaged(
        self, ranks: Any, schema: int, copied: Path
    ) -> None:
        manifest = copied / "nnfront.json"
        fields = json.loads(manifest.read_text()) | {"ranks": ranks, "schema": schema}
        manifest.write_text(json.dumps(fields | {"sha256": digest_of_fields(fields)}))
        with pytest.raises(LoadError, match=r"nnfront\.json is damaged: ranks is"):
            nn.load(copied, rank=0, ranks=2)


class TestOfOneRankAlone:
    def test_no_artefact_is_made_of_its_session(self, made: Path, tmp_path: Path) -> None:
        session = nn.load(made, rank=1, ranks=2)
        with pytest.raises(LoadError, match=r"one of 2 ranks.*\n  help: .*nnfront export DIR --tp 2 -o OUT"):
            session.save(tmp_path / "out")

    def test_nor_of_its_program(self, folders: dict[str, Path], tmp_path: Path) -> None:
        folder = compile_folder(folders["llama"], ranks=2)
        with pytest.raises(LoadError, match=r"what one of 2 ranks runs\n  help: take what all of them run"):
            folder.executable.of_rank(1).save(tmp_path / "out", folder.checkpoint)


def test_what_is_checked_shown_and_compared_is_that_of_all_ranks(
    made: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nn.artefact.check(made) == []
    assert main(["show", str(made)]) == 0
    assert main(["diff", str(made), str(copied)]) == 0
    assert "differ" not in capsys.readouterr().out
