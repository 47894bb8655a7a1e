# SPDX-License-Identifier: Apache-2.0
"""Files as memory: where their pages lie, and what happens when they cannot be read."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nnfront as nn
from nnfront.artefact import integrity
from nnfront.errors import LoadError
from nnfront.weights import Checkpoint
from nnfront.weights.mapped_memory import PAGE, fetch, whole

HUGE = 2 << 20


def opened(file: Path) -> int:
    return os.open(file, os.O_RDONLY)


@pytest.mark.parametrize("bytes_before", [0, PAGE, 3 * PAGE + 64, HUGE + PAGE])
def test_a_large_tensor_lies_so_that_huge_pages_fit(tmp_path: Path, bytes_before: int) -> None:
    tensors = {"a": torch.zeros(bytes_before, dtype=torch.uint8), "x": torch.arange(3 << 20)}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    x = checkpoint["x"]
    assert (x.data_ptr() - checkpoint.info("x").offset) % HUGE == 0
    assert torch.equal(x, tensors["x"])


def test_tensors_of_a_file_that_was_mapped_whole_are_views_of_it(tmp_path: Path) -> None:
    tensors = {name: torch.randn(n) for name, n in (("a", 1 << 20), ("b", 1 << 16), ("c", 5000), ("d", 0))}
    save_file(tensors, tmp_path / "x.safetensors")
    size = (tmp_path / "x.safetensors").stat().st_size
    memory = whole(tmp_path / "x.safetensors", size, opened(tmp_path / "x.safetensors"))
    checkpoint = Checkpoint(tmp_path / "x.safetensors", memory={tmp_path / "x.safetensors": memory})
    places = {checkpoint[name].data_ptr() - checkpoint.info(name).offset for name in "ab"}
    assert len(places) == 1
    assert all(torch.equal(checkpoint[name], x) for name, x in tensors.items())
    assert torch.equal(checkpoint.joined(["a", "b", "c"]), torch.cat([tensors[name] for name in "abc"]))


def test_small_tensors_of_such_a_file_begin_where_kernels_read_them(tmp_path: Path) -> None:
    tensors = {name: torch.randn(n) for name, n in (("a", 3), ("b", 5), ("c", 1 << 16))}
    save_file(tensors, tmp_path / "x.safetensors")
    size = (tmp_path / "x.safetensors").stat().st_size
    memory = whole(tmp_path / "x.safetensors", size, opened(tmp_path / "x.safetensors"))
    checkpoint = Checkpoint(tmp_path / "x.safetensors", memory={tmp_path / "x.safetensors": memory})
    assert any(checkpoint.info(name).offset % 64 for name in "ab")
    assert all(checkpoint[name].data_ptr() % 64 == 0 for name in "ab")
    assert all(torch.equal(checkpoint[name], x) for name, x in tensors.items())


def test_a_tensor_at_an_odd_place_of_such_a_file_is_read(tmp_path: Path) -> None:
    save_file({"x": torch.arange(6.0)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little") + 1
    (tmp_path / "x.safetensors").write_bytes(
        length.to_bytes(8, "little") + data[8 : 7 + length] + b" " + data[7 + length :]
    )
    memory = whole(tmp_path / "x.safetensors", len(data) + 1, opened(tmp_path / "x.safetensors"))
    x = Checkpoint(tmp_path / "x.safetensors", memory={tmp_path / "x.safetensors": memory})["x"]
    assert x.data_ptr() % 4 == 0
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_checked_of_an_artefact_is_what_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[int, int]] = []

    def crc32(data: memoryview, crc: int) -> int:
        if isinstance(data, memoryview):
            begin = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
            checked.append((begin, begin + len(data)))
        return zlib.crc32(data, crc)

    ir = nn.Linear(512, 512, bias=False).export({"forward": {"x": nn.spec.Tensor([1, 512])}})
    nn.compile(ir).load({"weight": torch.randn(512, 512)}).save(tmp_path / "a")
    monkeypatch.setattr(integrity, "crc32", crc32)
    session = nn.load(tmp_path / "a")
    used = [value.data_ptr() for value in session.weights.values() if value.numel()]
    assert used
    assert all(any(begin <= place < end for begin, end in checked) for place in used)


def test_a_file_that_ends_early_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(size := 512 << 10))  # less is read at once
    memory = whole(file, size, opened(file))
    fetch(file, memory)
    os.truncate(file, PAGE)
    fetch(file, memory[:PAGE])
    with pytest.raises(LoadError, match="x: reading failed: Input/output error"):
        fetch(file, memory)
