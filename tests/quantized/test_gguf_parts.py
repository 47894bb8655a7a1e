# SPDX-License-Identifier: Apache-2.0
"""Models that the library which defines GGUF writes into several files are the models of one file; parts that do not fit are refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import IDS, llama
from gguf import GGUFReader
from gguf_files import write

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in parts of eight tensors, and beside them the same in one file, in a folder of its own."""
    (tmp_path / "whole").mkdir()
    torch.manual_seed(0)
    model = llama(**SIZES)
    write(tmp_path / "whole" / "m.gguf", model, types="Q8_0")
    write(tmp_path / "m.gguf", model, types="Q8_0", tensors_each=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in found] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_any_part_and_the_folder_are_the_whole_model(parts: list[Path]) -> None:
    folder = parts[0].parent
    expected = nn.LLM.load(folder / "whole").logits(IDS)
    for path in (*parts, folder):
        assert torch.equal(nn.LLM.load(path).logits(IDS), expected)


def test_the_tensors_are_those_that_the_library_reads_of_each_part(parts: list[Path]) -> None:
    checkpoint = nn.Checkpoint(parts[1])
    assert checkpoint.files == tuple(parts)
    read = {t.name: t for part in parts for t in GGUFReader(part).tensors}
    assert set(checkpoint.names) == set(read)
    for name, tensor in read.items():
        stored = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        assert np.array_equal(checkpoint[name].view(torch.uint8).numpy().reshape(-1), stored)


def test_links_to_parts_in_a_cache_are_followed(parts: list[Path], tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--m" / "blobs", tmp_path / "models--m" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, part in enumerate(parts):
        part.rename(blobs / f"blob{number}")
        os.symlink(f"../../blobs/blob{number}", snapshot / part.name)
    expected = nn.LLM.load(tmp_path / "whole").logits(IDS)
    assert torch.equal(nn.LLM.load(snapshot / parts[2].name).logits(IDS), expected)


def test_the_command_line_takes_a_part(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(parts[0])]) == 0
    assert "fits: every weight has its tensor" in capsys.readouterr().out


def test_parts_that_are_missing_are_named(parts: list[Path]) -> None:
    for part in parts[1:]:
        part.unlink()
    for path in (parts[0], parts[0].parent):
        with pytest.raises(LoadError, match="of a model in 3 GGUF files 2 are not there") as caught:
            nn.LLM.load(path)
        assert caught.value.details == ("m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
        assert caught.value.help == "put all parts into one folder"


def test_models_side_by_side_are_told_apart_by_the_part_that_is_named(parts: list[Path]) -> None:
    write(parts[0].parent / "other.gguf", llama(**SIZES), types="Q4_0", tensors_each=10)
    assert nn.Checkpoint(parts[0]).files == tuple(parts)
    with pytest.raises(LoadError, match="there are several models in GGUF in this folder") as caught:
        nn.LLM.load(parts[0].parent)
    assert "of one that has parts any will do" in caught.value.help


def changed(part: Path, key: bytes, value: bytes) -> None:
    """Overwrite the value of a key."""
    data = bytearray(part.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    data[at : at + len(value)] = value
    part.write_bytes(data)


@pytest.mark.parametrize(
    ("part", "key", "value", "problem"),
    [
        (1, b"split.no", struct.pack("<H", 2), "m-00002-of-00003.gguf: split.no is 2, expected 1"),
        (2, b"split.count", struct.pack("<H", 4), "m-00003-of-00003.gguf: split.count is 4, expected 3"),
        (0, b"split.tensors.count", struct.pack("<i", 9), "m-00001-of-00003.gguf: split.tensors.count is 9, expected 21"),
    ],
)  # fmt: skip
def test_parts_that_do_not_say_what_their_names_do_are_refused(
    parts: list[Path], part: int, key: bytes, value: bytes, problem: str
) -> None:
    changed(parts[part], key, value)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(parts[0])
    assert caught.value.details == (problem,)


def test_parts_whose_metadata_disagree_are_refused(tmp_path: Path) -> None:
    for name, metadata in (("a", {"general.name": "one"}), ("b", {"general.name": "two"})):
        write(tmp_path / f"{name}.gguf", llama(**SIZES), types="Q8_0", tensors_each=11, metadata=metadata)
    (tmp_path / "b-00001-of-00002.gguf").rename(tmp_path / "a-00002-of-00002.gguf")
    with pytest.raises(LoadError) as caught:
        nn.Checkpoint(tmp_path / "a-00001-of-00002.gguf")
    assert any("is in a-00001-of-00002.gguf as well" in line for line in caught.value.details)


def test_a_value_that_two_parts_say_differently_is_named() -> None:
    from nnfront.weights.gguf_parts import disagreements
    from nnfront.weights.safetensors import Header

    def header(number: int, said: str) -> Header:
        metadata = {"split.no": number, "split.count": 2, "split.tensors.count": 0, "general.name": said}
        return Header(Path(f"m-{number}"), {}, metadata, 0, 0)

    assert disagreements([header(0, "one"), header(1, "one")]) == []
    problem = "m-1: 'general.name' is 'two', and 'one' in m-0"
    assert disagreements([header(0, "one"), header(1, "two")]) == [problem]
